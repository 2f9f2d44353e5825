"""From a plan to what the model reads: token ids, positions and cache slots of one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.policies import Policies, Round
from tidemill.kernels.trees import Paths
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem
from tidemill.sched.tree import ancestors_of, depths_of
from tidemill.types.inputs import TOKEN_TYPE, overlapping


@dataclass(slots=True)
class Batch:
    """Item i's tokens are numbers last_token[i] - counts[i] + 1 .. last_token[i] of the step, from
    position starts[i] on."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    last_token: np.ndarray
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor  # of each KV group: page * page_size + offset
    types_T: torch.Tensor | None = None  # if any has segments
    has_inputs: bool = False  # ids less than zero are numbers of rows of embeddings
    entries: tuple[np.ndarray, np.ndarray, np.ndarray] | None = (
        None  # rows, starts and counts for attention, if other than above
    )
    paths: Paths | None = None  # of each entry
    rounds: Sequence[Round] = ()  # if rows have KV policies

    @property
    def is_plain(self) -> bool:
        """Neither are its drafts trees, nor do rows have KV policies."""
        return self.entries is None and not self.rounds


def sources(items: list[StepItem], batch: Batch, but: Collection[int] = ()) -> np.ndarray:
    """Tokens of a step that yield logits. `but`: rows that draw nothing."""
    drawn = [i for i, item in enumerate(items) if item.samples and item.row not in but]
    if not any(item.num_drafts for item in items):
        return batch.last_token if len(drawn) == len(items) else batch.last_token[drawn]
    ends = [batch.last_token[i] + np.arange(-items[i].num_drafts, 1) for i in drawn]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)


def gather_batch(
    items: list[StepItem],
    state: RowState,
    trees: Mapping[int, list[int]] | None = None,
    policies: Policies | None = None,
) -> Batch:
    """`trees`: see StepPlan."""
    rows, starts, counts = np.array(
        [[it.row for it in items], [it.start for it in items], [it.count for it in items]]
    )
    ends, row_of, positions = (
        np.arange(1, len(items) + 1),
        rows,
        starts,
    )  # where all are single tokens
    if any(it.count > 1 for it in items):
        ends = np.cumsum(counts)
        row_of = np.repeat(rows, counts)
        positions = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
    seen_at, entries, paths = _branch(items, positions, trees) if trees else (positions, None, None)
    rounds = [] if policies is None else policies.rounds(*(entries or (rows, starts, counts)))
    places = (
        policies.places(rounds, positions) if policies is not None and rounds else positions
    )  # in the row's page table
    pages, offsets = places // state.page_size, places % state.page_size
    slots = np.empty((len(state.kv_tables), positions.size), np.int64)
    for of_group, table in zip(slots, state.kv_tables_cpu, strict=True):
        np.multiply(table[row_of, pages], state.page_size, out=of_group, dtype=np.int64)
    slots += offsets
    if rounds:
        slots[:, places < 0] = -1
    ids, has_inputs = state.tokens_cpu[row_of, positions].astype(np.int64), False
    if state.inputs is not None:
        inputs = state.inputs.numpy()[row_of, positions]
        ids, has_inputs = np.where(inputs > 0, -inputs, ids), bool(inputs.any())
    return Batch(
        rows=rows,
        starts=starts,
        counts=counts,
        last_token=ends - 1,
        ids_T=torch.from_numpy(ids),
        positions_T=torch.from_numpy(seen_at),
        slots_GT=torch.from_numpy(slots),
        types_T=_types(state, items, positions.size),
        has_inputs=has_inputs,
        entries=entries,
        paths=paths,
        rounds=rounds,
    )


def _branch(
    items: list[StepItem], places: np.ndarray, trees: Mapping[int, list[int]]
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], Paths]:
    """Positions of the tokens, and what attention computes: the drafts of a tree one by one, each
    on its path. `places`: where the tokens lie in their rows."""
    positions, at = places.copy(), 0
    entries, paths = list[tuple[int, int, int]](), list[tuple[int, list[int]] | None]()
    for item in items:
        parents = trees.get(item.row)
        if parents is None:
            entries.append((item.row, item.start, item.count))
            paths.append(None)
        else:
            num_known = item.count - item.num_drafts
            base = item.start + num_known
            entries.append((item.row, item.start, num_known))
            paths.append(None)
            for draft, depth in enumerate(depths_of(parents)):
                positions[at + num_known + draft] = base + depth - 1
                entries.append((item.row, base + depth - 1, 1))
                paths.append((base, [base + one for one in ancestors_of(parents, draft)]))
        at += item.count
    rows, starts, counts = np.array(entries).T
    return positions, (rows, starts, counts), Paths.of(paths)


def _types(state: RowState, items: list[StepItem], num_tokens: int) -> torch.Tensor | None:
    if not any(state.segments[item.row] for item in items):
        return None
    types, begin = np.zeros(num_tokens, np.int64), 0
    for item in items:
        for each in overlapping(state.segments[item.row], item.start, item.start + item.count):
            if each.kind == TOKEN_TYPE:
                first, end = max(each.start - item.start, 0), min(each.end - item.start, item.count)
                types[begin + first : begin + end] = each.key[0]
        begin += item.count
    return torch.from_numpy(types)
