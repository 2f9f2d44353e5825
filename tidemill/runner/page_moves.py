"""Moving KV pages between the device, host memory, disk and other engines while steps are computed.
What is moved where, kv/tiers.py decides.

Host memory and disk have a thread each; other engines have two, as a load from them may wait for an
export of its page. A page that a step writes waits for its store; whoever reads a page is computed
after its load was reported.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.distributed.transfer.base import TransferError
from tidemill.distributed.transfer.exporter import Exporter
from tidemill.distributed.transfer.importer import Importer, Learned
from tidemill.kv.tiers import NOWHERE, Moved, PageMove, Tier
from tidemill.runner.page_file import PageFile, PageFileError
from tidemill.sched.plan import StepPlan
from tidemill.types.cache_layout import Group


def changed_pages(
    plan: StepPlan,
    tables: Sequence[np.ndarray],
    groups: Sequence[Group],
    anywhere: Collection[int] = (),
) -> set[int]:
    """Pages that a step writes, or may write. `tables`: of each group, [rows, pages]. `anywhere`:
    rows with a KV policy, whose tokens are not where their positions say."""
    changed = {*plan.page_zeroes, *(target for _, target in plan.page_copies)}
    for item in plan.items:
        for group, table in zip(groups, tables, strict=True):
            first, end = item.start // group.page_size, group.num_pages_for(item.start + item.count)
            changed.update(
                (table[item.row] if item.row in anywhere else table[item.row, first:end]).tolist()
            )
    return changed


class Worker:
    """A thread that makes moves one after the other."""

    def __init__(
        self,
        name: str,
        make: Callable[[PageMove], int],
        report: Callable[[Moved], None],
        loads_first: bool = False,
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
    except (OSError, PageFileError, TransferError) as error:
        return Moved(move.number, error=getattr(error, "strerror", None) or str(error))
    except Exception as error:  # the thread goes on
        return Moved(move.number, error=f"{type(error).__name__}: {error}")
    return Moved(move.number, num_bytes, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Outside:
    """The places besides host memory that pages move to and from."""

    file: PageFile | None = None
    exporter: Exporter | None = None
    importer: Importer | None = None

    def close(self) -> None:
        for each in (self.exporter, self.importer, self.file):
            if each is not None:
                each.close()


class PageMover(ABC):
    """The common base of page movers for all devices: reports, disk and other engines."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self._done: list[Moved] = []
        self.written: dict[int, int] = {}  # by number of an export: that of its announcement
        # exports that were made, of which other engines do not know
        self._unknown: list[Moved] = []
        self.report_to: Callable[[Moved], None] | None = None  # of a rank: who gets its reports
        self._reported = threading.Condition()
        self._workers: dict[Tier, Worker] = {}
        if outside.file is not None:
            self._workers[Tier.DISK] = Worker(
                "kv-disk", self._move_on_disk, self._report, loads_first=True
            )
        if outside.importer is not None:
            self._workers[Tier.PEER] = Worker("kv-imports", self._move_to_peers, self._report)
        if outside.exporter is not None:
            self._workers[Tier.EXPORT] = Worker("kv-exports", self._move_to_peers, self._report)

    @abstractmethod
    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        """Begin stores; return when no page in `written` waits for one."""

    @abstractmethod
    def load(self, moves: Sequence[PageMove]) -> None:
        """Begin loads."""

    @abstractmethod
    def _move_on_disk(self, move: PageMove) -> int: ...

    @abstractmethod
    def _move_to_peers(self, move: PageMove) -> int: ...

    @abstractmethod
    def copy_rate(self, num_pages: int) -> float:
        """Bytes a second of one plain copy towards the device, as large as so many pages, measured
        now. For benchmarks."""

    @property
    def alarm(self) -> int | None:
        """A file descriptor that is readable when other engines have announced something."""
        return None if self.outside.importer is None else self.outside.importer.alarm

    def learned(self) -> Learned | None:
        """The announcements of other engines since the last call."""
        return None if self.outside.importer is None else self.outside.importer.take()

    def done(self) -> list[Moved]:
        """Moves that are over and were not returned before. An export is, when other engines know
        of it."""
        with self._reported:
            taken, self._done = self._done, []
        if self.outside.exporter is None:
            return taken
        over, taken, self._unknown = list[Moved](), self._unknown + taken, []
        for one in taken:
            is_known = self.outside.exporter.is_known(self.written.get(one.number, 0))
            (over if is_known else self._unknown).append(one)
        for one in over:
            self.written.pop(one.number, None)
        return over

    def wait(self, seconds: float) -> None:
        """Until a move is over, at most so long."""
        with self._reported:
            self._reported.wait_for(lambda: self._done, seconds)

    def drain(self) -> None:
        """Until all moves are over."""
        for worker in self._workers.values():
            worker.drain()
        self.written.clear()  # nor is it waited until other engines know

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self.outside.close()

    def _report(self, moved: Moved) -> None:
        if self.report_to is not None:
            self.report_to(moved)
            return
        with self._reported:
            self._done.append(moved)
            self._reported.notify_all()


