"""Ends of requests whose pages other engines need: they are told once the pages are where those find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tidemill.runner.base import Runner
from tidemill.sched.clock import Clock
from tidemill.sched.request import HANDED_OVER
from tidemill.sched.scheduler import Scheduler
from tidemill.wire import Delta

_EXPORT_S = 0.05  # waited for, at most
_MOVES_S = 0.002  # between two looks


class _Ending(NamedTuple):
    delta: Delta
    keys: frozenset[bytes]  # contents that are on their way
    until_s: float


class Endings:
    """Of an engine that exports. True while there are any."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Clock, take_moves: Callable[[], None]) -> None:
        self._scheduler, self._runner, self._clock, self._take_moves = scheduler, runner, clock, take_moves
        self._kept: list[_Ending] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, deltas: list[Delta]) -> list[Delta]:
        """Keeps the ends, and returns what is told at once: also the token of a request that is handed over."""
        told = [delta for delta in deltas if not delta.finish_reason]
        ended = [delta for delta in deltas if delta.finish_reason]
        if ended:
            keys, until_s = frozenset(self._scheduler.kv.exporting), self._clock.now() + _EXPORT_S
            for delta in ended:
                if delta.finish_reason == HANDED_OVER:
                    told.append(msgspec.structs.replace(delta, finish_reason=None, timings=None))
                    delta = msgspec.structs.replace(delta, token_ids=[], logprobs=None, prompt_logprobs=None)
                self._kept.append(_Ending(delta, keys, until_s))
        return told

    def exported(self) -> list[Delta]:
        """Ends whose pages are exported by now. That is waited for, for a moment: the next step may take long."""
        while True:
            moves = self._scheduler.plan_moves()
            if moves is not None:
                self._runner.change_pages(moves)
            mover, exporting, now = self._runner.mover, self._scheduler.kv.exporting, self._clock.now()
            over = [one for one in self._kept if exporting.isdisjoint(one.keys) or now > one.until_s]
            if mover is None or len(over) == len(self._kept):
                break
            mover.wait(_MOVES_S)
            self._take_moves()
        self._kept = [one for one in self._kept if one not in over]
        return [one.delta for one in over]
