"""StageRunner: a stage of a pipeline. A step's items go through the stages in micro-batches, so that stages compute side by side.

Micro-batches keep the order of the items in every stage: one that reads what another has just written comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.errors import WorkerLost
from tidemill.models.base import Model
from tidemill.parallel.channel import Channel
from tidemill.parallel.world import Stage
from tidemill.runner.base import StepResult
from tidemill.runner.batch import Batch
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.sched.plan import StepItem, StepPlan

_LEAST_TOKENS = 32  # of a micro-batch: with fewer, reading the weights again takes longer than stages side by side save


def cut_items(items: Sequence[StepItem], num_parts: int, may_cut: Sequence[bool]) -> list[list[StepItem]]:
    """In order, in parts of about as many tokens, none of them empty. `may_cut`: which items may lie in two parts."""
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


class StageRunner(CpuRunner):
    def __init__(self, model: Model, config: EngineConfig, stage: Stage, before: Channel | None, after: Channel | None) -> None:
        """`before`, `after`: to the neighbouring stages."""
        self._stage, self._before, self._after = stage, before, after
        super().__init__(model, config)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Launches the stage's part of a step; the last stage has the result. Others have none."""
        self._begin(plan)
        result = StepResult()
        for items in self._micro_batches(plan):
            part = msgspec.structs.replace(plan, items=items)
            batch = self._gather(part)
            hidden_TH = self._forward_plan(part, batch)
            if self._after is not None:
                self._after.send(hidden_TH.contiguous().numpy().tobytes())
            else:
                _join(result, self._sample(part, batch, hidden_TH))
        return result

    def _micro_batches(self, plan: StepPlan) -> list[list[StepItem]]:
        num = min(2 * self._stage.num_stages, plan.num_tokens // _LEAST_TOKENS)
        if num < 2:
            return [plan.items]
        return cut_items(plan.items, num, [not item.num_drafts and not self.state.asks_prompt(item) for item in plan.items])

    def _embed(self, batch: Batch) -> torch.Tensor:
        if self._before is None:
            return super()._embed(batch)
        received = np.frombuffer(bytearray(self._before.receive()), np.float32)
        if received.size != batch.ids_T.numel() * self.model.config.hidden_size:
            raise WorkerLost("The engine cannot go on: the stages of the pipeline do not compute the same step.")
        return torch.from_numpy(received).view(batch.ids_T.numel(), -1)


def _join(result: StepResult, part: StepResult) -> None:
    result.tokens |= part.tokens
    result.logprobs |= part.logprobs
    result.prompt_logprobs |= part.prompt_logprobs
    result.pooled |= part.pooled
    result.paths |= part.paths
    result.broken |= part.broken
