"""Page moves of a GPU: pinned host memory, one stream for stores and one for loads, beside the
stream that computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tidemill.kv.behind import MOST_EXPORTS
from tidemill.kv.tiers import NOWHERE, Moved, PageMove, Tier
from tidemill.runner.page_moves import Outside, PageMover

_AT_ONCE = 16  # pages between two events


class _Part(NamedTuple):
    """Moves of one stream, between two events."""

    moves: list[PageMove]
    began: torch.cuda.Event
    ended: torch.cuda.Event


class _Staging(NamedTuple):
    """Pinned memory of one page and a stream, of a thread that loads from outside host memory."""

    page: torch.Tensor
    stream: torch.cuda.Stream


class CudaMover(PageMover):
    @torch.inference_mode()
    def __init__(self, pages: torch.Tensor, num_slots: int, outside: Outside) -> None:
        """`pages`: uint8 [pages, bytes], on the GPU."""
        self._pages = pages
        self._slots = self._pinned(num_slots)
        self._to_host, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()
        self._staging = {
            tier: _Staging(self._pinned(1)[0], torch.cuda.Stream())
            for tier in (Tier.DISK, Tier.PEER)
        }
        # pages on their way to other engines
        self._leaving = self._pinned(0 if outside.exporter is None else MOST_EXPORTS)
        self._places = deque(range(len(self._leaving)))  # of it, that are free
        # by number of an export: its place, and when it is there
        self._left: dict[int, tuple[int, torch.cuda.Event]] = {}
        self._under_way: deque[_Part] = deque()
        self._storing: dict[int, torch.cuda.Event] = {}  # by page
        self._filling: dict[int, torch.cuda.Event] = {}  # by slot
        # by number of a load from outside: what it waits for
        self._may_load: dict[int, list[torch.cuda.Event]] = {}
        super().__init__(outside)

    def _pinned(self, num_pages: int) -> torch.Tensor:
        return torch.empty(num_pages, self._pages.shape[1], dtype=torch.uint8, pin_memory=True)

    @torch.inference_mode()
    def store(self, moves: Sequence[PageMove], written: Collection[int]) -> None:
        """The step that computes what is stored was launched before; a step that writes to it is
        launched after."""
        stores = [move for move in moves if not move.is_load]
        to_host = [move for move in stores if move.tier is Tier.HOST]
        exported = [move for move in stores if move.tier is Tier.EXPORT and move.source != NOWHERE]
        if to_host or exported:
            self._to_host.wait_stream(torch.cuda.current_stream())
        for part in self._copy(to_host, self._to_host, self._pages, self._slots):
            self._storing |= {move.source: part.ended for move in part.moves}
            self._filling |= {move.target: part.ended for move in part.moves}
        for first in range(0, len(exported), _AT_ONCE):
            self._export(exported[first : first + _AT_ONCE])
        for move in stores:
            if move.tier is not Tier.HOST:
                self._workers[move.tier].add(move)
        self._forget_past()
        for event in {
            id(event): event for page, event in self._storing.items() if page in written
        }.values():
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
        from_outside = [move for move in loads if move.tier is not Tier.HOST]
        if from_outside:
            computed = torch.cuda.current_stream().record_event()
            for move in from_outside:
                self._may_load[move.number] = [computed, *self._stores_before([move], [])]
                self._workers[move.tier].add(move)

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

    def _copy(
        self,
        moves: list[PageMove],
        stream: torch.cuda.Stream,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> list[_Part]:
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

    def _stores_before(
        self, to_pages: Sequence[PageMove], from_slots: Sequence[PageMove]
    ) -> list[torch.cuda.Event]:
        """Stores that read the pages or fill the slots of these loads."""
        events = [self._storing.get(move.target) for move in to_pages] + [
            self._filling.get(move.source) for move in from_slots
        ]
        return list({id(event): event for event in events if event is not None}.values())

    def _forget_past(self) -> None:
        self._storing = {page: event for page, event in self._storing.items() if not event.query()}
        self._filling = {slot: event for slot, event in self._filling.items() if not event.query()}

    def _export(self, moves: list[PageMove]) -> None:
        """To pinned memory, from where the thread takes them."""
        with torch.cuda.stream(self._to_host):
            places = [self._places.popleft() for _ in moves]
            for place, move in zip(places, moves, strict=True):
                self._leaving[place].copy_(self._pages[move.source], non_blocking=True)
            ended = self._to_host.record_event()
        for place, move in zip(places, moves, strict=True):
            self._storing[move.source] = ended
            self._left[move.number] = place, ended

    @torch.inference_mode()
    def _load(self, move: PageMove, read: Callable[[np.ndarray], None]) -> int:
        """By a thread, through pinned memory."""
        staging, before = self._staging[move.tier], self._may_load.pop(move.number)
        read(staging.page.numpy())
        with torch.cuda.stream(staging.stream):
            for event in before:
                staging.stream.wait_event(event)
            self._pages[move.target].copy_(staging.page, non_blocking=True)
        staging.stream.synchronize()
        return self._pages.shape[1]

    def _move_on_disk(self, move: PageMove) -> int:
        file = self.outside.file
        assert file is not None
        if move.is_load:
            return self._load(move, lambda page: file.read(move.source, move.key, page))
        if move.source == NOWHERE:
            file.erase(move.target)
            return 0
        file.write(move.target, move.key, self._slots[move.source].numpy())
        return self._pages.shape[1]

    def _move_to_peers(self, move: PageMove) -> int:
        exporter, importer = self.outside.exporter, self.outside.importer
        if move.is_load:
            assert importer is not None
            return self._load(move, lambda page: importer.fetch(move.source, move.key, page))
        assert exporter is not None
        if move.source == NOWHERE:
            exporter.erase(move.target, move.key)
            return 0
        place, ended = self._left.pop(move.number)
        try:
            ended.synchronize()
            self.written[move.number] = exporter.write(
                move.target, move.key, self._leaving[place].numpy()
            )
        finally:
            self._places.append(place)
        return self._pages.shape[1]
