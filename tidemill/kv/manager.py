"""KVManager: which pages a sequence owns, which it shares, and which of its tokens are already there.

tokens      0 ........ 15 | 16 ....... 31 | 32 ...... 40
group 0       page 7      |   page 2      |   page 9        every layer that sees all tokens
group 1       given back  |   page 4      |   page 5        layers with a window: what no query sees any more is given back
              in the prefix index           private, partly filled

All groups take their pages from one pool.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill.cache_layout import Group
from tidemill.kv.groups import GroupTable, PageChange
from tidemill.kv.pages import NULL_PAGE, PagePool
from tidemill.kv.prefix import PrefixIndex, chain_key, group_key, root_key

# What a page is, in a map of all pages: one of these, or FIRST_OWNER + the number of the sequence that alone holds it.
FREE, CACHED, SHARED, FIRST_OWNER = range(4)
_MOST_SEEN = 65_536  # keys of prompts that are remembered, of models with states


@dataclass(slots=True)
class _Sequence:
    tables: list[GroupTable]  # of each group
    keys: list[bytes] = field(default_factory=list)  # chain keys of the leading full pages, as far as they are known
    num_recorded: int = 0  # of them, how many are in the prefix index
    root: bytes = b""
    stops: list[int] = field(default_factory=list)  # where in its prompt states are kept beside those at every interval
    given_back: list[tuple[int, int]] = field(default_factory=list)  # pages, and how often they had been taken

    def held(self) -> Iterator[int]:
        """Its pages in all groups."""
        for table in self.tables:
            yield from table.held


class KVManager:
    """Page tables of all live sequences over one pool. Sequences are named by ints."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        groups: Sequence[Group] = (),
        most_at_once: int = 1,
    ) -> None:
        """`page_size`: tokens of a chain key; the groups' are multiples of it. `groups`: one that sees all, if not given.
        `most_at_once`: tokens of one sequence that a step may compute."""
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.groups = tuple(groups) or (Group(page_size),)
        assert all(group.page_size % page_size == 0 for group in self.groups)
        self.has_windows = any(group.window for group in self.groups)
        self.has_states = any(group.is_state for group in self.groups)
        self.num_evicted = 0  # cached pages overwritten so far
        self._most_at_once = most_at_once
        self._pool = PagePool(num_pages)
        self._index = PrefixIndex()
        self._fresh: dict[int, bytes] = {}  # states that the step being planned writes, and their keys
        self._seen: dict[bytes, None] = {}  # keys of prompts, the latest last; if there are states
        self._sequences: dict[int, _Sequence] = {}

    # ---- what there is

    @property
    def can_fork(self) -> bool:
        """Not anywhere: a state has gone past where others start."""
        return not self.has_states

    @property
    def num_pages(self) -> int:
        """Pages that can hold tokens."""
        return self._pool.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        """Pages that can be taken now; some may still hold cached content, which is evicted then."""
        return self._pool.num_free

    def num_pages_for(self, num_tokens: int) -> int:
        """What a sequence of so many tokens holds at most, in all groups."""
        return sum(group.most_pages(num_tokens, self._most_at_once) for group in self.groups)

    def tables(self, seq: int) -> list[list[int]]:
        """The sequence's pages in token order, of each group; the null page stands for those given back."""
        return [table.pages for table in self._sequences[seq].tables]

    def num_pages_of(self, seq: int) -> int:
        return sum(1 for _ in self._sequences[seq].held())

    def holds(self, seq: int) -> bool:
        return seq in self._sequences

    def page_keys(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """Chain keys by which a prompt's pages can be found: never the last token's, which must be computed for its logits."""
        if not self.prefix_caching:
            return []
        keys, key, size = [], root_key(salt, self.page_size), self.page_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            key = chain_key(key, token_ids[start : start + size])
            keys.append(key)
        return keys

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix of which every group has the pages that later tokens see."""
        num, before = len(keys), -1
        while num != before:
            before = num
            for g in range(len(self.groups)):
                num = self._num_found(g, keys, num) if num else 0
        return num * self.page_size

    def _num_found(self, g: int, keys: Sequence[bytes], num: int) -> int:
        """`num`, if the group has what a prefix of so many keys needs, or a smaller number that it may have."""
        group = self.groups[g]
        if group.is_state:
            return next((n for n in range(num, 0, -1) if self._find_state(g, keys, n) is not None), 0)
        per_page = group.page_size // self.page_size
        num -= num % per_page
        first, end = group.first_needed(num * self.page_size), num // per_page
        if group.window:
            for i in range(end - 1, first - 1, -1):  # any longer prefix that still sees a missing page lacks it, too
                if self._find(g, keys, i) is None:
                    return i * per_page
            return num
        return next((i * per_page for i in range(end) if self._find(g, keys, i) is None), num)

    def _find(self, g: int, keys: Sequence[bytes], i: int) -> int | None:
        """The group's page number `i` of a prefix with these keys."""
        return self._index.find(group_key(g, keys[(i + 1) * self.groups[g].page_size // self.page_size - 1]))

    def _find_state(self, g: int, keys: Sequence[bytes], num: int) -> int | None:
        """The group's page of the state after the tokens of the first `num` keys."""
        return self._index.find(group_key(g, keys[num - 1]))

    def _found(self, keys: Sequence[bytes]) -> tuple[int, list[GroupTable]]:
        """Tokens of the longest cached prefix and the tables of a sequence that starts with it."""
        num_tokens, tables = self.num_cached(keys), []
        for g, group in enumerate(self.groups):
            first = group.first_needed(num_tokens) if num_tokens else 0
            if group.is_state and num_tokens:
                pages = [self._find_state(g, keys, num_tokens // self.page_size) or NULL_PAGE]
            else:
                pages = [self._find(g, keys, i) or NULL_PAGE for i in range(first, num_tokens // group.page_size)]
            tables.append(GroupTable([NULL_PAGE] * first + pages, first))
        return num_tokens, tables

    def num_pages_to_admit(self, num_tokens: int, keys: Sequence[bytes] = ()) -> int:
        """Free pages that `admit` takes, and what groups with a window take later: new ones, and cached ones that no sequence
        holds."""
        num, (_, tables) = 0, self._found(keys)
        for group, table in zip(self.groups, tables, strict=True):
            found = table.held
            num += group.most_pages(num_tokens - table.num_trimmed * group.page_size, self._most_at_once) - len(found)
            num += sum(1 for page in found if self._pool.references(page) == 0)
        return num

    def num_copies_to_write(self, seq: int, start: int, end: int) -> int:
        """Free pages that `copies_to_write` would take."""
        return len(self._shared(seq, start, end))

    def num_freed_by(self, seqs: Sequence[int]) -> int:
        """Pages that would be free if these sequences were released: those that no other sequence holds."""
        owners = Counter(page for seq in seqs for page in self._sequences[seq].held())
        return sum(1 for page, num in owners.items() if self._pool.references(page) == num)

    def map(self, seqs: Sequence[int]) -> array[int]:
        """What each page is, for the live view. `seqs`: all that hold pages. Takes some 20 ms for 100,000 pages."""
        kinds = array("H", bytes(2 * self._pool.num_pages))
        for page in self._index.pages():
            kinds[page] = CACHED
        for owner, seq in enumerate(seqs, FIRST_OWNER):
            for page in self._sequences[seq].held():
                kinds[page] = owner if kinds[page] <= CACHED else SHARED
        return kinds[1:]  # without the null page

    # ---- taking and giving back

    def admit(self, seq: int, num_tokens: int, keys: Sequence[bytes] = (), salt: str = "", reserve: int = 0) -> int | None:
        """Share what is cached under a new sequence's keys, and give it pages for the rest of its tokens, except in groups with
        a window, which take them as they are written. Returns how many tokens are cached, or None if fewer than `reserve` pages
        would stay free (nothing is changed then)."""
        assert seq not in self._sequences
        if self.num_pages_to_admit(num_tokens, keys) + reserve > self._pool.num_free:
            return None
        num_cached, tables = self._found(keys)
        for table in tables:
            for page in table.held:
                self._pool.share(page)
        made = _Sequence(tables, list(keys), num_cached // self.page_size, root_key(salt, self.page_size))
        if self.has_states:
            made.stops = self._new_stops(keys)
        self._sequences[seq] = made
        for group, table in zip(self.groups, tables, strict=True):
            if not group.window:
                table.pages += [self._take() for _ in range(group.num_pages_for(num_tokens) - len(table.pages))]
        return num_cached

    def _new_stops(self, keys: Sequence[bytes]) -> list[int]:
        """Where other prompts probably leave this one: at its end, as the next turn of a conversation does, and where the part
        ends that it has in common with an earlier prompt. From now on this one is an earlier one."""
        num_known = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen.pop(key, None)
            self._seen[key] = None
        while len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return [num * self.page_size for num in (num_known, len(keys))]

    def until_stop(self, seq: int, start: int, count: int) -> int:
        """How many of the next `count` tokens a step may compute: a state is kept only where a step ends, or an interval."""
        return min([count, *[stop - start for stop in self._sequences[seq].stops if stop > start]])

    def extend(self, seq: int, num_tokens: int) -> list[PageChange] | None:
        """Make room for `num_tokens` tokens in all. Returns what was added (often nothing), or None if there are not enough
        pages (nothing is changed then)."""
        tables = self._sequences[seq].tables
        nums_new = [group.num_pages_for(num_tokens) - len(table.pages) for group, table in zip(self.groups, tables, strict=True)]
        if sum(num for num in nums_new if num > 0) > self._pool.num_free:
            return None
        changes = []
        for g, (table, num) in enumerate(zip(tables, nums_new, strict=True)):
            if num > 0:
                new = [self._take() for _ in range(num)]
                changes.append(PageChange(g, len(table.pages), new))
                table.pages += new
        return changes

    def shrink(self, seq: int, num_tokens: int) -> list[PageChange]:
        """Give back pages past so many tokens: they hold drafts that were not accepted. Returns the entries that name no page
        any more."""
        changes = []
        for g, (group, table) in enumerate(zip(self.groups, self._sequences[seq].tables, strict=True)):
            num_kept = max(group.num_pages_for(num_tokens), table.num_trimmed)
            given = table.pages[num_kept:]
            if given:
                del table.pages[num_kept:]
                changes.append(PageChange(g, num_kept, [NULL_PAGE] * len(given)))
                for page in given:
                    self._pool.drop(page)
        return changes

    def trim(self, seq: int, position: int) -> list[PageChange]:
        """Give back what no query at this position or a later one sees. Returns the entries that name no page any more."""
        changes, sequence = [], self._sequences[seq]
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            first = table.num_trimmed
            given = table.trim(group.first_needed(position))
            sequence.given_back += [(page, self._pool.times_taken(page)) for page in given]
            if len(sequence.given_back) > 2 * self._pool.num_pages:
                sequence.given_back = self._unchanged(sequence)
            for page in given:
                self._pool.drop(page)
            if given:
                changes.append(PageChange(g, first, [NULL_PAGE] * len(given)))
        return changes

    def copies_to_write(self, seq: int, start: int, end: int) -> list[tuple[int, int, int]] | None:
        """Make the pages of tokens start..end-1 private before they are written. Returns (group, index in table, old page) for
        each page replaced, whose content must be copied into the new one; None if there are not enough free pages (nothing is
        changed)."""
        tables, shared = self._sequences[seq].tables, self._shared(seq, start, end)
        if len(shared) > self._pool.num_free:
            return None
        copies = []
        for g, i in shared:
            copies.append((g, i, tables[g].pages[i]))
            tables[g].pages[i] = self._take()
        for _, _, old in copies:  # only now: the source must not be handed out as another copy's target
            self._pool.drop(old)
        return copies

    def record(self, seq: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tokens up to `num_computed` are computed, or will be by the step being planned: full pages enter the prefix index."""
        if not self.prefix_caching:
            return
        sequence, size = self._sequences[seq], self.page_size
        num_full = min(num_computed, len(token_ids)) // size
        for i in range(sequence.num_recorded, num_full):
            if i == len(sequence.keys):
                parent = sequence.keys[i - 1] if i else sequence.root
                sequence.keys.append(chain_key(parent, token_ids[i * size : (i + 1) * size]))
            self._record_page(sequence, i, is_stop=(i + 1) * size == num_computed and num_computed in sequence.stops)
        sequence.num_recorded = max(sequence.num_recorded, num_full)

    def begin_step(self) -> None:
        """What was planned so far is computed before what is planned now. Only then can another sequence start from a state,
        while keys and values can be shared in the step that computes them."""
        for page, key in self._fresh.items():
            self._index.put(key, page)
        self._fresh.clear()

    def _record_page(self, sequence: _Sequence, i: int, is_stop: bool) -> None:
        """Pages that end with the tokens of key number `i`. `is_stop`: so does the step, and the state that it leaves, full page
        or not, is kept; the sequence goes on in a copy."""
        end = (i + 1) * self.page_size
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            at = (end - 1) // group.page_size
            if (end % group.page_size == 0 or (is_stop and group.is_state)) and table.num_trimmed <= at < len(table.pages):
                key = group_key(g, sequence.keys[i])
                if group.is_state:
                    self._fresh[table.pages[at]] = key
                else:
                    self._index.put(key, table.pages[at])

    def fork(self, parent: int, child: int, num_tokens: int) -> int:
        """The child shares the parent's pages of the first `num_tokens` tokens. Returns how many pages that is."""
        assert child not in self._sequences
        assert self.can_fork
        source, tables = self._sequences[parent], []
        for group, table in zip(self.groups, source.tables, strict=True):
            num_shared = group.num_pages_for(num_tokens)
            assert num_shared <= len(table.pages)
            tables.append(GroupTable(table.pages[:num_shared], min(table.num_trimmed, num_shared)))
        num_full = min(num_tokens // self.page_size, source.num_recorded)
        made = _Sequence(tables, source.keys[:num_full], num_full, source.root)
        for page in made.held():
            self._pool.share(page)
        self._sequences[child] = made
        return self.num_pages_of(child)

    def release(self, seq: int) -> None:
        """The sequence is done. Last page first, so that a prefix is evicted from its tail."""
        tables = self._sequences.pop(seq).tables
        held = [
            (i * group.page_size, table.pages[i])
            for group, table in zip(self.groups, tables, strict=True)
            for i in range(table.num_trimmed, len(table.pages))
        ]
        if len(tables) > 1:
            held.sort(key=lambda entry: entry[0])
        for _, page in reversed(held):
            self._pool.drop(page)

    def discard(self, seq: int) -> list[int]:
        """The sequence is done, and what it computed is worthless: it leaves the prefix index, with what was given back before.
        Returns pages to be cleared: those that no other sequence holds or has held since."""
        sequence = self._sequences[seq]
        keys = [group_key(g, key) for key in sequence.keys[: sequence.num_recorded] for g in range(len(self.groups))]
        worthless = {*sequence.held(), *(page for key in keys if (page := self._index.find(key)) is not None)}
        worthless |= {page for page, _ in self._unchanged(sequence)}
        self.release(seq)
        own = sorted(page for page in worthless if self._pool.references(page) == 0)
        for page in own:
            self._index.forget(page)
            self._fresh.pop(page, None)
        return own

    def clear_prefixes(self) -> int:
        """Empty the prefix index. Returns how many pages were in it."""
        for sequence in self._sequences.values():
            sequence.num_recorded = 0  # a live sequence is cached again once it is recorded anew
        self._fresh.clear()
        return self._index.clear()

    # ---- inside

    def _unchanged(self, sequence: _Sequence) -> list[tuple[int, int]]:
        """What it gave back and no other has taken since."""
        return [(page, times) for page, times in sequence.given_back if self._pool.times_taken(page) == times]

    def _shared(self, seq: int, start: int, end: int) -> list[tuple[int, int]]:
        """Entries (group, index) of tokens start..end-1 whose pages are shared or in the prefix index."""
        return [
            (g, i)
            for g, (group, table) in enumerate(zip(self.groups, self._sequences[seq].tables, strict=True))
            for i in range(start // group.page_size, min(group.num_pages_for(end), len(table.pages)))
            if self._pool.references(table.pages[i]) > 1 or table.pages[i] in self._index
        ]

    def _take(self) -> int:
        page = self._pool.take()
        self._fresh.pop(page, None)
        if self._index.forget(page):
            self.num_evicted += 1
        return page

    def check_integrity(self) -> None:
        """free + cached + owned = total, every reference has an owner, every key a page."""
        self._pool.check_integrity()
        self._index.check_integrity()
        owners: dict[int, int] = {}
        for sequence in self._sequences.values():
            held = list(sequence.held())
            assert NULL_PAGE not in held
            assert len(set(held)) == len(held), "a sequence holds a page twice"
            assert sequence.num_recorded <= len(sequence.keys)
            assert all(not any(table.pages[: table.num_trimmed]) for table in sequence.tables)
            for page in held:
                owners[page] = owners.get(page, 0) + 1
        for page in range(1, self._pool.num_pages):
            assert self._pool.references(page) == owners.get(page, 0), f"page {page} is leaked or over-released"
        free = list(self._pool.free_pages())
        num_cached = sum(1 for page in free if page in self._index)
        num_empty = len(free) - num_cached
        assert num_empty + num_cached + len(owners) == self.num_pages
