"""The source of time. The scheduler never reads the system clock itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that advances by calls only: for tests and simulation."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)
