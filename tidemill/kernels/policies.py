"""KV policies in a step: which tokens can be computed together, and what a row keeps beside its
pages.

Slots are given up between tokens. So the tokens of a row are cut there into segments; the first
segments of all rows are computed in the first round, with the rows that have no policy, the second
ones in the next. Decoding has one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.trees import Paths
from tidemill.types.kv_policy import SPARSE, CachePolicy

# as in policy_attention.c
NUMBERS = {"window": 0, "streaming": 1, "h2o": 2, "snapkv": 3, "quest": 4, "random": 5, "double": 6}


def num_channels(policy: CachePolicy, head_dim: int) -> int:
    return min(policy.channels, head_dim)


@dataclass(slots=True)
class RowPolicy:
    """A row's policy, and what it keeps beside its pages, by layer and KV head: the attention that
    slots got, the keys of sinks, or the lowest and highest keys of pages."""

    policy: CachePolicy
    memory_LGX: np.ndarray  # float32
    # leading pages (of Double Sparsity: tokens) of whose keys the memory has what it needs
    num_summed: int = 0
    on_device: torch.Tensor | None = None  # a GPU's, instead of `memory_LGX`

    @staticmethod
    def new(policy: CachePolicy, kv: PagedKV) -> RowPolicy:
        """A row policy with the memory that kernels on a CPU take."""
        size = 1
        if policy.kind in ("h2o", "snapkv"):
            size = RowPolicy.num_slots(policy)
        elif policy.kind == "streaming":
            size = max(policy.sinks, 1) * kv.head_dim
        elif policy.kind == "quest":
            size = -(-policy.capacity // kv.page_size) * 2 * kv.head_dim
        # which channels, and those of each token; squares of the observed queries
        elif policy.kind == "double":
            size = (policy.capacity + 1) * num_channels(policy, kv.head_dim) + kv.head_dim
        # mapped as it is used
        return RowPolicy(policy, np.zeros((len(kv.specs), kv.num_kv_heads, size), np.float32))

    @staticmethod
    def num_slots(policy: CachePolicy) -> int:
        """Most that hold tokens when some are given up."""
        return policy.num_prompt if policy.kind == "snapkv" else policy.capacity


@dataclass(frozen=True, slots=True)
class Placed:
    """A segment of a row in a step, `tm_segment` of tidemill.h."""

    owner: RowPolicy
    row: int
    token: int  # its first, of the step
    count: int
    position: int
    slot: int
    evicts: bool = False
    num_read: int = 0  # pages (of Double Sparsity: tokens) that the query reads; 0: all
    first_page: int = 0  # pages that are full now and were not before; or tokens that are new
    num_pages: int = 0


@dataclass(slots=True)
class Round:
    """Rows whose tokens see all slots before their own, and segments with more to do."""

    rows: np.ndarray
    tokens: np.ndarray  # the first of each
    slots: np.ndarray  # of these
    counts: np.ndarray
    entries: np.ndarray  # of the step, which they are part of
    segments: list[Placed]

    def paths(self, of_entries: Paths | None) -> Paths | None:
        return (
            None
            if of_entries is None
            else Paths(of_entries.bases[self.entries], of_entries.places[self.entries])
        )


@dataclass(slots=True)
class _Open:
    """A round while it is made."""

    # row, token, slot, count, entry
    places: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    segments: list[Placed] = field(default_factory=list)

    def close(self) -> Round:
        rows, tokens, slots, counts, entries = np.array(self.places, np.int64).reshape(-1, 5).T
        return Round(rows, tokens, slots, counts, entries, self.segments)


class Policies:
    """The policies of all rows that have one."""

    def __init__(self, kv: PagedKV | None, keeps_memory: bool = True) -> None:
        self._kv, self._keeps_memory = kv, keeps_memory
        self._rows: dict[int, RowPolicy] = {}

    @property
    def rows(self) -> set[int]:
        return set(self._rows)

    def take(self, row: int, policy: CachePolicy | None) -> None:
        """The row is a new request's."""
        self._rows.pop(row, None)
        if policy is not None:
            assert self._kv is not None
            made = (
                RowPolicy.new(policy, self._kv)
                if self._keeps_memory
                else RowPolicy(policy, np.empty((0, 0, 0), np.float32))
            )
            self._rows[row] = made

    def rounds(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[Round]:
        """The rounds of a step; none if no row in it has a policy. Rows with a policy have one
        entry."""
        if not self._rows or self._rows.keys().isdisjoint(rows.tolist()):
            return []
        made = [_Open()]
        columns = (a.tolist() for a in (rows, starts, counts, np.cumsum(counts) - counts))
        for entry, (row, start, count, token) in enumerate(zip(*columns, strict=True)):
            owner = self._rows.get(row)
            if owner is None:
                made[0].places.append((row, token, start, count, entry))
            elif owner.policy.kind in SPARSE:
                self._place_sparse(made[0], owner, entry, row, token, start, count)
            else:
                self._place(made, owner, entry, row, token, start, count)
        return [one.close() for one in made]

    def _place(
        self,
        made: list[_Open],
        owner: RowPolicy,
        entry: int,
        row: int,
        token: int,
        start: int,
        count: int,
    ) -> None:
        watches = owner.policy.kind in ("h2o", "snapkv")
        for i, part in enumerate(owner.policy.segments(start, count)):
            if i == len(made):
                made.append(_Open())
            made[i].places.append((row, token, part.slot, part.count, entry))
            if i or watches or part.evicts:
                made[i].segments.append(
                    Placed(owner, row, token, part.count, part.position, part.slot, part.evicts)
                )
            token += part.count

    def _place_sparse(
        self,
        first: _Open,
        owner: RowPolicy,
        entry: int,
        row: int,
        token: int,
        start: int,
        count: int,
    ) -> None:
        """Each query on its own, since it chooses its pages or tokens; in the first segment, the
        pages that are full by now. Before them, the queries that see everything and by which Double
        Sparsity chooses its channels."""
        assert self._kv is not None
        policy, num_dense = owner.policy, max(min(owner.policy.dense - start, count), 0)
        size = self._kv.page_size if policy.kind == "quest" else 1
        if num_dense:
            first.places.append((row, token, start, num_dense, entry))
            skipped = max(policy.first_observed - start, 0)
            if policy.observed and skipped < num_dense:
                at = start + skipped
                first.segments.append(
                    Placed(owner, row, token + skipped, num_dense - skipped, at, at)
                )
        known, num_full = owner.num_summed, (start + count) // size
        for i in range(num_dense, count):
            position = start + i
            if policy.kind == "quest":
                num_read = policy.num_pages_read(position // size + 1, size)
            else:
                num_read = policy.num_tokens_read(position)
            first.segments.append(
                Placed(
                    owner,
                    row,
                    token + i,
                    1,
                    position,
                    position,
                    False,
                    num_read,
                    known,
                    num_full - known,
                )
            )
            owner.num_summed = known = num_full

    def places(self, rounds: Sequence[Round], positions: np.ndarray) -> np.ndarray:
        """The places of the tokens of a step in the page tables of their rows: `positions`, but for
        rows with a policy. -1: it is written in a later round."""
        places = positions.copy() if rounds else positions
        for number, one in enumerate(rounds):
            for row, token, slot, count in zip(
                *(a.tolist() for a in (one.rows, one.tokens, one.slots, one.counts)), strict=True
            ):
                if row in self._rows:
                    places[token : token + count] = -1 if number else np.arange(slot, slot + count)
        return places
