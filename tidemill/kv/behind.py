"""Between the KV manager and the tiers: pages are stored before they are overwritten, and loaded
when a sequence starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tidemill.kv.groups import GroupTable
from tidemill.kv.pages import NULL_PAGE, PagePool
from tidemill.kv.prefix import AnyIndex, Found, HashIndex, HashPath, Path
from tidemill.kv.tiers import Moved, PageMove, Tier, Tiers
from tidemill.types.cache_layout import Group

MOST_EXPORTS = 64  # stores under way, at most
_MOST_EXPECTED = 1 << 16  # contents
_MOST_FETCHED = 32  # pages under way that no sequence waits for yet


@dataclass(frozen=True, slots=True)
class Leaving:
    """The plan for a preempted sequence to come back: the way, and the time expected of either."""

    is_swap: bool
    num_pages: int  # that only it holds
    num_tokens: int
    swap_s: float
    compute_s: float

    @property
    def reason(self) -> str:
        if not self.is_swap and self.swap_s <= self.compute_s:
            return "compute again: too much is kept in host memory for others"
        if not self.swap_s or not self.compute_s:
            return f"swap {self.num_pages} pages: costs are not known yet"
        chosen, other = ("swap", "computing") if self.is_swap else ("compute again", "a swap")
        first, second = (
            (self.swap_s, self.compute_s) if self.is_swap else (self.compute_s, self.swap_s)
        )
        return (
            f"{chosen} ({self.num_tokens} tokens, {self.num_pages} pages): "
            f"{1000 * first:.1f} ms against {1000 * second:.1f} ms for {other}"
        )


class _Offered(NamedTuple):
    """A page that other engines may want."""

    key: bytes
    times_taken: int  # then: if it is another, the page holds something else
    step: int  # that computes it


class Behind:
    """The offload tiers as the manager sees them: asked before it forgets a page, and when it
    starts a sequence."""

    def __init__(self, tiers: Tiers, index: AnyIndex, pool: PagePool) -> None:
        assert isinstance(index, HashIndex), "checked by resolve: content is known by its key"
        self.tiers = tiers
        self.loading: set[int] = set()  # pages with a load under way: one reference is the load's
        # pages that came from other engines before a sequence needed them
        self.fetched: set[int] = set()
        self.num_stored = 0  # pages so far
        self._index = index
        self._pool = pool
        self._worthless: set[int] = set()  # cached pages that are faster computed again
        self._returning: dict[int, list[bytes]] = {}  # by preempted sequence: what is kept for it
        self._offered: dict[int, _Offered] = {}  # by page, to be exported once its step is computed
        # contents of other engines, to be fetched before they are needed
        self.announced: dict[bytes, None] = {}
        # the latest last; None: nobody has said what is
        self._expected: dict[bytes, None] | None = None
        index.look_elsewhere(tiers.find)

    # ---- before a page is forgotten

    def save(self, page: int, step: int) -> None:
        """A page that was taken still has its content."""
        self.fetched.discard(page)
        key = self._index.key_of(page)
        if page in self._worthless:
            self._worthless.remove(page)
        elif key is not None and not self._index.has_copy(page) and self.tiers.put(key, page, step):
            self.num_stored += 1

    def leave(self, seq: int, held: Sequence[int], num_tokens: int) -> Leaving:
        """A sequence is preempted: its pages go to host memory when others take them, or are
        computed again, whichever is expected to be faster."""
        own = [page for page in held if page in self._index and self._pool.references(page) == 1]
        keys = [key for page in held if (key := self._index.key_of(page)) is not None]
        costs, num_bytes = self.tiers.costs, len(own) * self.tiers.page_bytes
        swap_s, compute_s = costs.swap_s(Tier.HOST, num_bytes), costs.compute_s(num_tokens)
        is_swap = (not costs.knows(Tier.HOST) or swap_s <= compute_s) and self.tiers.keep(keys)
        if is_swap:
            self._returning[seq] = keys
        else:
            self._worthless.update(own)
        return Leaving(is_swap, len(own), num_tokens, swap_s, compute_s)

    def is_back(self, seq: int) -> None:
        """It was admitted again, or has ended."""
        self.tiers.keep_no_longer(self._returning.pop(seq, ()))

    def contents(self, path: Path) -> set[bytes]:
        """The keys of all pages of all groups that may hold these tokens."""
        assert isinstance(path, HashPath)
        return set(self._index.keys_of(path))

    def drop(self, path: Path) -> None:
        """Drops the content that a sequence computed, because it is worthless."""
        for key in self.contents(path):
            self.drop_content(key)

    def drop_content(self, key: bytes) -> None:
        """It is worthless, wherever it is."""
        self.announced.pop(key, None)
        self.tiers.drop(key)

    # ---- when a sequence starts

    def find_in_pages(self, path: Path) -> Found:
        """Without the tiers."""
        assert isinstance(path, HashPath)
        return self._index.find(path, elsewhere=False)

    def bytes_to_load(self, tables: Iterable[GroupTable]) -> dict[int, int]:
        """By tier."""
        num_bytes: dict[int, int] = {}
        for place in (page for table in tables for page in table.held if page < 0):
            tier = self.tiers.tier_of(place)
            num_bytes[tier] = num_bytes.get(tier, 0) + self.tiers.page_bytes
        return num_bytes

    def reuse(self, page: int) -> None:
        """A cached page is shared."""
        self.fetched.discard(page)
        self._worthless.discard(page)

    def fetched_of(self, tables: Sequence[GroupTable]) -> list[tuple[int, int, bytes, Tier]]:
        """The pages that other engines computed and no sequence has used before, in the form that
        `hold` returns."""
        if not self.fetched:
            return []
        pages = (
            (g, i, page) for g, table in enumerate(tables) for i, page in enumerate(table.pages)
        )
        return [(g, i, b"", Tier.PEER) for g, i, page in pages if page in self.fetched]

    def hold(self, tables: Sequence[GroupTable]) -> list[tuple[int, int, bytes, Tier]]:
        """Keeps the contents that are to be loaded where they are. Returns group, index in its
        table, content, tier."""
        held = []
        for g, table in enumerate(tables):
            for i, place in enumerate(table.pages):
                if place < 0:
                    key = self.tiers.key_at(place)
                    held.append((g, i, key, self.tiers.get(key)))
        return held

    def load(self, key: bytes, tier: Tier, page: int) -> None:
        """Into a page that was just taken. It is found by others from now on; they wait for it,
        too."""
        self._pool.share(page)
        self.loading.add(page)
        self._index.enter(key, page)
        self.tiers.load(key, tier, page)

    def moved(self, done: Moved) -> tuple[PageMove, bool]:
        """A move is over. Returns it, and whether its page has not got its content."""
        move = self.tiers.moved(done)
        if not move.is_load or move.target not in self.loading:
            return move, False
        self.loading.remove(move.target)
        if done.error:
            self.fetched.discard(move.target)
            self._index.forget(move.target)
        self._pool.drop(move.target)
        return move, bool(done.error)

    # ---- other engines

    def offer(self, page: int, step: int) -> None:
        """A page in the index goes to other engines once the step is computed, if it then still
        holds the same."""
        key = self._index.key_of(page) if self.tiers.exports.num else None
        if key is None:
            return
        if key in self.tiers.exports:
            self.tiers.exports.touch(key)
            return
        offered = _Offered(key, self._pool.times_taken(page), step)
        if self._offered.get(page, offered)[:2] != offered[:2]:
            del self._offered[page]
        self._offered.setdefault(page, offered)

    def export_some(self) -> None:
        """Exports some of the pages that are offered and computed."""
        room = MOST_EXPORTS - self.tiers.num_exporting
        ready = (
            page
            for page, offer in self._offered.items()
            if offer.step < self.tiers.num_trusted and page not in self.loading
        )
        for page in list(islice(ready, max(room, 0))):
            offered = self._offered.pop(page)
            if (
                self._pool.times_taken(page) == offered.times_taken
                and self._index.key_of(page) == offered.key
            ):
                self.tiers.export(offered.key, page)

    @property
    def exporting(self) -> set[bytes]:
        """Contents that are computed, and on their way to where other engines find them."""
        computed = (
            offer
            for page, offer in self._offered.items()
            if offer.step < self.tiers.num_trusted and page not in self.loading
        )
        return {offer.key for offer in computed} | self.tiers.exporting

    def learn(self, slots: Iterable[tuple[int, bytes]]) -> None:
        """Takes note of the contents that other engines' places hold now."""
        for at, key in slots:
            self.announced.pop(self.tiers.peers.learn(at, key), None)
            if key and (self._expected is None or key in self._expected):
                self.announced[key] = None

    def expect(self, keys: Iterable[bytes]) -> None:
        """From now on, only what is expected is fetched before it is needed. What was announced
        earlier is, too."""
        expected = self._expected = {} if self._expected is None else self._expected
        self.announced = {key: None for key in self.announced if key in expected}
        for key in keys:
            expected.pop(key, None)
            expected[key] = None
            if self.tiers.peers.find(key) is not None:
                self.announced[key] = None
        for key in list(islice(expected, max(len(expected) - _MOST_EXPECTED, 0))):
            del expected[key]

    def unused_page(self, key: bytes) -> int:
        """A page with this content that no sequence holds, or the null page."""
        page = self._index.page_of(key)
        return page if self._pool.references(page) == 0 else NULL_PAGE

    def fetch(self, take: Callable[[], int], least_free: int, page_tokens: int) -> None:
        """Fetches announced content of other engines into free pages before it is needed, while
        more than so many are free."""
        while (
            self._pool.num_free > least_free
            and (key := self._next_to_fetch(page_tokens)) is not None
        ):
            page = take()
            self.load(key, self.tiers.get(key), page)
            self.fetched.add(page)
            self._pool.drop(page)  # what is left is the load's

    def _next_to_fetch(self, page_tokens: int) -> bytes | None:
        """Content that another engine has announced and no page here holds, if a load is faster
        than computing it."""
        if not self.tiers.costs.load_is_faster({Tier.PEER: self.tiers.page_bytes}, page_tokens):
            self.announced.clear()
        while self.announced and len(self.loading) < _MOST_FETCHED:
            key = next(iter(self.announced))
            del self.announced[key]
            place = 0 if self._index.page_of(key) else self.tiers.find(key)
            if place < 0 and self.tiers.tier_of(place) is Tier.PEER:
                return key
        return None

    def fail(self) -> None:
        """A step has failed; the index is empty, and no sequence holds a page."""
        self.tiers.fail()
        for page in self.loading:
            self._pool.drop(page)
        self.loading.clear()
        self._worthless.clear()
        self.fetched.clear()
        self._offered.clear()

    def check_integrity(self) -> None:
        self.tiers.check_integrity()
        assert all(self._pool.references(page) == 0 for page in self._worthless)


def tokens_by_tier(
    loads: Sequence[tuple[int, int, bytes, Tier]],
    groups: Sequence[Group],
    page_size: int,
    num_tokens: int,
) -> tuple[int, int, int]:
    """The tokens of a prefix of so many that wait for host memory, for disk in some group, and for
    another engine."""
    tiers = [0] * (num_tokens // page_size)
    for g, i, _, tier in loads:
        per_page = groups[g].page_size // page_size
        for at in range(
            0 if groups[g].is_state else i * per_page, min((i + 1) * per_page, len(tiers))
        ):
            tiers[at] = max(tiers[at], tier)
    return (
        tiers.count(Tier.HOST) * page_size,
        tiers.count(Tier.DISK) * page_size,
        tiers.count(Tier.PEER) * page_size,
    )
