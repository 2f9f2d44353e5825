"""From a plan to what the model reads: token ids, positions, cache slots and the attention plan of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tidemill.config import ModelConfig
from tidemill.kernels.attention import AttentionPlan, plan_attention
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem


@dataclass(slots=True)
class Batch:
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor  # page * page_size + offset
    attention: AttentionPlan
    last_token: np.ndarray  # number in the step of each item's last token


def gather_batch(items: list[StepItem], state: RowState, num_pages: int, shape: ModelConfig) -> Batch:
    rows = np.array([item.row for item in items])
    starts = np.array([item.start for item in items])
    counts = np.array([item.count for item in items])
    ends = np.cumsum(counts)
    row_of = torch.from_numpy(np.repeat(rows, counts))
    positions = torch.from_numpy(np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1]))
    pages = state.pages[row_of, positions // state.page_size].to(torch.int64)
    return Batch(
        ids_T=state.tokens[row_of, positions],
        positions_T=positions,
        slots_T=pages * state.page_size + positions % state.page_size,
        attention=plan_attention(
            starts,
            counts,
            state.pages.numpy()[rows],
            state.page_size,
            num_pages,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        ),
        last_token=ends - 1,
    )
