"""The side of the KV manager that faces the tiers: what is loaded, stored, exported and fetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tidemill.inputs import Segment
from tidemill.kv.behind import Behind
from tidemill.kv.pages import PagePool
from tidemill.kv.prefix import AnyIndex
from tidemill.kv.tiers import Moved, PageMove, Tiers


class _Holder(Protocol):
    def held(self) -> Iterator[int]: ...


class TieredPages(ABC):
    page_size: int
    behind: Behind | None
    pool: PagePool
    index: AnyIndex
    _step: int

    @property
    @abstractmethod
    def _holders(self) -> Mapping[int, _Holder]:
        """By sequence: its pages."""

    @abstractmethod
    def _take(self) -> int: ...

    @abstractmethod
    def _forget(self, page: int) -> bool: ...

    @property
    def tiers(self) -> Tiers | None:
        return None if self.behind is None else self.behind.tiers

    @property
    def is_moving(self) -> bool:
        """Pages are to be moved, or were, which need not be waited for."""
        return self.tiers is not None and self.tiers.is_busy

    def tier_sizes(self) -> list[tuple[str, int, int]]:
        """The name of each tier, the pages in it, and how many it can hold."""
        if self.tiers is None:
            return []
        tiers = {"host memory": self.tiers.host, "disk": self.tiers.disk, "exported": self.tiers.exports}
        sizes = [(name, len(slots), slots.num) for name, slots in tiers.items() if slots.num]
        num_peers = len(self.tiers.peers)
        return sizes + [("other engines", num_peers, num_peers)] * (num_peers > 0)

    @property
    def num_stored(self) -> int:
        """The number of evicted pages, so far, that a tier has got."""
        return 0 if self.behind is None else self.behind.num_stored

    @property
    def num_loading(self) -> int:
        """Pages."""
        return 0 if self.behind is None else len(self.behind.loading)

    def is_loading(self, seq: int) -> bool:
        """It cannot be computed: its pages, or those that it shares, are not there yet."""
        if self.behind is None or not self.behind.loading:
            return False
        return not self.behind.loading.isdisjoint(self._holders[seq].held())

    def take_moves(self) -> list[PageMove]:
        """The moves that the runner is to make now."""
        if self.behind is None:
            return []
        self.behind.export_some()
        return self.behind.tiers.take_moves()

    def trust(self, num_steps: int) -> None:
        """Trusts the first `num_steps` steps, which were computed: everything stored after them is right, and what they computed
        may be exported."""
        if self.behind is not None:
            self.behind.tiers.trust(num_steps)
            self.behind.export_some()

    @property
    def exporting(self) -> set[bytes]:
        """Contents that are computed, and on their way to where other engines find them."""
        return set() if self.behind is None else self.behind.exporting

    def exporting_of(self, token_ids: Sequence[int], salt: str, segments: Sequence[Segment]) -> set[bytes]:
        """Those of them that hold these tokens."""
        exporting = self.exporting
        if exporting and self.behind is not None:
            exporting &= self.behind.contents(self.index.path(token_ids, salt, len(token_ids), segments))
        return exporting

    def expect(self, token_ids: Sequence[int], salt: str, segments: Sequence[Segment]) -> None:
        """Another engine computes these tokens for this one."""
        if self.behind is not None:
            self.behind.expect(self.behind.contents(self.index.path(token_ids, salt, len(token_ids), segments)))

    def learn(self, slots: Iterable[tuple[int, bytes]], erased: Iterable[bytes] = ()) -> None:
        """Takes note of the contents that other engines' places hold now, and contents that they found to be worthless."""
        assert self.behind is not None
        self.behind.learn(slots)
        for key in erased:
            self.behind.drop_content(key)
            if page := self.behind.unused_page(key):
                self._forget(page)

    def fetch_announced(self, num_promised: Callable[[], int] = int) -> None:
        """Fetches announced content of other engines into free pages before it is needed, while there are many. `num_promised`:
        free pages that are left to others."""
        if self.behind is not None:
            self.behind.fetch(self._take, max((self.pool.num_pages - 1) // 2, num_promised()), self.page_size)

    def moved(self, done: Iterable[Moved]) -> tuple[list[PageMove], list[int]]:
        """The runner's moves that are over. Returns them, and the sequences that hold a page without its content."""
        assert self.behind is not None
        results = [self.behind.moved(move) for move in done]
        broken = {move.target for move, failed in results if failed}
        seqs = [seq for seq, sequence in self._holders.items() if not broken.isdisjoint(sequence.held())] if broken else []
        return [move for move, _ in results], seqs

    def cached_pages(self) -> Iterator[int]:
        """That no sequence holds, the latest first. A prefix comes before what follows it."""
        return iter([page for page in self.pool.free_pages() if page in self.index][::-1])

    def save(self, page: int) -> None:
        """A cached page goes to the tiers, though it stays."""
        if self.behind is not None and self.pool.references(page) == 0:
            self.behind.save(page, self._step)

    def is_gone(self, seq: int) -> None:
        """A sequence that was preempted will not come back."""
        if self.behind is not None:
            self.behind.is_back(seq)

    def fail_moves(self) -> None:
        """After `clear_prefixes`, since a step has failed: what is behind it cannot be trusted, nor that moves were made."""
        if self.behind is not None:
            self.behind.fail()
