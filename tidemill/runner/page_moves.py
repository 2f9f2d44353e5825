"""Moving KV pages between the device, host memory and disk while steps are computed. What is moved where, kv/tiers.py decides.

Host memory and disk have a thread each. A page that a step writes waits for its store; whoever reads a page is computed after
its load was reported.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tidemill.cache_layout import Group
from tidemill.kv.tiers import NOWHERE, Moved, PageMove, Tier
from tidemill.runner.page_file import PageFile, PageFileError
from tidemill.sched.plan import StepPlan


def changed_pages(
    plan: StepPlan, tables: Sequence[np.ndarray], groups: Sequence[Group], anywhere: Collection[int] = ()
) -> set[int]:
    """Pages that a step writes, or may write. `tables`: of each group, [rows, pages]. `anywhere`: rows with a KV policy, whose
    tokens are not where their positions say."""
    changed = {*plan.page_zeroes, *(target for _, target in plan.page_copies)}
    for item in plan.items:
        for group, table in zip(groups, tables, strict=True):
            first, end = item.start // group.page_size, group.num_pages_for(item.start + item.count)
            changed.update((table[item.row] if item.row in anywhere else table[item.row, first:end]).tolist())
    return changed


class Worker:
    """A thread that makes moves one after the other."""

    def __init__(
        self, name: str, make: Callable[[PageMove], int], report: Callable[[Moved], None], loads_first: bool = False
    ) -> None:
        """`make` returns how many bytes it moved. `loads_first`: requests wait for them."""
        self._make, self._report = make, report
        self._stores: deque[PageMove] = deque()
        self._loads: deque[PageMove] = deque() if loads_first else self._stores
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_left = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, move: PageMove) -> None:
        with self._changed:
            (self._loads if move.is_load else self._stores).append(move)
            self._num_left += 1
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_left)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._stores or self._is_closed)
                queue = self._loads or self._stores
                if not queue:
                    return
                move = queue.popleft()
            self._report(make(self._make, move))
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


def make(move_bytes: Callable[[PageMove], int], move: PageMove) -> Moved:
    began = time.perf_counter()
    try:
        num_bytes = move_bytes(move)
    except (OSError, PageFileError) as error:
        return Moved(move.number, error=getattr(error, "strerror", None) or str(error))
    except Exception as error:  # the thread goes on
        return Moved(move.number, error=f"{type(error).__name__}: {error}")
    return Moved(move.number, num_bytes, time.perf_counter() - began)


class PageMover(ABC):
    """What runners of all devices have in common: reports, and disk."""

    def __init__(self, file: PageFile | None) -> None:
        self._file = file
        self._done: list[Moved] = []
        self.report_to: Callable[[Moved], None] | None = None  # of a rank: who gets its reports
        self._reported = threading.Condition()
        self._disk = None if file is None else Worker("kv-disk", self._move_on_disk, self._report, loads_first=True)

    @abstractmethod
    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        """Begin stores; return when no page in `written` waits for one."""

    @abstractmethod
    def load(self, moves: Sequence[PageMove]) -> None:
        """Begin loads."""

    @abstractmethod
    def _move_on_disk(self, move: PageMove) -> int: ...

    @abstractmethod
    def copy_rate(self, num_pages: int) -> float:
        """Bytes a second of one plain copy towards the device, as large as so many pages, measured now. For benchmarks."""

    def done(self) -> list[Moved]:
        """Moves that are over and were not returned before."""
        with self._reported:
            taken, self._done = self._done, []
        return taken

    def wait(self, seconds: float) -> None:
        """Until a move is over, at most so long."""
        with self._reported:
            self._reported.wait_for(lambda: self._done, seconds)

    def drain(self) -> None:
        """Until all moves are over."""
        if self._disk is not None:
            self._disk.drain()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        if self._file is not None:
            self._file.close()

    def _report(self, moved: Moved) -> None:
        if self.report_to is not None:
            self.report_to(moved)
            return
        with self._reported:
            self._done.append(moved)
            self._reported.notify_all()


class CpuMover(PageMover):
    """Host memory beside the CPU's own pool: bytes are copied by a thread."""

    def __init__(self, pages: np.ndarray, num_slots: int, file: PageFile | None) -> None:
        """`pages`: uint8 [pages, bytes]."""
        self._pages = pages
        self._slots = np.empty((num_slots, pages.shape[1]), np.uint8)  # mapped as it is used
        self._storing: set[int] = set()  # pages
        self._stored = threading.Condition()
        self._host = Worker("kv-host", self._move_in_memory, self._report)
        super().__init__(file)

    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        stores = [move for move in moves if not move.is_load]
        for move in stores:
            if move.tier is Tier.DISK:
                assert self._disk is not None
                self._disk.add(move)
            elif move.source in written:  # the step would wait for the thread
                self._report(make(self._copy, move))
            else:
                with self._stored:
                    self._storing.add(move.source)
                self._host.add(move)
        self._wait_until_stored(written)

    def load(self, moves: Sequence[PageMove]) -> None:
        for move in (move for move in moves if move.is_load):
            worker = self._host if move.tier is Tier.HOST else self._disk
            assert worker is not None
            worker.add(move)

    def drain(self) -> None:
        self._host.drain()
        super().drain()

    def close(self) -> None:
        self._host.close()
        super().close()

    def copy_rate(self, num_pages: int) -> float:
        source = np.ones((num_pages, self._pages.shape[1]), np.uint8)
        target = np.ones_like(source)
        began = time.perf_counter()
        np.copyto(target, source)
        return source.nbytes / (time.perf_counter() - began)

    def _wait_until_stored(self, pages: Collection[int]) -> None:
        with self._stored:
            self._stored.wait_for(lambda: self._storing.isdisjoint(pages))

    def _copy(self, move: PageMove) -> int:
        source, target = (self._slots, self._pages) if move.is_load else (self._pages, self._slots)
        np.copyto(target[move.target], source[move.source])  # without the interpreter's lock
        return self._pages.shape[1]

    def _move_in_memory(self, move: PageMove) -> int:
        if move.is_load:
            self._wait_until_stored([move.target])
            return self._copy(move)
        try:
            return self._copy(move)
        finally:
            with self._stored:
                self._storing.discard(move.source)
                self._stored.notify_all()

    def _move_on_disk(self, move: PageMove) -> int:
        assert self._file is not None
        if move.is_load:
            self._wait_until_stored([move.target])
            self._file.read(move.source, move.key, self._pages[move.target])
        elif move.source == NOWHERE:
            self._file.erase(move.target)
            return 0
        else:
            self._file.write(move.target, move.key, self._slots[move.source])
        return self._pages.shape[1]
