"""A step's work as lists of integers, made on the host with numpy: which tokens, and what the
kernels of attention and states do for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import triton.language as tl

from tidemill.kernels.cuda import records
from tidemill.kernels.cuda.attention_lists import BLOCK, SPLIT
from tidemill.kernels.cuda.page_copies import PROGRAMS as COPY_PROGRAMS
from tidemill.kernels.cuda.records import COPIES, HEADER, LIVE, MEMBERS, PROMPTS, SHARED, STATES
from tidemill.sched.plan import StepItem

_PER_SPLIT = SPLIT // BLOCK
_NONE = np.zeros((0, 4), np.int32)
_NO_PROMPTS, _NO_COPIES = (
    np.zeros((0, width.value), np.int32) for width in (records.PROMPT_WIDTH, records.COPY_WIDTH)
)


def _records(width: tl.constexpr, *fields: tuple[tl.constexpr, np.ndarray]) -> np.ndarray:
    """A list of records from its fields, each with where it stands in a record."""
    made = np.zeros((fields[0][1].size, width.value), np.int32)
    for at, values in fields:
        made[:, at.value] = values
    return made


def padded(size: int) -> int:
    """Room for so many tokens' words: what follows begins at a multiple of 16 bytes, whatever the
    size."""
    return -(-size // 4) * 4


@dataclass(slots=True)
class Work:
    """The work of one step. A single is a request with one token, a prompt one with more."""

    rows: np.ndarray  # of every token
    positions: np.ndarray
    singles: np.ndarray
    shared: np.ndarray
    members: np.ndarray
    prompts: np.ndarray
    last: np.ndarray  # tokens that yield logits
    # sequences of which states are computed
    state_sequences: np.ndarray = field(default_factory=lambda: _NONE)
    # pages of prompts that are copied
    copies: np.ndarray = field(default_factory=lambda: _NO_COPIES)
    # of a step in two halves: this one's lists are those of the first, that one's of the second
    second_half: Work | None = None

    @property
    def has_singles(self) -> bool:
        return self.singles.size > 0 or (
            self.second_half is not None and self.second_half.has_singles
        )

    @property
    def shares(self) -> bool:
        return self.shared.size > 0 or (self.second_half is not None and self.second_half.shares)

    def write(
        self, target: np.ndarray, size: int, padding_row: int, programs: tuple[int, ...]
    ) -> int:
        """All of it to the start of `target`, tokens padded to `size` and each list followed by as
        many zeros as its kernel has programs. Returns where `last` begins; its end is the end."""
        num, at = self.rows.size, HEADER
        for values, rest in ((self.rows, padding_row), (self.positions, 0)):
            target[at : at + num], target[at + num : at + padded(size)] = values, rest
            at += padded(size)
        places = []
        for values, num_programs in zip(
            (
                self.singles,
                self.shared,
                self.members,
                self.prompts,
                self.state_sequences,
                self.copies,
            ),
            (
                programs[0],
                programs[1],
                0,
                2 * programs[2],
                (*programs, 0)[3],
                COPY_PROGRAMS if programs[2] else 0,
            ),
            strict=True,
        ):
            places.append(at)
            end = at + values.size
            target[at:end] = values.reshape(-1)
            at = end + num_programs * values.shape[1]
            target[end:at] = 0
        target[[SHARED, MEMBERS, PROMPTS, STATES, COPIES]], target[LIVE] = places[1:], num
        target[at : at + self.last.size] = self.last
        return at


def singles(
    rows: np.ndarray,
    positions: np.ndarray,
    tokens: np.ndarray,
    tables: list[np.ndarray],
    members_per_tile: int,
    at_once: int = 1,
    bases: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The work of sequences with one new token each: a record for every split that a sequence has
    to itself; splits that sequences share, and their members. `tables`: the page tables of all
    rows, of each KV group. `at_once`: tokens of a record, at most: of a token and the drafts after
    it. `bases`: of drafts that are trees, from where on keys are those of a path; nobody shares
    such splits.

    A page that two requests have at the same place says that they are the same up to its end: a
    split whose last page they have in common in every group, they have in common. Where both have
    given the page back, neither sees it."""
    if not tables:
        return _NONE, _NONE, _NONE
    num_splits = positions // SPLIT + 1
    first_slot = np.cumsum(num_splits) - num_splits
    request = np.repeat(np.arange(rows.size), num_splits)
    split = np.arange(request.size) - first_slot[request]
    own = np.ones(request.size, bool)
    shared = members = _NONE
    is_complete = split < num_splits[request] - 1
    if bases is not None:
        is_complete &= (split + 1) * SPLIT <= bases[request]
    complete = np.flatnonzero(is_complete)
    if complete.size > 1:
        last_page = _last_pages(tables, rows[request[complete]], split[complete])
        order = np.argsort(last_page, kind="stable")
        ordered = last_page[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(np.append(starts, ordered.size))
        if counts.max() > 1:
            shared, members, own[complete[order[np.repeat(counts > 1, counts)]]] = *_groups(
                complete[order], starts[counts > 1], counts[counts > 1], members_per_tile, request, split, rows, positions, tokens
            ), False  # fmt: skip
    counts = _with_drafts(rows, positions, num_splits, at_once)
    # the last split of those that are in another's record
    own[(first_slot + num_splits - 1)[counts == 0]] = False
    mine = np.flatnonzero(own)
    keys = np.minimum(positions[request[mine]] + 1 - split[mine] * SPLIT, SPLIT)
    # those with most keys first, as tiles of prompts
    mine = mine[np.argsort(-keys.astype(np.int16), kind="stable")]
    num_here = np.bincount(request[mine], minlength=rows.size)
    who = request[mine]
    made = _records(
        records.SINGLE_WIDTH,
        (records.SINGLE_TOKEN, tokens[who]),
        (records.SINGLE_POSITION, positions[who]),
        (records.SINGLE_ROW, rows[who]),
        (records.SINGLE_SPLIT, split[mine]),
        (records.SINGLE_SLOT, first_slot[who]),
        (records.SINGLE_SPLITS, num_splits[who]),
        (records.SINGLE_LISTED, num_here[who]),
        (records.SINGLE_TOKENS, np.where(split[mine] == num_splits[who] - 1, counts[who], 1)),
    )
    return made, shared, members


def _with_drafts(
    rows: np.ndarray, positions: np.ndarray, num_splits: np.ndarray, at_once: int
) -> np.ndarray:
    """The number of tokens in each token's record: it and those after it, or 0, if it is in the
    record of one before it. All but their last split, such tokens share in any case, so that they
    have one record."""
    counts = np.ones(rows.size, np.int32)
    goes_on = (
        (rows[1:] == rows[:-1])
        & (positions[1:] == positions[:-1] + 1)
        & (num_splits[1:] == num_splits[:-1])
    )
    if at_once == 1 or not goes_on.any():
        return counts
    begins = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    place = np.arange(rows.size) - np.repeat(begins, np.diff(np.append(begins, rows.size)))
    firsts = np.flatnonzero(place % at_once == 0)
    counts[:] = 0
    counts[firsts] = np.diff(np.append(firsts, rows.size))
    return counts


def _last_pages(tables: list[np.ndarray], rows: np.ndarray, split: np.ndarray) -> np.ndarray:
    """A number for each (row, split): equal where the pages that end the split are, in every group."""
    pages = [table[rows, split * _PER_SPLIT + _PER_SPLIT - 1] for table in tables]
    if len(pages) == 1 and pages[0].all():
        return pages[0]
    # A null page stands for splits at any place.
    return np.unique(np.stack([split, *pages], axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _groups(
    entry: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    per_tile: int,
    request: np.ndarray,
    split: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of up to `per_tile` members. `entry`: (request, split) pairs, those of a group side by
    side. A tile has the page table of the member that is behind all others: of a layer with a
    window, it alone has all pages that any of them sees."""
    num_tiles = -(-counts // per_tile)
    group = np.repeat(np.arange(starts.size), num_tiles)
    offset = (
        np.arange(group.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    ) * per_tile
    inside = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
    begins, who = np.cumsum(counts) - counts, entry[inside]  # an entry's number is also its slot
    by_position = np.lexsort((positions[request[who]], np.repeat(np.arange(counts.size), counts)))
    first, member_start = who[by_position[begins[group]]], begins[group] + offset
    tiles = _records(
        records.SHARED_WIDTH,
        (records.SHARED_MEMBER, member_start),
        (records.SHARED_MEMBERS, np.minimum(counts[group] - offset, per_tile)),
        (records.SHARED_SPLIT, split[first]),
        (records.SHARED_ROW, rows[request[first]]),
    )
    return tiles, _records(
        records.MEMBER_WIDTH,
        (records.MEMBER_TOKEN, tokens[request[who]]),
        (records.MEMBER_SLOT, who),
    )


def prompts(
    rows: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    firsts: np.ndarray,
    tile_len: int,
    copies: np.ndarray | None = None,
) -> np.ndarray:
    """Tiles of prompts, those with most keys first: the longest should not be the last to start.
    `copies`: see `copied`."""
    num_tiles = -(-counts // tile_len)
    request = np.repeat(np.arange(rows.size), num_tiles)
    offset = (
        np.arange(request.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    ) * tile_len
    lens, first_positions = np.minimum(counts[request] - offset, tile_len), starts[request] + offset
    tiles = _records(
        records.PROMPT_WIDTH,
        (records.PROMPT_TOKEN, firsts[request] + offset),
        (records.PROMPT_TOKENS, lens),
        (records.PROMPT_POSITION, first_positions),
        (records.PROMPT_ROW, rows[request]),
        (records.PROMPT_COPY, np.zeros_like(request) if copies is None else copies[request]),
    )
    return tiles[np.argsort(-(first_positions + lens), kind="stable")]


def copied(rows: np.ndarray, ends: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of each prompt's first copied page, from 1 on, or 0; and these pages, of as many
    prompts as there is room for."""
    num_pages = -(-ends // BLOCK)
    last = np.cumsum(num_pages)
    firsts = np.where(last <= room, last - num_pages + 1, 0)
    request = np.repeat(np.arange(rows.size), np.where(firsts > 0, num_pages, 0))
    number = np.arange(1, request.size + 1)
    return firsts, _records(
        records.COPY_WIDTH,
        (records.COPY_ROW, rows[request]),
        (records.COPY_BLOCK, number - firsts[request]),
        (records.COPY_TO, number),
    )


def state_sequences(items: np.ndarray) -> np.ndarray:
    """Sequences whose states a step computes, those with most tokens first. `items`: [n, 3] row,
    start, count."""
    rows, starts, counts = items.T
    made = _records(
        records.CHAIN_WIDTH,
        (records.CHAIN_TOKEN, np.cumsum(counts) - counts),
        (records.CHAIN_TOKENS, counts),
        (records.CHAIN_POSITION, starts),
        (records.CHAIN_ROW, rows),
    )
    return made[np.argsort(-counts, kind="stable")]


def parts(item: StepItem) -> list[tuple[int, int, int, bool]]:
    """Row, start, count, samples. A token that is followed by a draft is like a request of its own:
    its bits are the same, and keys and values that they have in common are read once."""
    if not item.num_drafts:
        return [(item.row, item.start, item.count, item.samples)]
    first = item.count - item.num_draws
    known = [(item.row, item.start, first, False)] if first else []
    return known + [(item.row, item.start + i, 1, True) for i in range(first, item.count)]


def make_work(
    items: np.ndarray,
    samples: np.ndarray,
    tables: list[np.ndarray],
    members_per_tile: int,
    prompt_tile: int,
    at_once: int = 1,
    bases: np.ndarray | None = None,
    room: int = 0,
) -> Work:
    """`items`: [n, 3] row, start, count. `samples`: which of them yield logits. `bases`: see
    `singles`. `room`: for copies of pages. The rest: tokens of a tile or a record."""
    rows, starts, counts = items.T
    ends = np.cumsum(counts, dtype=np.int32)
    firsts = ends - counts
    one = counts == 1
    if one.all():
        single, shared, members = singles(
            rows, starts, firsts, tables, members_per_tile, at_once, bases
        )
        return Work(
            rows,
            starts,
            single,
            shared,
            members,
            _NO_PROMPTS,
            np.flatnonzero(samples).astype(np.int32),
        )
    own = None if bases is None else bases[one]
    single, shared, members = singles(
        rows[one], starts[one], firsts[one], tables, members_per_tile, at_once, own
    )
    more = ~one
    copies, pages = copied(rows[more], (starts + counts)[more], room)
    longer = prompts(rows[more], starts[more], counts[more], firsts[more], prompt_tile, copies)
    positions = np.repeat(starts - firsts, counts) + np.arange(ends[-1], dtype=np.int32)
    last = (ends - 1)[samples]
    return Work(
        np.repeat(rows, counts), positions, single, shared, members, longer, last, copies=pages
    )


def make_microbatches(
    items: np.ndarray,
    samples: np.ndarray,
    num_first: int,
    tables: list[np.ndarray],
    members_per_tile: int,
    prompt_tile: int,
    at_once: int = 1,
) -> Work:
    """A step cut in two after so many tokens, of which it has more: a prompt may have tokens in
    both."""
    ends = np.cumsum(items[:, 2])
    begins = ends - items[:, 2]
    before, after = begins < num_first, ends > num_first
    first, second = items[before], items[after]
    too_many, taken = (
        np.maximum(ends[before] - num_first, 0),
        np.maximum(num_first - begins[after], 0),
    )
    first[:, 2] -= too_many
    second[:, 1] += taken
    second[:, 2] -= taken
    how = tables, members_per_tile, prompt_tile, at_once
    one, other = (
        make_work(first, samples[before] & (too_many == 0), *how),
        make_work(second, samples[after], *how),
    )
    is_single = first[:, 2] == 1
    # partial results of the first half come before the second's
    num_slots = int((first[is_single, 1] // SPLIT + 1).sum())
    if other.singles.size:
        other.singles[:, records.SINGLE_SLOT.value] += num_slots
    if other.members.size:
        other.members[:, records.MEMBER_SLOT.value] += num_slots
    rows, positions = (
        np.concatenate(both) for both in ((one.rows, other.rows), (one.positions, other.positions))
    )
    last, none = np.concatenate([one.last, other.last + num_first]).astype(np.int32), _NONE[:0, 0]
    lists = Work(none, none, other.singles, other.shared, other.members, other.prompts, none)
    return Work(
        rows, positions, one.singles, one.shared, one.members, one.prompts, last, second_half=lists
    )
