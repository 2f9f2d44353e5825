"""Offload: the pages of the KV manager that are loaded, stored, exported and fetched, if there are
tiers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tidemill.kv.behind import Behind
from tidemill.kv.pages import PagePool
from tidemill.kv.prefix import AnyIndex
from tidemill.kv.tiers import Moved, PageMove, Tiers
from tidemill.types.inputs import Segment


class _Holder(Protocol):
    def held(self) -> Iterator[int]: ...


class Offload:
    def __init__(
        self,
        behind: Behind | None,
        pool: PagePool,
        index: AnyIndex,
        page_size: int,
        holders: Mapping[int, _Holder],
        take: Callable[[], int],
        forget: Callable[[int], bool],
    ) -> None:
        """`holders`: by sequence, its pages. `take`: a free page. `forget`: the content of a page."""
        self._behind, self._pool, self._index, self._page_size = behind, pool, index, page_size
        self._holders, self._take, self._forget = holders, take, forget

    @property
    def tiers(self) -> Tiers | None:
        return None if self._behind is None else self._behind.tiers

    @property
    def is_moving(self) -> bool:
        """Pages are to be moved, or were, which need not be waited for."""
        return self.tiers is not None and self.tiers.is_busy

    def tier_sizes(self) -> list[tuple[str, int, int]]:
        """The name of each tier, the pages in it, and how many it can hold."""
        if self.tiers is None:
            return []
        tiers = {
            "host memory": self.tiers.host,
            "disk": self.tiers.disk,
            "exported": self.tiers.exports,
        }
        sizes = [(name, len(slots), slots.num) for name, slots in tiers.items() if slots.num]
        num_peers = len(self.tiers.peers)
        return sizes + [("other engines", num_peers, num_peers)] * (num_peers > 0)

    @property
    def num_stored(self) -> int:
        """The number of evicted pages, so far, that a tier has got."""
        return 0 if self._behind is None else self._behind.num_stored

    @property
    def num_loading(self) -> int:
        """Pages."""
        return 0 if self._behind is None else len(self._behind.loading)

    def is_loading(self, seq: int) -> bool:
        """It cannot be computed: its pages, or those that it shares, are not there yet."""
        if self._behind is None or not self._behind.loading:
            return False
        return not self._behind.loading.isdisjoint(self._holders[seq].held())

    def take_moves(self) -> list[PageMove]:
        """The moves that the runner is to make now."""
        if self._behind is None:
            return []
        self._behind.export_some()
        return self._behind.tiers.take_moves()

    def trust(self, num_steps: int) -> None:
        """Trusts the first `num_steps` steps, which were computed: everything stored after them is
        right, and what they computed may be exported."""
        if self._behind is not None:
            self._behind.tiers.trust(num_steps)
            self._behind.export_some()

    @property
    def exporting(self) -> set[bytes]:
        """Contents that are computed, and on their way to where other engines find them."""
        return set() if self._behind is None else self._behind.exporting

    def exporting_of(
        self, token_ids: Sequence[int], salt: str, segments: Sequence[Segment]
    ) -> set[bytes]:
        """Those of them that hold these tokens."""
        exporting = self.exporting
        if exporting and self._behind is not None:
            exporting &= self._behind.contents(
                self._index.path(token_ids, salt, len(token_ids), segments)
            )
        return exporting

    def expect(self, token_ids: Sequence[int], salt: str, segments: Sequence[Segment]) -> None:
        """Another engine computes these tokens for this one."""
        if self._behind is not None:
            self._behind.expect(
                self._behind.contents(self._index.path(token_ids, salt, len(token_ids), segments))
            )

    def learn(self, slots: Iterable[tuple[int, bytes]], erased: Iterable[bytes] = ()) -> None:
        """Takes note of the contents that other engines' places hold now, and contents that they
        found to be worthless."""
        assert self._behind is not None
        self._behind.learn(slots)
        for key in erased:
            self._behind.drop_content(key)
            if page := self._behind.unused_page(key):
                self._forget(page)

    def fetch_announced(self, num_promised: Callable[[], int] = int) -> None:
        """Fetches announced content of other engines into free pages before it is needed, while
        there are many. `num_promised`: free pages that are left to others."""
        if self._behind is not None:
            self._behind.fetch(
                self._take, max((self._pool.num_pages - 1) // 2, num_promised()), self._page_size
            )

    def moved(self, done: Iterable[Moved]) -> tuple[list[PageMove], list[int]]:
        """The runner's moves that are over. Returns them, and the sequences that hold a page
        without its content."""
        assert self._behind is not None
        results = [self._behind.moved(move) for move in done]
        broken = {move.target for move, failed in results if failed}
        seqs = (
            [
                seq
                for seq, sequence in self._holders.items()
                if not broken.isdisjoint(sequence.held())
            ]
            if broken
            else []
        )
        return [move for move, _ in results], seqs

    def is_gone(self, seq: int) -> None:
        """A sequence that was preempted will not come back."""
        if self._behind is not None:
            self._behind.is_back(seq)

    def fail_moves(self) -> None:
        """After `clear_prefixes`, since a step has failed: what is behind it cannot be trusted, nor
        that moves were made."""
        if self._behind is not None:
            self._behind.fail()
