"""Ends of requests whose pages other engines need: they are told once the pages are where those find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tidemill.runner.base import Runner
from tidemill.sched.clock import Clock
from tidemill.sched.progress import Progress
from tidemill.sched.request import HANDED_OVER, Request
from tidemill.sched.scheduler import Scheduler
from tidemill.wire import Delta

_EXPORT_S = 0.05  # waited for, at most
_MOVES_S = 0.002  # between two looks


class _Ending(NamedTuple):
    delta: Delta
    keys: set[bytes]  # its contents that are on their way
    until_s: float


class Endings:
    """The ends of requests in an engine that exports, which wait until their pages are exported. True while there are any."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, take_moves: Callable[[], None]) -> None:
        self._scheduler, self._runner, self._clock, self._take_moves = scheduler, runner, clock, take_moves
        self._kept: list[_Ending] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, deltas: list[Delta], progress: Sequence[Progress]) -> list[Delta]:
        """Keeps the ends, and returns what is told at once: also the token of a request that is handed over. `progress`: of the
        step that the deltas are of."""
        at_once = [delta for delta in deltas if not delta.finish_reason]
        ended = [delta for delta in deltas if delta.finish_reason]
        if ended:
            requests = {item.request.request_id: item.request for item in progress if item.finish_reason}
            until_s = self._clock.now() + _EXPORT_S
            for delta in ended:
                keys = self._keys(requests.get(delta.request_id) or requests.get(f"{delta.request_id}:{delta.index}"))
                if delta.finish_reason == HANDED_OVER:
                    at_once.append(msgspec.structs.replace(delta, finish_reason=None, timings=None))
                    delta = msgspec.structs.replace(delta, token_ids=[], logprobs=None, prompt_pieces=None)
                self._kept.append(_Ending(delta, keys, until_s))
        return at_once

    def drop(self, request_id: str, index: int | None = None) -> None:
        """The request was aborted or has failed: its ends, or that of one sample, are not told. Another may take its id."""
        self._kept = [kept for kept in self._kept if kept.delta.request_id != request_id or index not in (None, kept.delta.index)]

    def _keys(self, request: Request | None) -> set[bytes]:
        """Contents of its pages that are on their way. Which tokens of beams were kept is not known: all that are."""
        kv = self._scheduler.kv
        return kv.exporting if request is None else kv.exporting_of(request.tokens, request.spec.salt, request.spec.segments)

    def exported(self) -> list[Delta]:
        """Ends whose pages are exported by now. That is waited for, for a moment: the next step may take long."""
        while True:
            moves = self._scheduler.plan_moves()
            if moves is not None:
                self._runner.change_pages(moves)
            mover, exporting, now = self._runner.mover, self._scheduler.kv.exporting, self._clock.now()
            over = [ending for ending in self._kept if exporting.isdisjoint(ending.keys) or now > ending.until_s]
            if mover is None or len(over) == len(self._kept):
                break
            mover.wait(_MOVES_S)
            self._take_moves()
        self._kept = [ending for ending in self._kept if ending not in over]
        return [ending.delta for ending in over]
