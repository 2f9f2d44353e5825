"""The end of a step on a GPU: rows that want more than a temperature are sampled again, and what is
asked about tokens is collected."""

from __future__ import annotations

import torch

from tidemill.runner.base import draws
from tidemill.runner.cuda_sampler import CudaSampler
from tidemill.runner.cuda_slots import CudaBatch
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepPlan
from tidemill.types.sampling import SamplingParams


class CudaSampling:
    def __init__(self, state: RowState, sampler: CudaSampler) -> None:
        self._state, self.sampler = state, sampler
        num_rows = state.tokens.shape[0]
        self._is_plain, self._asks = [True] * num_rows, [False] * num_rows

    def register(self, plan: StepPlan) -> None:
        """Takes note of how new rows are sampled."""
        for copy in plan.row_copies:
            self._register(copy.target, copy.spec.params)
        for new in plan.new_rows:
            self._register(new.row, new.spec.params)

    def _register(self, row: int, params: SamplingParams) -> None:
        self._is_plain[row], self._asks[row] = params.is_plain, params.logprobs is not None

    def finish(self, batch: CudaBatch, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Changes `tokens` of rows that are sampled again, in their rows, too."""
        plan = batch.plan
        rows, positions = draws(plan.items, plan.trees)
        again = [i for i, row in enumerate(rows) if not self._is_plain[row]]
        if again:
            if plan.drafts:  # the first draw has written over them
                self._state.stage_drafts(plan, {rows[i] for i in again})
                self._state.apply()
            own = [rows[i] for i in again], [positions[i] for i in again]
            self.sampler.redraw(again, *own, logits, tokens)
        asked = [i for i, row in enumerate(rows) if self._asks[row]]
        if asked:
            own_rows = [rows[i] for i in asked]
            batch.reports.append(self.sampler.logprobs(asked, own_rows, logits, tokens))
