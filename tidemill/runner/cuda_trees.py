"""Drafts that are trees, on a GPU (see kernels/trees.py): where each lies, what it sees, and what happens when the right ones are
known. A draft is an entry of the step like a request of its own, which reads its ancestors' keys by its record in `paths`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.trees import move_tokens
from tidemill.runner.base import accept, right_drafts
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.tree import ancestors_of, depths_of

_NEVER = 2**30  # a position that no key has


class CudaTrees:
    """The inputs beside the words that graphs of steps with trees read."""

    def __init__(self, num_tokens: int, max_drafts: int, device: torch.device) -> None:
        self.places = torch.zeros(num_tokens, dtype=torch.int32, device=device)  # in its row, of each token
        # From which position on keys are those of ancestors, and their places.
        self.paths = torch.full((num_tokens, 1 + max_drafts), _NEVER, dtype=torch.int32, device=device)

    def write(self, items: Iterable[StepItem], table: np.ndarray, trees: Mapping[int, Sequence[int]]) -> np.ndarray:
        """`table`: row, start and count of the step's entries, drafts one by one; starts of those of trees become their
        positions. Returns the position of each entry from which on keys are its own."""
        starts, counts = table[:, 1], table[:, 2]
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int32)
        bases, paths = np.full(len(table), _NEVER, np.int32), np.full((places.size, self.paths.shape[1]), _NEVER, np.int32)
        end = 0  # of the item's entries
        for item in items:
            end += 1 + item.num_drafts + (item.num_drafts > 0 and item.count > item.num_draws)
            parents = trees.get(item.row)
            if parents is None:
                continue
            base, first = item.start + item.count - item.num_drafts, end - item.num_drafts
            table[first:end, 1] = np.array(depths_of(parents)) + (base - 1)
            bases[first:end] = base
            for draft in range(item.num_drafts):
                path = [base, *(base + one for one in ancestors_of(parents, draft))]
                paths[ends[first + draft] - 1, : len(path)] = path
        self.places[: places.size].copy_(upload(places.astype(np.int32), self.places.device))
        self.paths[: places.size].copy_(upload(paths, self.paths.device))
        return bases


def settle(kv: PagedKV, state: RowState, tables: Sequence[np.ndarray], plan: StepPlan, drawn: Sequence[int]) -> None:
    """Tokens, and keys and values of right drafts, go where the next step looks for them. `tables`: page tables of each KV
    group, on the host."""
    items = [item for item in plan.items if item.num_draws]
    paths = right_drafts(items, plan.drafts, plan.trees, drawn)
    tokens = accept(items, plan.drafts, drawn, paths)
    writes, moves = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for item in items:
        if item.row in paths:
            first = item.start + item.count - item.num_drafts
            writes += [(item.row, first + i, token) for i, token in enumerate(tokens[item.row])]
            moves += [(item.row, first + draft, first + i) for i, draft in enumerate(paths[item.row]) if draft != i]
    rows, positions, ids = upload(np.array(writes, np.int64).T.copy(), state.tokens.device)
    state.append(rows, positions, ids)
    if moves:
        owners, sources, targets = np.array(moves, np.int64).T
        move_tokens(kv, owners, sources, targets, tables)
