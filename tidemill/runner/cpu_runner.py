"""CpuRunner: stage, apply, gather, forward, sample."""

from __future__ import annotations

import torch

from tidemill.config import EngineConfig
from tidemill.kernels import native
from tidemill.kernels.attention import TorchAttention
from tidemill.kernels.kv_cache import PagedKV, copy_pages, new_cache
from tidemill.kernels.native_attention import NativeAttention, NativeStep
from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import StepResult, look_at_prompt
from tidemill.runner.batch import Batch, gather_batch
from tidemill.runner.graphs import record_forward
from tidemill.runner.sampler import Sampler, score
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan


class CpuRunner:
    steps_ahead = 0  # a step is done when its launch returns

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        shape = model.config
        num_pages = config.num_pages + 1  # and the null page
        sizes = shape.num_kv_layers, shape.num_kv_heads, config.page_size, shape.head_dim
        self.cache = new_cache(num_pages, *sizes, config.kv_dtype)
        self.state = RowState(config.max_requests, config.max_context, config.page_size)
        self.sampler = Sampler(self.state)
        tables = model.angles(config.max_context), model.distance_biases(config.max_context)
        kv = PagedKV(self.cache, self.state.pages, shape.layers, *tables)
        self.attention = NativeAttention(kv) if NativeAttention.can_run(kv) else TorchAttention(kv)
        self._program = None
        if isinstance(self.attention, NativeAttention):
            self._program = record_forward(model, self.attention)
        self.fallback = self._find_fallback()

    def _find_fallback(self) -> str:
        """Why slower code runs than the compiled kernels' replay, or empty."""
        if native.lib is None:
            return f"the compiled kernels are not used: {native.why}. torch computes instead, several times slower"
        if not isinstance(self.attention, NativeAttention):
            return "the compiled attention does not cover this model's heads; torch computes it, several times slower"
        if self._program is None:
            return "a replay of the recorded forward pass does not give the model's bits; its ops run one by one, slower"
        return ""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        self.state.stage(plan)
        self.state.apply()
        if plan.page_zeroes:
            self.cache[plan.page_zeroes] = 0
        if plan.page_copies:
            copy_pages(self.cache, *torch.tensor(plan.page_copies).t())
        batch = gather_batch(plan.items, self.state)
        hidden_TH = self.forward(batch)
        return self._sample(plan.items, batch, hidden_TH)

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def forward(self, batch: Batch) -> torch.Tensor:
        step = self.attention.plan(batch.rows, batch.starts, batch.counts, batch.positions_T, batch.slots_T)
        embedded_TH = self.model.embed_at(batch.ids_T, batch.positions_T, batch.types_T)
        if self._program:
            assert isinstance(step, NativeStep)
            return step.replay(self._program, embedded_TH)
        return self.model(embedded_TH, step)

    def _sample(self, items: list[StepItem], batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        reports = [
            look_at_prompt(self.model, self.state, item, hidden_TH[last + 1 - item.count : last + 1], score)
            for item, last in zip(items, batch.last_token.tolist(), strict=True)
        ]
        result = self._draw(items, batch, hidden_TH)
        for report in filter(None, reports):
            report.read(result)
        return result

    def _draw(self, items: list[StepItem], batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        pooled = {item.row: 0 for item in items if item.samples and self.state.is_pooled(item.row)}  # they draw nothing
        sampling = [i for i, item in enumerate(items) if item.samples and item.row not in pooled]
        if not sampling:
            return StepResult(pooled)
        assert isinstance(self.model, CausalLM)
        rows = [items[i].row for i in sampling]
        positions = [items[i].start + items[i].count for i in sampling]
        logits_SV = self.model.logits(hidden_TH[batch.last_token[sampling]])
        sampled = self.sampler.sample(logits_SV, rows, positions)
        self.state.append(torch.tensor(rows), torch.tensor(positions), sampled.token_ids)
        return StepResult(pooled | dict(zip(rows, sampled.token_ids.tolist(), strict=True)), sampled.logprobs)
