"""The end of a step on a CPU: logits of the tokens that yield them, sampled tokens, and what
becomes of drafts."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.mixers import Mixers
from tidemill.kernels.trees import move_tokens
from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import StepResult, draws, read_draws
from tidemill.runner.batch import Batch, sources
from tidemill.runner.sampler import Sampler
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan


class CpuSampling:
    def __init__(self, model: Model, state: RowState, mixers: Mixers, by_rejection: bool) -> None:
        """`by_rejection`: as `Sampler` has it."""
        self._model, self._state, self._mixers = model, state, mixers
        self.sampler = Sampler(state, by_rejection)
        self._room = torch.empty(0, 0)  # for logits
        # Logits of several ranks are put together elsewhere first.
        self._has_room = native.lib is not None and model.weight_plan.part.tables.size == 1

    def draw(self, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        """The sampled tokens, also into their rows."""
        pooled = {
            item.row: [0] for item in plan.items if item.samples and self._state.is_pooled(item.row)
        }  # they draw nothing
        items = [item for item in plan.items if item.samples and item.row not in pooled]
        if not items:
            return StepResult(pooled)
        rows, positions = draws(items, plan.trees)
        read = sources(plan.items, batch, pooled)
        hidden_SH = (
            hidden_TH if len(read) == len(hidden_TH) else hidden_TH[read]
        )  # each token once, in order
        sampled = self.sampler.sample(self._logits(hidden_SH), rows, positions)
        drawn = sampled.token_ids.tolist()
        result = read_draws(items, plan, drawn)
        if result.paths:
            self._settle(items, result)
        else:
            # As state.append, in a fifth of the time.
            self._state.tokens_cpu[rows, positions] = [max(token, 0) for token in drawn]
        result.tokens |= pooled
        result.take_logprobs(rows, sampled.logprobs)
        return result

    def _logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """In memory that is kept: to give megabytes back to the system and to take them again costs
        up to 1 ms a step. Good until the next step."""
        model = self._model
        assert isinstance(model, CausalLM)
        if not self._has_room:
            return model.logits(hidden_SH)
        if self._room.shape[0] < len(hidden_SH):
            self._room = hidden_SH.new_empty(len(hidden_SH), model.config.vocab_size)
        return model.logits(hidden_SH, self._room[: len(hidden_SH)])

    def _settle(self, items: list[StepItem], result: StepResult) -> None:
        """Tokens, and the keys and values of drafts of trees that are right, go where the next step
        looks for them."""
        assert self._mixers.kv is not None
        moves = []
        for item in items:
            first = item.start + item.count - item.num_drafts
            tokens = torch.tensor(result.tokens[item.row])
            self._state.append(
                torch.full_like(tokens, item.row), first + torch.arange(len(tokens)), tokens
            )
            path = result.paths.get(item.row, ())
            moves += [
                (item.row, first + draft, first + i) for i, draft in enumerate(path) if draft != i
            ]
        if moves:
            move_tokens(self._mixers.kv, *np.array(moves).T)
