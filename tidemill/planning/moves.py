"""Page moves that only take time: host memory and disk behind a simulated KV cache."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tidemill.kv.tiers import Moved, PageMove, Tier
from tidemill.sched.clock import VirtualClock


class SimMover:
    """Loads and stores of each tier go over a line of their own, one page after the other."""

    def __init__(
        self, clock: VirtualClock, page_bytes: int, host_rate: float, disk_rate: float
    ) -> None:
        """Rates: bytes a second."""
        self._clock, self._page_bytes = clock, page_bytes
        self._rates = {Tier.HOST: host_rate, Tier.DISK: disk_rate}
        self._free_s: dict[tuple[Tier, bool], float] = {}
        # a heap: end, number of the move, seconds
        self._under_way: list[tuple[float, int, float]] = []

    def begin(self, moves: Sequence[PageMove]) -> None:
        for move in moves:
            line, seconds = (move.tier, move.is_load), self._page_bytes / self._rates[move.tier]
            end_s = max(self._clock.now(), self._free_s.get(line, 0.0)) + seconds
            self._free_s[line] = end_s
            heapq.heappush(self._under_way, (end_s, move.number, seconds))

    def done(self) -> list[Moved]:
        now, moved = self._clock.now(), list[Moved]()
        while self._under_way and self._under_way[0][0] <= now:
            _, number, seconds = heapq.heappop(self._under_way)
            moved.append(Moved(number, self._page_bytes, seconds))
        return moved

    def learned(self) -> None:
        """There are no other engines."""

    def wait(self, seconds: float) -> None:
        """Until a move is over, at most so long."""
        end_s = self._clock.now() + seconds
        self._clock.advance_to(min(end_s, self._under_way[0][0]) if self._under_way else end_s)

    def drain(self) -> None:
        self._clock.advance_to(max((end_s for end_s, _, _ in self._under_way), default=0.0))

    def close(self) -> None:
        """There is nothing to end."""
