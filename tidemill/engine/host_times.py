"""HostTimes: what the engine's loop does between the end of a step and the plan of the next."""

from __future__ import annotations

import gc
import time
from typing import Any

from tidemill.sched.clock import Clock, MonotonicClock
from tidemill.types import events
from tidemill.types.events import EventSink


class HostTimes:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # in simulated time nothing of this takes any
        self._is_real = isinstance(clock, MonotonicClock)
        self._since_s = clock.now()
        self._spent = {"outputs": 0.0, "messages": 0.0, "idle": 0.0}
        self._gc_s = self._gc_told_s = self._gc_began_s = 0.0

    def watch_gc(self) -> None:
        """From now on the time of garbage collections is told, too. For a process that has one
        engine, to its end."""
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_began_s = time.monotonic()
        else:
            self._gc_s += time.monotonic() - self._gc_began_s

    def mark(self, part: str) -> None:
        """Since the last mark, the loop did this."""
        now, of_gc = self._clock.now(), self._gc_s - self._gc_told_s
        self._spent[part] += max(now - self._since_s - of_gc, 0.0)
        self._spent["gc"] = self._spent.get("gc", 0.0) + of_gc
        self._since_s, self._gc_told_s = now, self._gc_s

    def tell(self, emit: EventSink) -> None:
        """A step is about to be planned."""
        now, spent = self._clock.now(), self._spent
        of_gc = spent.pop("gc", 0.0) + self._gc_s - self._gc_told_s
        if self._is_real and (of_gc or any(spent.values())):
            emit(events.LoopTimed(now, spent["outputs"], spent["messages"], spent["idle"], of_gc))
        self.begin(now)

    def begin(self, now: float) -> None:
        """A step has ended."""
        self._spent = {"outputs": 0.0, "messages": 0.0, "idle": 0.0}
        self._since_s, self._gc_told_s = now, self._gc_s
