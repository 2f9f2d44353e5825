"""CudaStageRunner: a stage of a pipeline on a GPU. Hidden states go from one to the next through the host, a step at a time."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.errors import WorkerLost
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.launch import compile_only
from tidemill.models.base import CausalLM
from tidemill.parallel.channel import Channel
from tidemill.parallel.world import Stage
from tidemill.runner.base import StepResult
from tidemill.runner.cuda_graphs import one_of_each_kind
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.runner.cuda_step import Launched
from tidemill.runner.reports import Report
from tidemill.sched.plan import StepPlan


class CudaStageRunner(CudaRunner):
    """All of its graphs are those of steps with prompts: they end with hidden states. The first stage knows the next step's
    tokens when the last has drawn them, so none is launched ahead."""

    steps_ahead = 0
    _decodes, _reads_all = False, True

    @torch.inference_mode()
    def __init__(
        self, model: CausalLM, config: EngineConfig, stage: Stage, before: Channel | None, after: Channel | None
    ) -> None:
        """`before`, `after`: to the neighbouring stages."""
        self._part, self._before, self._after = stage, before, after
        shape = (max(config.token_budget, config.max_draws), model.config.hidden_size)
        self._given = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")  # hidden states of the stage before
        super().__init__(model, config)

    def _embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return super()._embed(ids_T, positions_T) if self._before is None else self._given[: ids_T.numel()].clone()

    def compile(self) -> None:
        nums_rows = set(self._mixed_sizes)
        steps = [self._mixed_step(size, some) for size in one_of_each_kind(self._mixed_sizes) for some in self._either]
        with compile_elsewhere(), compile_only():
            for step in steps:
                step.run()
            if self._part.is_last:
                self.sampler.warm_up(self.model, self._hidden, self._logits)
            self.model.compile(nums_rows)
        self.model.prepare(nums_rows)
        if self._part.is_last:
            self.sampler.warm_up(self.model, self._hidden, self._logits)
        for step in steps:
            step.run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self._stage(plan)
        work, _ = self._work(plan.items, may_flash=False)
        num, reports = work.rows.size, list[Report]()
        if self._before is not None:
            self._given[:num].copy_(self._received(num))
        if self._after is None:
            tokens, logits = self._mixed(plan.items, work, False, False, reports)
            if tokens is not None and logits is not None:
                self._draw_again(plan, tokens, logits, reports)
            return self._send_back(plan, tokens, reports)
        size = self._mixed_sizes[bisect_left(self._mixed_sizes, num)]
        self._replay(self._mixed_graphs[size, work.has_singles, False, False], work)
        self._after.send(self._hidden[:num].view(torch.uint8).cpu().numpy().tobytes())
        return self._send_back(plan, None, reports)

    def _received(self, num: int) -> torch.Tensor:
        assert self._before is not None
        data = np.frombuffer(bytearray(self._before.receive()), np.uint8)
        if data.size != self._given[:num].nbytes:
            raise WorkerLost("The engine cannot go on: the stages of the pipeline do not compute the same step.")
        return torch.from_numpy(data).view(self._given.dtype).view(num, -1)

    def collect(self, launched: Launched) -> StepResult:
        return super().collect(launched) if self._after is None else StepResult()
