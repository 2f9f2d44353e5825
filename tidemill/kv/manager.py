"""KVManager: which pages a sequence owns, which it shares, and which of its tokens are already
there.

tokens      0 ........ 15 | 16 ....... 31 | 32 ...... 40
group 0       page 7      |   page 2      |   page 9        every layer that sees all tokens
group 1       given back  |   page 4      |   page 5        layers with a window: what no query sees any more is given back
              in the prefix index           private, partly filled

All groups take their pages from one pool.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set

import msgspec

from tidemill.kv.behind import Behind, Leaving, tokens_by_tier
from tidemill.kv.groups import GroupTable, Match, PageChange, Start
from tidemill.kv.holds import Held, Holds
from tidemill.kv.offload import Offload
from tidemill.kv.pages import NULL_PAGE, PagePool
from tidemill.kv.prefix import AnyIndex, Found, HashIndex, Path
from tidemill.kv.radix import RadixIndex
from tidemill.kv.tiers import Tiers
from tidemill.types.cache_layout import Group
from tidemill.types.inputs import Segment, uncut
from tidemill.types.kv_policy import CachePolicy

INDEXES: dict[str, type[AnyIndex]] = {"hash": HashIndex, "radix": RadixIndex}

# What a page is, in a map of all pages: one of these, or FIRST_OWNER + the number of the sequence
# that alone holds it.
FREE, CACHED, SHARED, FIRST_OWNER = range(4)


class _Sequence(msgspec.Struct):
    tables: list[GroupTable]  # of each group
    path: Path
    num_recorded: int = 0  # leading full pages that are in the prefix index
    stops: Sequence[int] = ()  # where in its prompt states are kept beside those at every interval
    given_back: list[tuple[int, int]] = []  # pages, and how often they had been taken
    policy: CachePolicy | None = None  # which tokens stay; None: all

    def held(self) -> Iterator[int]:
        """Its pages in all groups."""
        for table in self.tables:
            yield from table.held

    def num_slots(self, num_tokens: int) -> int:
        return num_tokens if self.policy is None else self.policy.num_slots(num_tokens)


class KVManager:
    """Page tables of all live sequences over one pool. Sequences are named by ints."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        groups: Sequence[Group] = (),
        most_at_once: int = 1,
        index: str = "hash",
        tiers: Tiers | None = None,
        max_held: float = 0.5,
        tells_empty: bool = False,
    ) -> None:
        """`page_size`: tokens; the groups' are multiples of it. `groups`: one that sees all, if not
        given. `most_at_once`: tokens of one sequence that a step may compute. `index`: one of
        `INDEXES`; only the hashes can have `tiers` behind them. `max_held`: the part of the pages
        that may be held. `tells_empty`: pages that become empty are noted, for `take_emptied`."""
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.groups = tuple(groups) or (Group(page_size),)
        assert all(group.page_size % page_size == 0 for group in self.groups)
        self.has_windows = any(group.window for group in self.groups)
        self.has_states = any(group.is_state for group in self.groups)
        self.can_fork = not self.has_states  # anywhere: a state has gone past where others start
        self.num_evicted = 0  # cached pages overwritten so far
        self._most_at_once = most_at_once
        self.pool = PagePool(num_pages)
        self.held = Holds(self.pool, int(max_held * (num_pages - 1)) if prefix_caching else 0)
        self.index = INDEXES[index](page_size, self.groups)
        self._fresh: set[int] = set()  # pages in the index that the step being planned writes
        self._sequences: dict[int, _Sequence] = {}
        self.behind = (
            None if tiers is None or not prefix_caching else Behind(tiers, self.index, self.pool)
        )
        self.offload = Offload(
            self.behind, self.pool, self.index, page_size, self._sequences, self._take, self._forget
        )
        self._step = 0  # that is being planned
        self._emptied: set[int] | None = set() if tells_empty else None

    # ---- what there is

    @property
    def num_pages(self) -> int:
        """Pages that can hold tokens."""
        return self.pool.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        """Pages that can be taken now; some may still hold cached content, which is evicted then."""
        return self.pool.num_free

    def num_pages_for(self, num_tokens: int, policy: CachePolicy | None = None) -> int:
        """The most pages that a sequence of so many tokens holds, in all groups."""
        num_slots = num_tokens if policy is None else policy.most_slots(num_tokens)
        return sum([group.most_pages(num_slots, self._most_at_once) for group in self.groups])

    def tables(self, seq: int) -> list[list[int]]:
        """The sequence's pages in token order, of each group; the null page stands for those given
        back."""
        return [table.pages for table in self._sequences[seq].tables]

    def num_pages_of(self, seq: int) -> int:
        return sum(1 for _ in self._sequences[seq].held())

    def holds(self, seq: int) -> bool:
        return seq in self._sequences

    @property
    def sequences(self) -> Set[int]:
        return self._sequences.keys()

    def path(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        most: int | None = None,
        segments: Sequence[Segment] = (),
    ) -> Path:
        """By which a prompt's pages can be found, of the first `most` tokens: never the last
        token's, which must be computed for its logits."""
        num = len(token_ids) - 1 if most is None else min(len(token_ids) - 1, most)
        return self.index.path(token_ids, salt, max(num, 0) if self.prefix_caching else 0, segments)

    def num_cached(self, path: Path) -> int:
        """Tokens of the longest prefix of which every group has the pages that later tokens see."""
        return self._match(path).num_tokens if self.index.knows_begin(path) else 0

    def _match(self, path: Path, policy: CachePolicy | None = None) -> Match:
        """Without the tiers, if what they hold is faster computed again."""
        match = self._match_in(self.index.find(path), path.segments, policy)
        if self.behind is None:
            return match
        num_bytes = self.behind.bytes_to_load(match.tables)
        if not num_bytes or not all(map(self.behind.tiers.costs.knows, num_bytes)):
            return match
        plain = self._match_in(self.behind.find_in_pages(path), path.segments, policy)
        num_gained = match.num_tokens - plain.num_tokens
        return match if self.behind.tiers.costs.load_is_faster(num_bytes, num_gained) else plain

    def _match_in(
        self, found: Found, segments: Sequence[Segment], policy: CachePolicy | None = None
    ) -> Match:
        most = uncut(segments, found.num_tokens)
        if not most:
            return Match(0, 0, [GroupTable([]) for _ in self.groups], [])
        tables, num_pages = [], most // self.page_size
        # it may move what it shares, in copies, which are made before the step that writes these
        if policy is not None:
            num_pages = next(
                (i for i in range(num_pages) if found.pages[0][i] in self._fresh), num_pages
            )
        num_tokens, partly = self._num_usable(found.pages, num_pages, segments) * self.page_size, []
        # else `partly` is of a later page
        is_in_page = most // self.page_size == found.num_tokens // self.page_size
        if self.can_fork and is_in_page and num_tokens < most < num_tokens + self.page_size:
            # What this step writes can be shared, but not copied, which is done before it.
            partly = next(
                (pages for pages in found.partly if all(pages) and self._fresh.isdisjoint(pages)),
                [],
            )
            num_tokens = most if partly else num_tokens
        for group, pages in zip(self.groups, found.pages, strict=True):
            first = group.first_needed(num_tokens) if num_tokens else 0
            end = num_tokens // self.page_size
            needed = (
                pages[max(end - 1, 0) : end]
                if group.is_state
                else pages[first : num_tokens // group.page_size]
            )
            tables.append(GroupTable([*[NULL_PAGE] * first, *needed], first))
        return Match(num_tokens, found.num_tokens, tables, partly)

    def _num_usable(
        self, pages: Sequence[Sequence[int]], num: int, segments: Sequence[Segment]
    ) -> int:
        """The number of leading pages, of so many, at whose end the prompt may be cut and every
        group has the pages it needs."""
        before = -1
        while num != before:
            before = num
            for group, held in zip(self.groups, pages, strict=True):
                num = self._num_held(group, held, num) if num else 0
            num = uncut(segments, num * self.page_size) // self.page_size
        return num

    def _num_held(self, group: Group, pages: Sequence[int], num: int) -> int:
        """`num`, if these pages of the group hold what a prefix of so many needs, or a smaller
        number for which they may."""
        if group.is_state:
            return next(
                (n for n in range(num, 0, -1) if pages[n - 1] and pages[n - 1] not in self._fresh),
                0,
            )
        per_page = group.page_size // self.page_size
        num -= num % per_page
        first, end = group.first_needed(num * self.page_size), num // per_page
        if group.window:  # any longer prefix that still sees a missing page lacks it, too
            return next((i * per_page for i in range(end - 1, first - 1, -1) if not pages[i]), num)
        return next((i * per_page for i in range(end) if not pages[i]), num)

    def num_pages_to_admit(
        self, num_tokens: int, path: Path, policy: CachePolicy | None = None
    ) -> int:
        """Free pages that `admit` takes, and what groups with a window take later: new ones, and
        cached ones that no sequence holds."""
        return self._num_pages_to_admit(
            num_tokens if policy is None else policy.most_slots(num_tokens),
            self._match(path, policy),
        )

    def _num_pages_to_admit(self, num_tokens: int, match: Match) -> int:
        num = 0
        for group, table in zip(self.groups, match.tables, strict=True):
            found = table.held
            num += group.most_pages(
                num_tokens - table.num_trimmed * group.page_size, self._most_at_once
            ) - len(found)
            num += len([page for page in found if page < 0 or self.pool.references(page) == 0])
        return num

    def num_pages_to_go_on(self, seq: int, start: int, end: int) -> int:
        """Free pages that `copies_to_write`, and `extend` without windows, would take for tokens
        start..end-1."""
        return len(self._shared(seq, start, end)) + sum(
            num for num in self._nums_new(seq, end, False) if num > 0
        )

    def num_freed_by(self, seqs: Sequence[int]) -> int:
        """Pages that would be free if these sequences were released: those that no other sequence
        holds."""
        owners = Counter(page for seq in seqs for page in self._sequences[seq].held())
        return sum(1 for page, num in owners.items() if self.pool.references(page) == num)

    def map(self, seqs: Sequence[int]) -> array[int]:
        """The kind or owner of each page, for the live view. `seqs`: all that hold pages. Takes
        some 20 ms for 100,000 pages."""
        kinds = array("H", bytes(2 * self.pool.num_pages))
        for page in self.index.pages():
            kinds[page] = CACHED
        for owner, seq in enumerate(seqs, FIRST_OWNER):
            for page in self._sequences[seq].held():
                kinds[page] = owner if kinds[page] <= CACHED else SHARED
        return kinds[1:]  # without the null page

    # ---- holding prefixes

    @property
    def num_held_pages(self) -> int:
        return self.pool.num_kept

    def hold(self, seq: int, token_ids: Sequence[int], held: Held) -> tuple[str, list[Held]]:
        """Hold what is cached of a sequence's first `held.num_tokens` tokens, whose pages are found
        here. As `Holds.put`."""
        num = held.num_tokens // self.page_size * self.page_size
        sequence = self._sequences[seq]
        path = sequence.path.through(token_ids, num)
        found = self.index.find(path) if self.behind is None else self.behind.find_in_pages(path)
        match = self._match_in(found, path.segments)
        loading = () if self.behind is None else self.behind.loading
        for group, table, own in zip(self.groups, match.tables, sequence.tables, strict=True):
            for i in range(
                table.num_trimmed, 0 if group.is_state else min(len(table.pages), len(own.pages))
            ):
                if (
                    self.pool.references(table.pages[i]) == 0 or table.pages[i] in loading
                ) and own.pages[i] in self.index:
                    # of several pages with this content, one that has it and is not free
                    table.pages[i] = own.pages[i]
        held.num_tokens, held.pages = (
            match.num_tokens,
            [page for _, page in self._in_order(match.tables)],
        )
        if self.behind is not None:
            for page in held.pages:
                self.behind.reuse(page)
        return self.held.put(held)

    def drop_broken_holds(self) -> list[Held]:
        """Those with a page that could not be loaded."""
        return self.held.drop_broken(self.index.__contains__)

    # ---- taking and giving back

    def admit(
        self,
        seq: int,
        num_tokens: int,
        path: Path,
        reserve: int = 0,
        policy: CachePolicy | None = None,
    ) -> Start | None:
        """Share what is cached of a new sequence, and give it pages for the rest of its tokens,
        except in groups with a window, which take them as they are written. Returns None if fewer
        than `reserve` pages would stay free (nothing is changed then). `policy`: which tokens stay
        in its pages; None: all."""
        assert seq not in self._sequences
        match, copies = self._match(path, policy), []
        num_slots = num_tokens if policy is None else policy.most_slots(num_tokens)
        if self._num_pages_to_admit(num_slots, match) + reserve > self.pool.num_free:
            return None
        fetched = [] if self.behind is None else self.behind.fetched_of(match.tables)
        self._share(match.tables)
        loads = [] if self.behind is None else self.behind.hold(match.tables)
        stops = self._stops(num_tokens, match) if self.prefix_caching and self.has_states else ()
        sequence = _Sequence(
            match.tables,
            path.until(num_tokens),
            match.num_tokens // self.page_size,
            stops,
            policy=policy,
        )
        self._sequences[seq] = sequence
        if self.behind is not None:
            self.behind.is_back(seq)
            for g, i, key, tier in loads:
                page = match.tables[g].pages[i] = self._take()
                self.behind.load(key, tier, page)
        for g, (group, table) in enumerate(zip(self.groups, match.tables, strict=True)):
            at = len(table.pages)
            num_new = (
                min(1, len(match.partly)) if group.window else group.num_pages_for(num_slots) - at
            )
            table.pages += self._take_all(num_new)
            # else that very page was free, and is now its own
            if match.partly and table.pages[at] != match.partly[g]:
                copies.append((g, at, match.partly[g]))
        by_tier = (
            tokens_by_tier(loads + fetched, self.groups, self.page_size, match.num_tokens)
            if loads or fetched
            else ()
        )
        return Start(match.num_tokens, match.num_matching, copies, *by_tier)

    def _share(self, tables: list[GroupTable]) -> None:
        for page in (page for table in tables for page in table.held if page > 0):
            self.pool.share(page)
            if self.behind is not None:
                self.behind.reuse(page)
                self.behind.offer(page, self._step)

    def _stops(self, num_tokens: int, match: Match) -> tuple[int, int]:
        """The positions where other prompts probably leave this one: where the part ends that it
        has in common with an earlier prompt, and at its end, as the next turn of a conversation
        does."""
        size = self.page_size
        return match.num_matching // size * size, (num_tokens - 1) // size * size

    def until_stop(self, seq: int, start: int, count: int) -> int:
        """The number of the next `count` tokens that a step may compute: a state is kept only where
        a step ends, or an interval."""
        stops = self._sequences[seq].stops
        return min([count, *[stop - start for stop in stops if stop > start]]) if stops else count

    def extend(self, seq: int, num_tokens: int, windows: bool = True) -> list[PageChange] | None:
        """Make room for `num_tokens` tokens in all. Returns what was added (often nothing), or None
        if there are not enough pages (nothing is changed then). `windows`: also in groups with a
        window."""
        tables = self._sequences[seq].tables
        if len(tables) == 1 and num_tokens <= len(tables[0].pages) * self.groups[0].page_size:
            return []
        nums_new = self._nums_new(seq, num_tokens, windows)
        if sum(num for num in nums_new if num > 0) > self.pool.num_free:
            return None
        changes = []
        for g, (table, num) in enumerate(zip(tables, nums_new, strict=True)):
            if num > 0:
                new = self._take_all(num)
                changes.append(PageChange(g, len(table.pages), new))
                table.pages += new
        return changes

    def shrink(self, seq: int, num_tokens: int) -> list[PageChange]:
        """Give back pages past so many tokens: they hold drafts that were not accepted. Returns the
        entries that name no page any more."""
        changes, sequence = [], self._sequences[seq]
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            num_kept = max(group.num_pages_for(sequence.num_slots(num_tokens)), table.num_trimmed)
            given_back = table.pages[num_kept:]
            if given_back:
                del table.pages[num_kept:]
                changes.append(PageChange(g, num_kept, [NULL_PAGE] * len(given_back)))
                self._give_back(sequence, given_back)
        return changes

    def trim(self, seq: int, position: int) -> list[PageChange]:
        """Give back what no query at this position or a later one sees. Returns the entries that
        name no page any more."""
        changes, sequence = [], self._sequences[seq]
        if sequence.policy is not None:
            next_end = position + 1
            return (
                self.shrink(seq, next_end) if sequence.policy.num_slots(next_end) < next_end else []
            )
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            first = table.num_trimmed
            given_back = table.trim(group.first_needed(position))
            if given_back:
                self._give_back(sequence, given_back)
                changes.append(PageChange(g, first, [NULL_PAGE] * len(given_back)))
        return changes

    def copies_to_write(self, seq: int, start: int, end: int) -> list[tuple[int, int, int]] | None:
        """Make the pages of tokens start..end-1 private before they are written. Returns (group,
        index in table, old page) for each page replaced, whose content must be copied into the new
        one; None if there are not enough free pages (nothing is changed). A cached page that no
        other sequence holds is overwritten before another request has to give way."""
        sequence, shared = self._sequences[seq], self._shared(seq, start, end)
        tables = sequence.tables
        if len(shared) > self.pool.num_free:
            cached = [(g, i) for g, i in shared if self.pool.references(tables[g].pages[i]) == 1]
            if len(shared) - len(cached) > self.pool.num_free:
                return None
            for g, i in cached:
                self._forget(tables[g].pages[i])
            shared = [entry for entry in shared if entry not in cached]
        copies = []
        for g, i in shared:
            copies.append((g, i, tables[g].pages[i]))
            tables[g].pages[i] = self._take()
        # only now: no source may be another copy's target
        self._give_back(sequence, [old for _, _, old in reversed(copies)])
        return copies

    def record(self, seq: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tokens up to `num_computed` are computed, or will be by the step being planned: full
        pages enter the prefix index."""
        if not self.prefix_caching:
            return
        sequence = self._sequences[seq]
        if sequence.policy is not None:
            num_computed = sequence.policy.num_recordable(num_computed)
        start, end = sequence.num_recorded * self.page_size, min(num_computed, len(token_ids))
        if end - start < self.page_size and not sequence.stops:
            return
        sequence.num_recorded = max(sequence.num_recorded, end // self.page_size)
        stops = (end,) if start < end == num_computed and end in sequence.stops else ()
        for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            first = max(start // group.page_size, table.num_trimmed)
            if group.is_state:
                ends = range((first + 1) * group.page_size, end + 1, group.page_size)
                for at in (*ends, *stops):  # where the step ends, the sequence goes on in a copy
                    self._put(
                        sequence,
                        token_ids,
                        g,
                        at // self.page_size - 1,
                        [table.pages[(at - 1) // group.page_size]],
                    )
            elif pages := table.pages[first : end // group.page_size]:
                self._put(sequence, token_ids, g, first, pages)

    def _put(
        self,
        sequence: _Sequence,
        token_ids: Sequence[int],
        group: int,
        first: int,
        pages: list[int],
    ) -> None:
        self._fresh.update(self.index.put(sequence.path, token_ids, group, first, pages))
        if self.behind is not None:
            for page in pages:
                self.behind.offer(page, self._step)

    def begin_step(self, step: int = 0) -> None:
        """Begins a step: everything planned so far is computed before what is planned now. Only
        then can another sequence start from a state, or from part of a page, while full pages of
        keys and values can be shared in the step that computes them."""
        self._fresh.clear()
        self._step = step

    def can_fork_from(self, seq: int) -> bool:
        """Others may share its pages, which are written once."""
        return self.can_fork and self._sequences[seq].policy is None

    def can_fork_at(self, seq: int, num_tokens: int) -> bool:
        """The sequence has all that tokens after the first `num_tokens` see."""
        tables = self._sequences[seq].tables
        return self.can_fork_from(seq) and all(
            table.num_trimmed <= group.first_needed(num_tokens)
            for group, table in zip(self.groups, tables, strict=True)
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> int:
        """The child shares the parent's pages of the first `num_tokens` tokens. Returns how many
        pages that is."""
        assert child not in self._sequences
        assert self.can_fork
        source, tables = self._sequences[parent], []
        for group, table in zip(self.groups, source.tables, strict=True):
            num_shared = group.num_pages_for(num_tokens)
            assert num_shared <= len(table.pages)
            tables.append(GroupTable(table.pages[:num_shared], min(table.num_trimmed, num_shared)))
        num_full = min(num_tokens // self.page_size, source.num_recorded)
        forked = _Sequence(tables, source.path.until(num_full * self.page_size), num_full)
        for page in forked.held():
            self.pool.share(page)
        self._sequences[child] = forked
        return self.num_pages_of(child)

    def entries_beyond(self, parent: int, child: int) -> list[PageChange]:
        """Entries of the parent's tables past the end of the child's, which name no page of the
        child."""
        ends = zip(self.tables(parent), self.tables(child), strict=True)
        return [
            PageChange(g, len(own), [NULL_PAGE] * (len(all_) - len(own)))
            for g, (all_, own) in enumerate(ends)
            if len(all_) > len(own)
        ]

    def release(self, seq: int) -> None:
        """The sequence is done. Last page first, so that a prefix is evicted from its tail."""
        tables = self._sequences.pop(seq).tables
        pages = [page for _, page in self._in_order(tables)] if len(tables) > 1 else tables[0].held
        pages.reverse()
        if self._emptied is None:
            self.pool.drop_all(pages)
            return
        for page in pages:
            self._drop(page)

    def _in_order(self, tables: Sequence[GroupTable]) -> list[tuple[int, int]]:
        """Pages of all groups in token order, each with its first position."""
        held = [
            (i * group.page_size, table.pages[i])
            for group, table in zip(self.groups, tables, strict=True)
            for i in range(table.num_trimmed, len(table.pages))
        ]
        return held if len(tables) == 1 else sorted(held, key=lambda entry: entry[0])

    def preempt(self, seq: int, is_lost: bool = False) -> Leaving | None:
        """The sequence gives up its pages and will come back. Returns how, if there are tiers to
        choose. `is_lost`: what it computed is worthless."""
        leaving, sequence = None, self._sequences[seq]
        if self.behind is not None and self.behind.tiers.host.num and not is_lost:
            leaving = self.behind.leave(
                seq, list(sequence.held()), sequence.num_recorded * self.page_size
            )
        self.release(seq)
        return leaving

    def discard(self, seq: int) -> list[int]:
        """The sequence is done, and what it computed is worthless: it leaves the prefix index, with
        what was given back before. Returns pages to be cleared: those that no other sequence holds
        or has taken since."""
        sequence = self._sequences[seq]
        worthless = {*sequence.held(), *(page for page, _ in self._unchanged(sequence))}
        self.release(seq)
        if self.behind is not None:
            self.behind.drop(sequence.path)
        own = sorted(page for page in worthless if self.pool.references(page) == 0)
        for page in own:
            self._forget(page)
        return own

    def unused(self, pages: Collection[int]) -> list[int]:
        """Those that no sequence holds and that are not cached."""
        return (
            []
            if not pages
            else sorted(
                page for page in pages if self.pool.references(page) == 0 and page not in self.index
            )
        )

    def clear_prefixes(self) -> int:
        """Empty the prefix index. Returns how many pages were in it."""
        for sequence in self._sequences.values():
            sequence.num_recorded = 0  # a live sequence is cached again once it is recorded anew
        self._fresh.clear()
        self.held.clear()
        if self._emptied is not None:
            self._emptied.update(self.pool.free_pages())
        return self.index.clear()

    def take_emptied(self) -> list[int]:
        """Pages that hold nothing since the last call: no sequence has them, and they are not
        cached."""
        if not self._emptied:
            return []
        emptied = self.unused(self._emptied)
        self._emptied.clear()
        return emptied

    # ---- inside

    def cached_pages(self) -> Iterator[int]:
        """That no sequence holds, the latest first. A prefix comes before what follows it."""
        return iter([page for page in self.pool.free_pages() if page in self.index][::-1])

    def save(self, page: int) -> None:
        """A cached page goes to the tiers, though it stays."""
        if self.behind is not None and self.pool.references(page) == 0:
            self.behind.save(page, self._step)

    def _give_back(self, sequence: _Sequence, pages: list[int]) -> None:
        """The sequence goes on without these pages."""
        sequence.given_back += [(page, self.pool.times_taken(page)) for page in pages]
        if len(sequence.given_back) > 2 * self.pool.num_pages:
            sequence.given_back = self._unchanged(sequence)
        for page in pages:
            self._drop(page)

    def _drop(self, page: int) -> None:
        if self.pool.drop(page) and self._emptied is not None:
            self._emptied.add(page)

    def _unchanged(self, sequence: _Sequence) -> list[tuple[int, int]]:
        """The pages that the sequence gave back and none has taken since."""
        return [
            (page, times)
            for page, times in sequence.given_back
            if self.pool.times_taken(page) == times
        ]

    def _nums_new(self, seq: int, num_tokens: int, windows: bool) -> list[int]:
        """By group: pages that it lacks for so many tokens; negative: it has more."""
        sequence = self._sequences[seq]
        num_slots, tables = (
            sequence.num_slots(num_tokens),
            zip(self.groups, sequence.tables, strict=True),
        )
        return [
            group.num_pages_for(num_slots) - len(table.pages) if windows or not group.window else 0
            for group, table in tables
        ]

    def _shared(self, seq: int, start: int, end: int) -> list[tuple[int, int]]:
        """Entries (group, index) of tokens start..end-1 whose pages are shared or in the prefix
        index."""
        sequence, ranges = self._sequences[seq], [(start, end)]
        if sequence.policy is not None:
            ranges = sequence.policy.written(start, end)
        found = [
            (g, i)
            for g, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True))
            for first, last in ranges
            for i in range(
                first // group.page_size, min(group.num_pages_for(last), len(table.pages))
            )
            if self.pool.references(table.pages[i]) > 1 or table.pages[i] in self.index
        ]
        return found if len(ranges) == 1 else sorted(set(found))

    def _take(self) -> int:
        page = self.pool.take()
        if self.behind is not None:
            self.behind.save(page, self._step)
        if self._forget(page):
            self.num_evicted += 1
        return page

    def _take_all(self, num: int) -> list[int]:
        if self.behind is not None:
            return [self._take() for _ in range(num)]
        pages = self.pool.take_all(num)
        self._fresh.difference_update(pages)
        self.num_evicted += self.index.forget_all(pages)
        return pages

    def _forget(self, page: int) -> bool:
        self._fresh.discard(page)
        if self.pool.keepers(page):
            self.pool.renew(page)
        return self.index.forget(page)

    def check_integrity(self) -> None:
        """free + cached + owned = total, every reference has an owner, every key a page."""
        self.pool.check_integrity()
        self.index.check_integrity()
        self.held.check_integrity()
        owners = dict(self.held.pins)
        if self.behind is not None:
            self.behind.check_integrity()
            owners |= {page: owners.get(page, 0) + 1 for page in self.behind.loading}
        for sequence in self._sequences.values():
            held = list(sequence.held())
            assert NULL_PAGE not in held
            assert len(set(held)) == len(held), "a sequence holds a page twice"
            assert all(not any(table.pages[: table.num_trimmed]) for table in sequence.tables)
            for page in held:
                owners[page] = owners.get(page, 0) + 1
        for page in range(1, self.pool.num_pages):
            assert self.pool.references(page) == owners.get(page, 0), (
                f"page {page} is leaked or over-released"
            )
        free = list(self.pool.free_pages())
        num_cached = sum(1 for page in free if page in self.index)
        num_empty = len(free) - num_cached
        assert num_empty + num_cached + len(owners) == self.num_pages
