"""Routing: which of several engines gets a request. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.sched.placement import Placement, prefix_keys
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.inputs import content_ids
from tidemill.types.wire import Delta, Ready, Resumed, Submit

BLOCK_LEN = 32  # tokens of a prompt that are remembered together
_TOKEN_BYTES = 4


@dataclass(slots=True)
class Route:
    """A request under way: where it is, and what was delivered."""

    outputs: list[list[int]]
    client: EngineClient | None = None
    over: set[int] = field(default_factory=set)  # samples
    is_known: bool = False  # an engine has reported it as submitted
    # of engines in a row that gave it no token, though none need have died of it
    num_losses: int = 0

    def take(self, delta: Delta) -> Delta | None:
        """The delta that the reader gets; None: nothing."""
        self.outputs[delta.index] += delta.token_ids
        self.num_losses = 0 if delta.token_ids else self.num_losses
        if delta.finish_reason is not None:
            self.over.add(delta.index)
        return delta

    @property
    def left(self) -> list[Resumed]:
        return [
            Resumed(index, tokens)
            for index, tokens in enumerate(self.outputs)
            if index not in self.over
        ]


class Routing:
    """All engines are alike, and a request stays with one of them: the one that `sched.placement`
    says."""

    names: Sequence[str] = ()  # what each engine is for, where that differs

    def __init__(self, placement: Placement | None = None) -> None:
        self._placement = placement or Placement()

    def begin(self, clients: Sequence[EngineClient], emit: Callable[[int, Event], None]) -> None:
        """`emit`: with the number of the engine that an event is about."""

    def options(self, options: EngineOptions, number: int) -> EngineOptions:
        """The options of this engine."""
        return options

    def check(self, ready: Ready) -> None:
        """Raises if the model or its settings do not allow it."""

    def new_route(self, request: Submit) -> Route:
        return Route([[] for _ in range(request.params.n)])

    def place(
        self, request: Submit, route: Route, usable: Mapping[str, EngineClient]
    ) -> tuple[str, Submit]:
        """The engine's name, and what it gets. `usable`: those that work, if any does; else those
        that are restarted."""
        keys = keys_of(request.prompt_ids, request)
        chosen = self._placement.choose(
            keys, {name: client.num_pending for name, client in usable.items()}
        )
        self._placement.note(chosen.name, keys)
        return chosen.name, request

    def gate(self, request: Submit) -> str:
        """Why a request must wait before its engine gets it; empty: it need not (see EngineClient)."""
        return ""

    def changed(self) -> None:
        """A request has ended, or an engine was given up."""

    def take(self, number: int, batch: Sequence[Event]) -> None:
        """Events of an engine."""
        if any(isinstance(event, events.EngineRestarted) for event in batch):
            self.forget(str(number))  # its cache is empty

    def forget(self, name: str) -> None:
        """Its cache is empty, or it is gone."""
        self._placement.forget(name)

    def end(self, request: Submit, route: Route) -> None:
        """The request is over, or its reader has left."""


def keys_of(tokens: Sequence[int], request: Submit) -> list[int]:
    """The keys of the leading blocks of tokens, by which engines that have computed them are known."""
    ids = content_ids(tokens, request.segments).tobytes()  # they are checked by the engine
    return prefix_keys(f"{request.adapter}\0{request.salt}".encode(), ids, _TOKEN_BYTES * BLOCK_LEN)
