"""Page moves of a GPU: pinned host memory, one stream for stores and one for loads, beside the stream that computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tidemill.kv.tiers import NOWHERE, Moved, PageMove, Tier
from tidemill.runner.page_file import PageFile
from tidemill.runner.page_moves import PageMover

_AT_ONCE = 16  # pages between two events


class _Part(NamedTuple):
    """Moves of one stream, between two events."""

    moves: list[PageMove]
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaMover(PageMover):
    @torch.inference_mode()
    def __init__(self, pages: torch.Tensor, num_slots: int, file: PageFile | None) -> None:
        """`pages`: uint8 [pages, bytes], on the GPU."""
        self._pages = pages
        self._slots = torch.empty(num_slots, pages.shape[1], dtype=torch.uint8, pin_memory=True)
        self._staging = torch.empty(pages.shape[1], dtype=torch.uint8, pin_memory=True)  # of the thread that reads from disk
        self._to_host, self._to_device, self._from_disk = (torch.cuda.Stream() for _ in range(3))
        self._under_way: deque[_Part] = deque()
        self._storing: dict[int, torch.cuda.Event] = {}  # by page
        self._filling: dict[int, torch.cuda.Event] = {}  # by slot
        self._may_load: dict[int, list[torch.cuda.Event]] = {}  # by number of a load from disk: what it waits for
        super().__init__(file)

    @torch.inference_mode()
    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        """The step that computes what is stored was launched before; a step that writes to it is launched after."""
        stores = [move for move in moves if not move.is_load]
        to_host = [move for move in stores if move.tier is Tier.HOST]
        if to_host:
            self._to_host.wait_stream(torch.cuda.current_stream())
        for part in self._copy(to_host, self._to_host, self._pages, self._slots):
            self._storing |= {move.source: part.ended for move in part.moves}
            self._filling |= {move.target: part.ended for move in part.moves}
        for move in stores:
            if move.tier is Tier.DISK:
                assert self._disk is not None
                self._disk.add(move)
        self._forget_past()
        for event in {id(event): event for page, event in self._storing.items() if page in written}.values():
            torch.cuda.current_stream().wait_event(event)

    @torch.inference_mode()
    def load(self, moves: Sequence[PageMove]) -> None:
        """A page may be read or written by steps that were launched before."""
        loads = [move for move in moves if move.is_load]
        if not loads:
            return
        from_host = [move for move in loads if move.tier is Tier.HOST]
        self._to_device.wait_stream(torch.cuda.current_stream())
        for event in self._stores_before(from_host, from_host):
            self._to_device.wait_event(event)
        self._copy(from_host, self._to_device, self._slots, self._pages)
        from_disk = [move for move in loads if move.tier is Tier.DISK]
        if from_disk:
            computed = torch.cuda.current_stream().record_event()
            for move in from_disk:
                assert self._disk is not None
                self._may_load[move.number] = [computed, *self._stores_before([move], [])]
                self._disk.add(move)

    def done(self) -> list[Moved]:
        for part in list(self._under_way):
            if part.ended.query():
                self._under_way.remove(part)
                seconds = part.began.elapsed_time(part.ended) / 1000 / len(part.moves)
                for move in part.moves:
                    self._report(Moved(move.number, self._pages.shape[1], seconds))
        return super().done()

    def wait(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while not self._done and time.perf_counter() < until:
            if any(part.ended.query() for part in self._under_way):
                return
            time.sleep(0.0001)

    def drain(self) -> None:
        for part in self._under_way:
            part.ended.synchronize()
        super().drain()

    def close(self) -> None:
        self.drain()
        super().close()

    @torch.inference_mode()
    def copy_rate(self, num_pages: int) -> float:
        num = min(num_pages, len(self._slots))
        target = torch.empty_like(self._pages[:num])
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        target.copy_(self._slots[:num], non_blocking=True)
        began.record()
        target.copy_(self._slots[:num], non_blocking=True)
        ended.record()
        ended.synchronize()
        return target.numel() / (began.elapsed_time(ended) / 1000)

    # ---- inside

    def _copy(self, moves: list[PageMove], stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> list[_Part]:
        parts = []
        with torch.cuda.stream(stream):
            for first in range(0, len(moves), _AT_ONCE):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                part = _Part(moves[first : first + _AT_ONCE], began, ended)
                part.began.record()
                for move in part.moves:
                    target[move.target].copy_(source[move.source], non_blocking=True)
                part.ended.record()
                parts.append(part)
        self._under_way += parts
        return parts

    def _stores_before(self, to_pages: Sequence[PageMove], from_slots: Sequence[PageMove]) -> list[torch.cuda.Event]:
        """Stores that read the pages or fill the slots of these loads."""
        events = [self._storing.get(move.target) for move in to_pages] + [self._filling.get(move.source) for move in from_slots]
        return list({id(event): event for event in events if event is not None}.values())

    def _forget_past(self) -> None:
        self._storing = {page: event for page, event in self._storing.items() if not event.query()}
        self._filling = {slot: event for slot, event in self._filling.items() if not event.query()}

    @torch.inference_mode()
    def _move_on_disk(self, move: PageMove) -> int:
        assert self._file is not None
        if not move.is_load:
            if move.source == NOWHERE:
                self._file.erase(move.target)
                return 0
            self._file.write(move.target, move.key, self._slots[move.source].numpy())
            return self._pages.shape[1]
        before = self._may_load.pop(move.number)
        self._file.read(move.source, move.key, self._staging.numpy())
        with torch.cuda.stream(self._from_disk):
            for event in before:
                self._from_disk.wait_event(event)
            self._pages[move.target].copy_(self._staging, non_blocking=True)
        self._from_disk.synchronize()
        return self._pages.shape[1]
