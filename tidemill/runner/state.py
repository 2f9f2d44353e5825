"""RowState: one permanent row per live request, on the device. A step stages small writes and applies them in one go."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.kernels.attention import block_bounds
from tidemill.sampling import SamplingParams
from tidemill.sched.plan import StepPlan


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: from memory that it can read by itself."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class StagedWrites:
    """Runs of values for a [rows, columns] tensor, gathered on the host and scattered at once."""

    def __init__(self, target: torch.Tensor) -> None:
        self._flat = target.view(-1)
        self._num_columns = target.shape[1]
        self._starts: list[int] = []
        self._runs: list[list[int]] = []

    def add(self, row: int, column: int, values: list[int]) -> None:
        if values:
            self._starts.append(row * self._num_columns + column)
            self._runs.append(values)

    def clear(self) -> None:
        self._starts.clear()
        self._runs.clear()

    def apply(self) -> None:
        if not self._runs:
            return
        lens = np.array([len(run) for run in self._runs])
        ends = np.cumsum(lens)
        index = np.repeat(np.array(self._starts) - (ends - lens), lens) + np.arange(ends[-1])
        values = np.concatenate([np.array(run, dtype=np.int64) for run in self._runs])
        where, what = upload(np.stack([index, values]), self._flat.device)
        self._flat.index_put_((where,), what.to(self._flat.dtype))
        self.clear()


class RowState:
    """Tokens and page table of every row; sampling parameters beside them on the host, where the plan comes from."""

    def __init__(self, num_rows: int, max_context: int, page_size: int, device: torch.device | None = None) -> None:
        self.page_size = page_size
        num_columns = block_bounds(max_context)[-1][1] // page_size  # attention reads whole blocks
        self.tokens = torch.zeros(num_rows, max_context + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.is_plain = [True] * num_rows  # nothing is asked but the likeliest token
        self.eos_token_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self.num_prompt = [0] * num_rows
        self._token_writes = StagedWrites(self.tokens)
        self._page_writes = StagedWrites(self.pages)

    def stage(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.params[new.row] = new.params
            self.is_plain[new.row] = new.params.is_plain_greedy and new.params.prompt_logprobs is None
            self.eos_token_ids[new.row] = new.eos_token_ids
            self.num_prompt[new.row] = new.num_prompt
            self.pages[new.row].zero_()  # the null page past the end
            self._token_writes.add(new.row, 0, new.token_ids)
            self._page_writes.add(new.row, 0, new.page_ids)
        added_in_full = {new.row for new in plan.new_rows}
        for update in plan.page_updates:
            if update.row not in added_in_full:
                self._page_writes.add(update.row, update.first_index, update.page_ids)

    def apply(self) -> None:
        self._token_writes.apply()
        self._page_writes.apply()

    def discard_staged(self) -> None:
        """The step that staged them failed."""
        self._token_writes.clear()
        self._page_writes.clear()

    def append(self, rows_S: torch.Tensor, positions_S: torch.Tensor, tokens_S: torch.Tensor) -> None:
        """Sampled tokens go into their rows, where the next step reads them."""
        self.tokens[rows_S, positions_S] = tokens_S.to(self.tokens.dtype)
