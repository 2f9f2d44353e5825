"""KVManager: which pages a sequence owns, which it shares, and which of its tokens are already there.

tokens   0 ........ 15 | 16 ....... 31 | 32 ...... 40
table      page 7      |   page 2      |   page 9
           shared, in the prefix index      private, partly filled
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.kv.pages import PagePool
from tidemill.kv.prefix import PrefixIndex, chain_key, root_key

# What a page is, in a map of all pages: one of these, or FIRST_OWNER + the number of the sequence that alone holds it.
FREE, CACHED, SHARED, FIRST_OWNER = range(4)


@dataclass(slots=True)
class _Table:
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # chain keys of the leading full pages, as far as they are known
    num_recorded: int = 0  # of them, how many are in the prefix index
    root: bytes = b""


class KVManager:
    """Page tables of all live sequences over one pool. Sequences are named by ints."""

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.num_evicted = 0  # cached pages overwritten so far
        self._pool = PagePool(num_pages)
        self._index = PrefixIndex()
        self._tables: dict[int, _Table] = {}

    # ---- what there is

    @property
    def num_pages(self) -> int:
        """Pages that can hold tokens."""
        return self._pool.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        """Pages that can be taken now; some may still hold cached content, which is evicted then."""
        return self._pool.num_free

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def table(self, seq: int) -> Sequence[int]:
        """The sequence's pages in token order."""
        return self._tables[seq].pages

    def holds(self, seq: int) -> bool:
        return seq in self._tables

    def page_keys(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """Chain keys by which a prompt's pages can be found: never the last token's, which must be computed for its logits."""
        if not self.prefix_caching:
            return []
        keys, key, size = [], root_key(salt, self.page_size), self.page_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            key = chain_key(key, token_ids[start : start + size])
            keys.append(key)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest cached prefix."""
        pages: list[int] = []
        for key in keys:
            page = self._index.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_pages_to_admit(self, num_tokens: int, keys: Sequence[bytes] = ()) -> int:
        """Free pages that `admit` would take: new ones, and cached ones that no sequence holds."""
        found = self.find(keys)
        num_revived = sum(1 for page in found if self._pool.references(page) == 0)
        return self.num_pages_for(num_tokens) - len(found) + num_revived

    def num_copies_to_write(self, seq: int, start: int, end: int) -> int:
        """Free pages that `copies_to_write` would take."""
        return len(self._shared(seq, start, end))

    def num_freed_by(self, seqs: Sequence[int]) -> int:
        """Pages that would be free if these sequences were released: those that no other sequence holds."""
        owners = Counter(page for seq in seqs for page in self._tables[seq].pages)
        return sum(1 for page, num in owners.items() if self._pool.references(page) == num)

    def map(self, seqs: Sequence[int]) -> array[int]:
        """What each page is, for the live view. `seqs`: all that hold pages. Takes some 20 ms for 100,000 pages."""
        kinds = array("H", bytes(2 * self._pool.num_pages))
        for page in self._index.pages():
            kinds[page] = CACHED
        for owner, seq in enumerate(seqs, FIRST_OWNER):
            for page in self._tables[seq].pages:
                kinds[page] = owner if kinds[page] <= CACHED else SHARED
        return kinds[1:]  # without the null page

    # ---- taking and giving back

    def admit(self, seq: int, num_tokens: int, keys: Sequence[bytes] = (), salt: str = "", reserve: int = 0) -> int | None:
        """Give a new sequence pages for all its tokens, sharing what is cached under its keys. Returns how many tokens that is,
        or None if fewer than `reserve` pages would stay free (nothing is changed then)."""
        assert seq not in self._tables
        if self.num_pages_to_admit(num_tokens, keys) + reserve > self._pool.num_free:
            return None
        found = self.find(keys)
        num_new = self.num_pages_for(num_tokens) - len(found)
        for page in found:
            self._pool.share(page)
        pages = found + [self._take() for _ in range(num_new)]
        self._tables[seq] = _Table(pages, list(keys), len(found), root_key(salt, self.page_size))
        return len(found) * self.page_size

    def extend(self, seq: int, num_tokens: int) -> list[int] | None:
        """Make room for `num_tokens` tokens in all. Returns the pages added (often none), or None if there are not enough."""
        table = self._tables[seq]
        num_new = self.num_pages_for(num_tokens) - len(table.pages)
        if num_new <= 0:
            return []
        if num_new > self._pool.num_free:
            return None
        new = [self._take() for _ in range(num_new)]
        table.pages += new
        return new

    def copies_to_write(self, seq: int, start: int, end: int) -> list[tuple[int, int]] | None:
        """Make the pages of tokens start..end-1 private before they are written. Returns (index in table, old page) for each page
        replaced, whose content must be copied into the new one; None if there are not enough free pages (nothing is changed)."""
        table = self._tables[seq]
        shared = self._shared(seq, start, end)
        if len(shared) > self._pool.num_free:
            return None
        copies = []
        for i in shared:
            old = table.pages[i]
            table.pages[i] = self._take()
            copies.append((i, old))
        for _, old in copies:  # only now: the source must not be handed out as another copy's target
            self._pool.drop(old)
        return copies

    def record(self, seq: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tokens up to `num_computed` are computed, or will be by the step being planned: full pages enter the prefix index."""
        if not self.prefix_caching:
            return
        table = self._tables[seq]
        size = self.page_size
        num_full = min(num_computed, len(token_ids)) // size
        for i in range(table.num_recorded, num_full):
            if i == len(table.keys):
                parent = table.keys[i - 1] if i else table.root
                table.keys.append(chain_key(parent, token_ids[i * size : (i + 1) * size]))
            self._index.put(table.keys[i], table.pages[i])
        table.num_recorded = max(table.num_recorded, num_full)

    def fork(self, parent: int, child: int, num_tokens: int) -> int:
        """The child shares the parent's pages of the first `num_tokens` tokens. Returns how many pages that is."""
        assert child not in self._tables
        source = self._tables[parent]
        num_shared = self.num_pages_for(num_tokens)
        assert num_shared <= len(source.pages)
        pages = source.pages[:num_shared]
        for page in pages:
            self._pool.share(page)
        num_full = min(num_tokens // self.page_size, source.num_recorded)
        self._tables[child] = _Table(list(pages), source.keys[:num_full], num_full, source.root)
        return num_shared

    def release(self, seq: int) -> None:
        """The sequence is done. Last page first, so that a prefix is evicted from its tail."""
        for page in reversed(self._tables.pop(seq).pages):
            self._pool.drop(page)

    def discard(self, seq: int) -> list[int]:
        """The sequence is done, and what it computed is worthless: it leaves the prefix index. Returns pages to be cleared."""
        own = [page for page in self._tables[seq].pages if self._pool.references(page) == 1]
        for page in own:
            self._index.forget(page)
        self.release(seq)
        return own

    def clear_prefixes(self) -> int:
        """Empty the prefix index. Returns how many pages were in it."""
        for table in self._tables.values():
            table.num_recorded = 0  # a live sequence is cached again once it is recorded anew
        return self._index.clear()

    # ---- inside

    def _shared(self, seq: int, start: int, end: int) -> list[int]:
        """Table entries of tokens start..end-1 whose pages are shared or in the prefix index."""
        pages = self._tables[seq].pages
        return [
            i
            for i in range(start // self.page_size, self.num_pages_for(end))
            if self._pool.references(pages[i]) > 1 or pages[i] in self._index
        ]

    def _take(self) -> int:
        page = self._pool.take()
        if self._index.forget(page):
            self.num_evicted += 1
        return page

    def check_integrity(self) -> None:
        """free + cached + owned = total, every reference has an owner, every key a page."""
        self._pool.check_integrity()
        self._index.check_integrity()
        owners: dict[int, int] = {}
        for table in self._tables.values():
            assert len(set(table.pages)) == len(table.pages), "a sequence holds a page twice"
            assert table.num_recorded <= min(len(table.keys), len(table.pages))
            for page in table.pages:
                owners[page] = owners.get(page, 0) + 1
        for page in range(1, self._pool.num_pages):
            assert self._pool.references(page) == owners.get(page, 0), f"page {page} is leaked or over-released"
        free = list(self._pool.free_pages())
        num_cached = sum(1 for page in free if page in self._index)
        num_empty = len(free) - num_cached
        assert num_empty + num_cached + len(owners) == self.num_pages
