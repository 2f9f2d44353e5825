"""A stage of a pipeline on a CPU. A step's items go through the stages in micro-batches, so that
stages compute side by side.

Micro-batches keep the order of the items in every stage: one that reads what another has just
written comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from tidemill.distributed.channel import Channel
from tidemill.distributed.world import Stage
from tidemill.errors import WorkerLost
from tidemill.models.base import Model
from tidemill.runner.base import StepResult
from tidemill.runner.batch import Batch
from tidemill.runner.inputs import InputRows
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan

# Tokens of a micro-batch, at least: with fewer, reading the weights again takes longer than stages
# side by side save.
_LEAST_TOKENS = 32

SampleFn = Callable[[StepPlan, Batch, torch.Tensor], StepResult]


def cut_items(
    items: Sequence[StepItem], num_parts: int, may_cut: Sequence[bool]
) -> list[list[StepItem]]:
    """In order, in parts of about as many tokens, none of them empty. `may_cut`: which items may
    lie in two parts."""
    left = sum(item.count for item in items)
    parts: list[list[StepItem]] = [[]]
    room = -(-left // num_parts)

    def begin_next() -> None:
        nonlocal room
        if len(parts) < num_parts:
            parts.append([])
            room = -(-left // (num_parts - len(parts) + 1))

    for item, may in zip(items, may_cut, strict=True):
        rest = item
        while rest.count > room and may and len(parts) < num_parts:
            parts[-1].append(msgspec.structs.replace(rest, count=room, samples=False))
            rest = msgspec.structs.replace(rest, start=rest.start + room, count=rest.count - room)
            left -= room
            begin_next()
        parts[-1].append(rest)
        left, room = left - rest.count, room - rest.count
        if room <= 0 and left:
            begin_next()
    return [part for part in parts if part]


class OnlyStage:
    """The stage of a model that is in no pipeline: it has all layers."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # if prompts may have embeddings in the place of tokens
        self.inputs: InputRows | None = None

    def parts(self, plan: StepPlan, state: RowState) -> list[StepPlan]:
        """The micro-batches of a step."""
        return [plan]

    def embed(self, batch: Batch) -> torch.Tensor:
        """The hidden states that the first layer here starts from."""
        positions, types = batch.positions_T, batch.types_T
        if self.inputs is None or not batch.has_inputs:
            return self._model.embed_at(batch.ids_T, positions, types)
        return self.inputs.embed(
            batch.ids_T, lambda ids: self._model.embed_at(ids, positions, types)
        )

    def results(
        self, sample: SampleFn, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor
    ) -> StepResult:
        """The outcome of a micro-batch, of which the last layer here gave these hidden states."""
        return sample(plan, batch, hidden_TH)


class PipelineStage(OnlyStage):
    """One of several. The last has the results; others have none."""

    def __init__(
        self, model: Model, stage: Stage, before: Channel | None, after: Channel | None
    ) -> None:
        """`before`, `after`: to the neighbouring stages."""
        super().__init__(model)
        self._most, self._before, self._after = 2 * stage.num_stages, before, after

    def parts(self, plan: StepPlan, state: RowState) -> list[StepPlan]:
        num = min(self._most, plan.num_tokens // _LEAST_TOKENS)
        if num < 2:
            return [plan]
        may_cut = [not item.num_drafts and not state.asks_prompt(item) for item in plan.items]
        parts = cut_items(plan.items, num, may_cut)
        return [msgspec.structs.replace(plan, items=items) for items in parts]

    def embed(self, batch: Batch) -> torch.Tensor:
        if self._before is None:
            return super().embed(batch)
        received = np.frombuffer(bytearray(self._before.receive()), np.float32)
        num_tokens = batch.ids_T.numel()
        if received.size != num_tokens * self._model.config.hidden_size:
            raise WorkerLost(
                "The engine cannot go on: the stages of the pipeline do not compute the same step."
            )
        return torch.from_numpy(received).view(num_tokens, -1)

    def results(
        self, sample: SampleFn, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor
    ) -> StepResult:
        if self._after is None:
            return sample(plan, batch, hidden_TH)
        self._after.send(hidden_TH.contiguous().numpy().tobytes())
        return StepResult()
