"""AdapterStore: the LoRA adapters an engine knows, and those that are in the slots of its runner.

An adapter is known from when it is loaded until it is unloaded. A request holds its adapter, which
stays in its slot meanwhile. If there are more adapters than slots, the least recently used one that
nobody holds makes room, and is read again when it is asked for. Files are read by a thread of their
own; slots change between steps.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.capabilities import require
from tidemill.engine.moments import Engine, EngineComponents, Part, Submission
from tidemill.engine.outputs import LiveRequest
from tidemill.engine.refusals import refusal
from tidemill.errors import AdapterError, InvalidRequest, TidemillError
from tidemill.runner.base import AdapterSlots
from tidemill.sched.request import Request
from tidemill.types import events
from tidemill.types.wire import (
    AdapterInfo,
    AdapterReply,
    Expect,
    LoadAdapter,
    Submit,
    ToEngine,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from tidemill.weights.lora import LoraWeights

_LOOK_EVERY_S = 0.002  # for an adapter to be read, when there is nothing else to do


@dataclass(slots=True, eq=False)
class Adapter:
    adapter_id: int
    name: str
    path: str
    digest: str = ""  # of its content; empty until it was read for the first time
    rank: int = 0
    slot: int = -1  # -1: it is in none
    num_users: int = 0  # requests that hold it
    last_use: int = 0
    is_leaving: bool = False  # unloaded, once nobody holds it
    reading: Future[tuple[LoraWeights, float]] | None = None

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.adapter_id, self.name, self.path, self.digest, self.rank)


class AdapterStore(Part):
    def __init__(self, num_slots: int, max_rank: int) -> None:
        self._max_rank = max_rank
        self._slots: list[Adapter | None] = [None] * num_slots
        self._known: dict[int, Adapter] = {}
        self._of: dict[str, Adapter] = {}  # by request id
        # loaded, and whoever did has not been told how it went
        self._unanswered: list[Adapter] = []
        self._refused: list[AdapterReply] = []  # loads that could not even begin
        self._reading: list[Adapter] = []
        self._uses = count(1)
        self._reader: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> AdapterStore:
        return cls(engine.config.max_loras, engine.config.max_lora_rank)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._known.values())

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    # ---- moments

    def delay(self, submission: Submission) -> str:
        """Requests whose adapters are in no slot wait in turn, so that each gets one at some time."""
        if not submission.request.adapter:
            return ""
        adapter, delayed = self.get(submission.request.adapter), self.engine.delayed
        is_next = submission is next(iter(delayed.values()), submission)
        if not is_next or not self.bring(adapter):
            return f"its adapter {adapter.name} is read into a slot"
        submission.lora_slot, submission.salt = adapter.slot, self.salt(submission.request)
        return ""

    def queued(self, submission: Submission, live: LiveRequest) -> None:
        if submission.request.adapter:
            adapter = self._of[live.request_id] = self.get(submission.request.adapter)
            self.hold(adapter)

    def end(self, live: LiveRequest, request: Request) -> None:
        if not live.requests and (adapter := self._of.pop(live.request_id, None)):
            self.release(adapter)

    def message(self, message: ToEngine) -> None:
        if isinstance(message, UnloadAdapter):
            self.unload(message.adapter_id)
        elif isinstance(message, LoadAdapter):
            try:
                self.load(message)
            except TidemillError as error:
                self._refused.append(AdapterReply(message.adapter_id, None, refusal(None, error)))

    def replies(self) -> list[AdapterReply]:
        refused, self._refused = self._refused, []
        return refused + self.answers()

    def has_work(self) -> bool:
        return bool(self._reading)

    def before_plan(self) -> tuple[()]:
        """Drops weights that were read for requests that have left."""
        if self._reading:
            self._drop_unwanted(
                {submission.request.adapter for submission in self.engine.delayed.values()}
            )
        return ()

    def idle(self) -> None:
        if self._reading:
            wait(
                [adapter.reading for adapter in self._reading if adapter.reading is not None],
                _LOOK_EVERY_S,
            )

    # ---- adapters come and go

    def salt(self, request: Submit | Expect) -> str:
        """The salt of the prefix cache: pages depend on the adapter's content. No salt of a request
        can be that of another adapter."""
        digest = self.get(request.adapter).digest if request.adapter else ""
        return f"{digest}\n{request.salt}" if digest or request.salt else ""

    def load(self, message: LoadAdapter) -> None:
        """It is known from now on; `answers` says later whether it could be read."""
        adapter = Adapter(message.adapter_id, message.name, message.path, message.digest)
        self._begin(adapter)
        self._known[adapter.adapter_id] = adapter
        self._unanswered.append(adapter)

    def load_now(self, adapter_id: int, name: str, path: str) -> Adapter:
        """Raises what is wrong with it."""
        self.load(LoadAdapter(adapter_id, name, path))
        adapter = self._known[adapter_id]
        assert adapter.reading is not None
        wait([adapter.reading])
        (answer,) = (answer for answer in self.answers() if answer.adapter_id == adapter_id)
        if answer.error is not None:
            raise AdapterError(
                f"Adapter {name!r}: {answer.error.message}", fix=answer.error.fix, param="loras"
            )
        return adapter

    def answers(self) -> list[AdapterReply]:
        """The answers to loads that have ended. Weights that were read go into a slot, if there is
        one to be had."""
        answers = []
        for adapter in [
            adapter
            for adapter in self._unanswered
            if adapter.reading is None or adapter.reading.done()
        ]:
            self._unanswered.remove(adapter)
            try:
                if adapter.reading is not None and (
                    adapter.is_leaving or not self._settle(adapter)
                ):
                    self._stop_reading(adapter)  # when it is asked for, it is read again
                answers.append(AdapterReply(adapter.adapter_id, adapter.info))
            except TidemillError as error:
                self._known.pop(adapter.adapter_id, None)
                answers.append(AdapterReply(adapter.adapter_id, None, refusal(None, error)))
        return answers

    def unload(self, adapter_id: int) -> None:
        """It is not known any more. Its slot is free when no request holds it."""
        adapter = self._known.pop(adapter_id, None)
        if adapter is not None:
            adapter.is_leaving = True
            self._leave_if_unused(adapter)

    def get(self, adapter_id: int) -> Adapter:
        if adapter_id not in self._known:
            known = ", ".join(repr(adapter.name) for adapter in self._known.values()) or "none"
            raise InvalidRequest(
                "The adapter is not loaded.", fix=f"Loaded are: {known[:1000]}.", param="model"
            )
        return self._known[adapter_id]

    # ---- requests use them

    def bring(self, adapter: Adapter) -> bool:
        """Tells if the adapter is in a slot. If not, that is under way. Raises what is wrong with
        its files."""
        if adapter.slot >= 0:
            return True
        if adapter.reading is None:
            self._begin(adapter)
            # also if it is read by now: what is wrong with it is told when it is asked for again
            return False
        return adapter.reading.done() and self._settle(adapter)

    def _drop_unwanted(self, wanted: Collection[int]) -> None:
        """Drops the weights that were read for requests that have left. `wanted`: numbers of
        adapters that others wait for."""
        for adapter in [
            adapter
            for adapter in self._reading
            if adapter.adapter_id not in wanted and adapter not in self._unanswered
        ]:
            if adapter.reading is not None and adapter.reading.done():
                self._stop_reading(adapter)

    def hold(self, adapter: Adapter) -> None:
        assert adapter.slot >= 0
        adapter.num_users += 1
        adapter.last_use = next(self._uses)

    def release(self, adapter: Adapter) -> None:
        adapter.num_users -= 1
        self._leave_if_unused(adapter)

    # ---- slots

    @property
    def _loras(self) -> AdapterSlots:
        assert self.engine.runner.loras is not None, "an adapter was read"
        return self.engine.runner.loras

    def _begin(self, adapter: Adapter) -> None:
        require("loading adapters", self.engine.config.features)
        slots = self.engine.runner.loras
        assert slots is not None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1)
        adapter.reading = self._reader.submit(_read, adapter.path, slots.shapes, self._max_rank)
        self._reading.append(adapter)

    def _stop_reading(self, adapter: Adapter) -> None:
        adapter.reading = None
        self._reading.remove(adapter)

    def _settle(self, adapter: Adapter) -> bool:
        """Put what was read into a slot. False: every slot is held by requests."""
        assert adapter.reading is not None
        try:
            weights, began = adapter.reading.result()
        except TidemillError:
            self._stop_reading(adapter)
            raise
        except Exception as error:  # no memory, a disk that fails
            self._stop_reading(adapter)
            raise AdapterError(
                f"{adapter.path} cannot be read: {type(error).__name__}: {error}."
            ) from error
        if adapter.digest and adapter.digest != weights.digest:
            self._stop_reading(adapter)
            what = f"The files of the adapter {adapter.name!r} have changed since it was loaded."
            raise AdapterError(what, fix="Unload it, and load it again.", param="model")
        adapter.digest, adapter.rank = weights.digest, weights.rank
        slot = self._make_room(adapter)
        if slot is None:
            return False
        self._loras.put(slot, weights.pairs)
        self._stop_reading(adapter)
        self._slots[slot], adapter.slot = adapter, slot
        adapter.last_use = next(self._uses)
        took_s, now = time.monotonic() - began, self.engine.clock.now()
        self.engine.emit(events.AdapterLoaded(now, adapter.name, slot, weights.num_bytes, took_s))
        return True

    def _make_room(self, adapter: Adapter) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        unused = [
            adapter for adapter in self._slots if adapter is not None and not adapter.num_users
        ]
        if not unused:
            return None
        oldest = min(unused, key=lambda adapter: adapter.last_use)
        slot = oldest.slot
        self._leave(oldest, f"least recently used, to make room for {adapter.name}")
        return slot

    def _leave_if_unused(self, adapter: Adapter) -> None:
        if adapter.is_leaving and not adapter.num_users:
            if adapter.slot >= 0:
                self._leave(adapter, "unloaded")
            reason = f"the adapter {adapter.name} was unloaded"
            self.engine.scheduler.retention.end_of(adapter.adapter_id, reason)

    def _leave(self, adapter: Adapter, reason: str) -> None:
        self._loras.put(adapter.slot, {})
        self.engine.emit(
            events.AdapterLeft(self.engine.clock.now(), adapter.name, adapter.slot, reason)
        )
        self._slots[adapter.slot], adapter.slot = None, -1


def _read(
    path: str, shapes: dict[str, tuple[int, int]], max_rank: int
) -> tuple[LoraWeights, float]:
    from tidemill.weights.lora import read_lora  # brings torch

    began = time.monotonic()
    return read_lora(Path(path), shapes, max_rank), began
