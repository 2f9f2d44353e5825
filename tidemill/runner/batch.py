"""From a plan to what the model reads: token ids, positions and cache slots of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.policies import Policies, Round, slots_of
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem


@dataclass(slots=True)
class Batch:
    """Item i's tokens are numbers last_token[i] - counts[i] + 1 .. last_token[i] of the step, from position starts[i] on."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    last_token: np.ndarray
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor  # of each KV group: page * page_size + offset
    types_T: torch.Tensor | None = None  # of the texts of pairs, where there are any
    rounds: Sequence[Round] = ()  # if rows have KV policies


def gather_batch(items: list[StepItem], state: RowState, policies: Policies | None = None) -> Batch:
    rows, starts, counts = np.array([(item.row, item.start, item.count) for item in items]).T
    ends = np.cumsum(counts)
    row_of = np.repeat(rows, counts)
    positions = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
    rounds = [] if policies is None else policies.rounds(rows, starts, counts)
    places = slots_of(rounds, positions.size) if rounds else positions  # in the row's page table
    pages, offsets = places // state.page_size, places % state.page_size
    slots = [table.numpy()[row_of, pages].astype(np.int64) * state.page_size + offsets for table in state.kv_tables]
    if rounds:
        slots = [np.where(places < 0, -1, of_group) for of_group in slots]
    return Batch(
        rows=rows,
        starts=starts,
        counts=counts,
        last_token=ends - 1,
        ids_T=torch.from_numpy(state.tokens.numpy()[row_of, positions].astype(np.int64)),
        positions_T=torch.from_numpy(positions),
        slots_GT=torch.from_numpy(np.array(slots, np.int64).reshape(len(slots), positions.size)),
        types_T=_types(state, rows, counts, positions),
        rounds=rounds,
    )


def _types(state: RowState, rows: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> torch.Tensor | None:
    pairs = np.array([0 if params is None else params.pair_start for params in (state.params[row] for row in rows)])
    if not pairs.any():
        return None
    start = np.repeat(pairs, counts)
    return torch.from_numpy(((start > 0) & (positions >= start)).astype(np.int64))