class CpuMover(PageMover):
    """Host memory beside the CPU's own pool: bytes are copied by a thread."""

    def __init__(self, pages: np.ndarray, num_slots: int, outside: Outside) -> None:
        """`pages`: uint8 [pages, bytes]."""
        self._pages = pages
        self._slots = np.empty((num_slots, pages.shape[1]), np.uint8)  # mapped as it is used
        self._storing: Counter[int] = Counter()  # by page
        self._stored = threading.Condition()
        self._host = Worker("kv-host", self._move_in_memory, self._report)
        super().__init__(outside)

    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        stores = [move for move in moves if not move.is_load]
        for move in stores:
            if move.tier is Tier.DISK or move.source == NOWHERE:
                self._workers[move.tier].add(move)
            elif move.source in written:  # the step would wait for the thread
                self._report(make(self._copy if move.tier is Tier.HOST else self._export, move))
            else:
                with self._stored:
                    self._storing[move.source] += 1
                (self._host if move.tier is Tier.HOST else self._workers[move.tier]).add(move)
        self._wait_until_stored(written)

    def load(self, moves: Sequence[PageMove]) -> None:
        for move in (move for move in moves if move.is_load):
            (self._host if move.tier is Tier.HOST else self._workers[move.tier]).add(move)

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
            self._stored.wait_for(lambda: self._storing.keys().isdisjoint(pages))

    def _is_stored(self, page: int) -> None:
        with self._stored:
            self._storing[page] -= 1
            if not self._storing[page]:
                del self._storing[page]
            self._stored.notify_all()

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
            self._is_stored(move.source)

    def _move_on_disk(self, move: PageMove) -> int:
        file = self.outside.file
        assert file is not None
        if move.is_load:
            self._wait_until_stored([move.target])
            file.read(move.source, move.key, self._pages[move.target])
        elif move.source == NOWHERE:
            file.erase(move.target)
            return 0
        else:
            file.write(move.target, move.key, self._slots[move.source])
        return self._pages.shape[1]

    def _export(self, move: PageMove) -> int:
        assert self.outside.exporter is not None
        self.written[move.number] = self.outside.exporter.write(
            move.target, move.key, self._pages[move.source]
        )
        return self._pages.shape[1]

    def _move_to_peers(self, move: PageMove) -> int:
        if move.is_load:
            assert self.outside.importer is not None
            self._wait_until_stored([move.target])
            self.outside.importer.fetch(move.source, move.key, self._pages[move.target])
            return self._pages.shape[1]
        if move.source == NOWHERE:
            assert self.outside.exporter is not None
            self.outside.exporter.erase(move.target, move.key)
            return 0
        try:
            return self._export(move)
        finally:
            self._is_stored(move.source)
