"""GroupMover: the page movers of all ranks, as one. Every rank moves its own part of a page, by the
same plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from tidemill.kv.tiers import Moved, PageMove
from tidemill.runner.page_moves import Outside, PageMover


class GroupMover(PageMover):
    """A move is over once it is on every rank, and has failed if it has on one."""

    def __init__(self, own: PageMover, num_ranks: int, is_lost: Callable[[], bool]) -> None:
        """`own`: of rank 0. `is_lost`: a rank is gone, and will report nothing."""
        super().__init__(Outside())
        self._own, self._num_ranks, self._is_lost = own, num_ranks, is_lost
        self._under_way: dict[int, list[Moved]] = {}  # by number: reports so far
        own.report_to = self.take
        # What other engines announce, and whether they know of an export: rank 0 tells for all.
        self.outside, self.written = own.outside, own.written

    def expect(self, moves: Iterable[PageMove]) -> None:
        """The ranks are about to begin these."""
        with self._reported:
            self._under_way |= {move.number: [] for move in moves}

    def take(self, moved: Moved) -> None:
        """A rank has made a move. Called from threads."""
        with self._reported:
            reports = self._under_way[moved.number]
            reports.append(moved)
            if len(reports) < self._num_ranks:
                return
            del self._under_way[moved.number]
            error = next((one.error for one in reports if one.error), "")
            num_bytes, seconds = (
                sum(one.num_bytes for one in reports),
                max(one.seconds for one in reports),
            )
            self._done.append(Moved(moved.number, 0 if error else num_bytes, seconds, error))
            self._reported.notify_all()

    def wake(self) -> None:
        """A rank is lost: nobody waits for it."""
        with self._reported:
            self._reported.notify_all()

    def wait(self, seconds: float) -> None:
        with self._reported:
            self._reported.wait_for(lambda: self._done or self._is_lost(), seconds)

    def drain(self) -> None:
        with self._reported:
            self._reported.wait_for(lambda: not self._under_way or self._is_lost())
            self.written.clear()

    def close(self) -> None:
        self._own.close()

    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        raise AssertionError("each rank's runner begins its own moves")

    def load(self, moves: Sequence[PageMove]) -> None:
        raise AssertionError("each rank's runner begins its own moves")

    def _move_on_disk(self, move: PageMove) -> int:
        raise AssertionError("each rank has files of its own")

    def _move_to_peers(self, move: PageMove) -> int:
        raise AssertionError("each rank exchanges its own parts of pages")

    def copy_rate(self, num_pages: int) -> float:
        return self._own.copy_rate(num_pages)
