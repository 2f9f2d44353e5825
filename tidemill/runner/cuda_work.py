"""A step's work as lists of integers, made on the host with numpy: which tokens, and what each attention kernel does for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.kernels.cuda.attention import (
    BLOCK,
    HEADER,
    MEMBERS,
    PROMPTS,
    SHARED,
    SINGLE_WIDTH,
    SPLIT,
)

_PER_SPLIT = SPLIT // BLOCK
_NONE = np.zeros((0, 4), np.int32)


def padded(size: int) -> int:
    """Room for so many tokens' words: what follows begins at a multiple of 16 bytes, whatever the size."""
    return -(-size // 4) * 4


@dataclass(slots=True)
class Work:
    """Of one step. A single is a request with one token, a prompt one with more."""

    rows: np.ndarray  # of every token
    positions: np.ndarray
    singles: np.ndarray
    shared: np.ndarray
    members: np.ndarray
    prompts: np.ndarray
    last: np.ndarray  # tokens that yield logits
    num_slots: int  # partial results of singles

    def write(self, target: np.ndarray, size: int, padding_row: int, programs: tuple[int, int, int]) -> int:
        """All of it into the beginning of `target`, tokens padded to `size` and each list followed by as many zeros as its
        kernel has programs. Returns where `last` begins; its end is the end."""
        num, at = self.rows.size, HEADER
        for values, rest in ((self.rows, padding_row), (self.positions, 0)):
            target[at : at + num], target[at + num : at + padded(size)] = values, rest
            at += padded(size)
        places = []
        for values, num_programs in zip(
            (self.singles, self.shared, self.members, self.prompts), (programs[0], programs[1], 0, 2 * programs[2]), strict=True
        ):
            places.append(at)
            end = at + values.size
            target[at:end] = values.reshape(-1)
            at = end + num_programs * values.shape[1]
            target[end:at] = 0
        target[[SHARED, MEMBERS, PROMPTS]] = places[1:]
        target[at : at + self.last.size] = self.last
        return at


def singles(
    rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, pages: np.ndarray, members_per_tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The work of requests with one token each: an entry for every split of a request that it has to itself; splits that
    requests share, and who shares them; and how many partial results there are. `pages`: the page table of all rows.

    A page that two requests have at the same place says that they are the same up to its end: a split whose last page they have
    in common, they have in common."""
    num_splits = positions // SPLIT + 1
    first_slot = np.cumsum(num_splits) - num_splits
    request = np.repeat(np.arange(rows.size), num_splits)
    split = np.arange(request.size) - first_slot[request]
    own = np.ones(request.size, bool)
    shared = members = _NONE
    complete = np.flatnonzero(split < num_splits[request] - 1)
    if complete.size > 1:
        last_page = pages[rows[request[complete]], split[complete] * _PER_SPLIT + _PER_SPLIT - 1]
        order = np.argsort(last_page, kind="stable")
        ordered = last_page[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(np.append(starts, ordered.size))
        if counts.max() > 1:
            shared, members, own[complete[order[np.repeat(counts > 1, counts)]]] = *_groups(
                complete[order], starts[counts > 1], counts[counts > 1], members_per_tile, request, split, rows, tokens
            ), False  # fmt: skip
    mine = np.flatnonzero(own)
    num_here = np.bincount(request[mine], minlength=rows.size)
    who = request[mine]
    made = np.zeros((mine.size, SINGLE_WIDTH), np.int32)
    for column, values in enumerate(
        (tokens[who], positions[who], rows[who], split[mine], first_slot[who], num_splits[who], num_here[who])
    ):
        made[:, column] = values
    return made, shared, members, request.size


def _groups(
    entry: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    per_tile: int,
    request: np.ndarray,
    split: np.ndarray,
    rows: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of up to `per_tile` members. `entry`: (request, split) pairs, those of a group side by side."""
    num_tiles = -(-counts // per_tile)
    group = np.repeat(np.arange(starts.size), num_tiles)
    offset = (np.arange(group.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * per_tile
    first = entry[starts[group]]
    inside = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    member_start = (np.cumsum(counts) - counts)[group] + offset
    tiles = np.stack([member_start, np.minimum(counts[group] - offset, per_tile), split[first], rows[request[first]]], 1)
    who = entry[inside]
    members = np.stack([tokens[request[who]], who], 1)  # an entry's number is also its slot
    return tiles.astype(np.int32), members.astype(np.int32)


def prompts(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, firsts: np.ndarray, tile_len: int) -> np.ndarray:
    """Tiles of prompts, those with most keys first: the longest should not be the last to start."""
    num_tiles = -(-counts // tile_len)
    request = np.repeat(np.arange(rows.size), num_tiles)
    offset = (np.arange(request.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_len
    lens = np.minimum(counts[request] - offset, tile_len)
    tiles = np.stack([firsts[request] + offset, lens, starts[request] + offset, rows[request]], 1)
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 1]), kind="stable")].astype(np.int32)


def make_work(items: np.ndarray, samples: np.ndarray, pages: np.ndarray, members_per_tile: int, prompt_tile: int) -> Work:
    """`items`: [n, 3] row, start, count. `samples`: which of them yield logits."""
    rows, starts, counts = items.T
    ends = np.cumsum(counts, dtype=np.int32)
    firsts = ends - counts
    one = counts == 1
    if one.all():
        single, shared, members, num_slots = singles(rows, starts, firsts, pages, members_per_tile)
        return Work(rows, starts, single, shared, members, _NONE, np.flatnonzero(samples).astype(np.int32), num_slots)
    single, shared, members, num_slots = singles(rows[one], starts[one], firsts[one], pages, members_per_tile)
    more = ~one
    longer = prompts(rows[more], starts[more], counts[more], firsts[more], prompt_tile)
    positions = np.repeat(starts - firsts, counts) + np.arange(ends[-1], dtype=np.int32)
    last = (ends - 1)[samples]
    return Work(np.repeat(rows, counts), positions, single, shared, members, longer, last, num_slots)
