"""CpuRunner: stage, apply, gather, forward, sample."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels import native
from tidemill.kernels.kv_cache import PagedKV, attention_specs, copy_pages, new_cache, views
from tidemill.kernels.mixers import MixedStep, Mixers
from tidemill.kernels.native.program import Program
from tidemill.kernels.policies import Policies
from tidemill.kernels.state import PagedStates
from tidemill.kernels.trees import move_tokens
from tidemill.layers.lora import Loras
from tidemill.layers.phased import PhasedWeights
from tidemill.model_config import ModelConfig
from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import StepResult, accept, broken_rows, draws, right_drafts
from tidemill.runner.batch import Batch, gather_batch
from tidemill.runner.first_layers import FirstLayers
from tidemill.runner.graphs import Through, check_phases, record_forward
from tidemill.runner.layer_timer import LayerTimer
from tidemill.runner.page_moves import PageMover, changed_pages
from tidemill.runner.reports import look_at_prompt
from tidemill.runner.sampler import Sampler, score
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.weights.kv_calibration import load_calibration

_LEAST_UNREAD = 16  # tokens of a step, below which its last layer computes them with the others


def new_pool(num_pages: int, config: EngineConfig, shape: ModelConfig) -> torch.Tensor:
    """Pages of keys and values, or of states where a model has no others. Mapped as they are used."""
    layout = config.layout
    if layout.states is not None and not shape.token_layers:
        return torch.from_numpy(np.zeros((num_pages, layout.states.page_bytes), np.uint8))
    return new_cache(num_pages, layout.layers_per_page, shape.num_kv_heads, config.page_size, shape.head_dim, config.kv_dtype)


def _sources(items: list[StepItem], batch: Batch, but: Collection[int] = ()) -> np.ndarray:
    """Tokens of a step that yield logits. `but`: rows that draw nothing."""
    drawn = [i for i, item in enumerate(items) if item.samples and item.row not in but]
    if not any(item.num_drafts for item in items):
        return batch.last_token if len(drawn) == len(items) else batch.last_token[drawn]
    ends = [batch.last_token[i] + np.arange(-items[i].num_drafts, 1) for i in drawn]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)


class CpuRunner:
    steps_ahead = 0  # a step is done when its launch returns

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        longest = max(config.max_context, config.max_stream)
        self.state = RowState(
            config.max_requests, config.max_context, config.page_size, groups=config.layout.groups, max_tokens=longest
        )
        self.cache = self._new_cache(config)
        self.sampler = Sampler(self.state, by_rejection=config.acceptance == "rejection")
        self.mixers = self._make_mixers(config)
        self._policies = Policies(self.mixers.kv)
        self.program = self._record() if native.lib and self.mixers.are_native else None
        self.parts = self._record_parts() if self.program is not None else None
        self._lora_program = self._lora_parts = None  # for steps in which a row has an adapter
        self.loras = Loras(model.lora_places(), config.max_loras, config.max_lora_rank) if config.max_loras else None
        if self.loras is not None and self.program is not None:
            with self.loras.on():
                self._lora_program, self._lora_parts = self._record(), self._record_parts()
            self.parts = self.parts if self._lora_parts else None
        self._phased = model.streaming if isinstance(model.streaming, PhasedWeights) else None
        self._gather_tokens, self._rows_program = config.gather_tokens, None  # for steps of so many tokens
        if self._phased is not None:
            check_phases(model, self.mixers, self.cache, self._phased)
        if self._phased is not None and self.program is not None:
            with self._phased.by_rows():
                self._rows_program = self._record()
        self._room = torch.empty(0, 0)  # for logits
        self.fallback = self._find_fallback()
        self.mover: PageMover | None = None  # if there are tiers
        self._groups = config.layout.groups
        self.observers: list[Callable[[StepPlan, torch.Tensor, StepResult], None]] = []  # get each step's hidden states

    def time_layers(self) -> LayerTimer:
        """From now on a forward pass runs op by op, and its layers are timed."""
        self.program = self._lora_program = self._rows_program = self.parts = self._lora_parts = None
        return LayerTimer(self)

    @property
    def takes_trees(self) -> bool:
        """Drafts may be trees."""
        return self.mixers.takes_trees

    def first_layers(self, num_layers: int) -> FirstLayers:
        """While no sequence is in the cache."""
        return FirstLayers(self.model, self.mixers, self.cache, self.state, num_layers)

    def _new_cache(self, config: EngineConfig) -> torch.Tensor:
        """All pages, and the null page."""
        return new_pool(config.num_pages + 1, config, self.model.config)

    def _record(self, through: Through | None = None) -> Program | None:
        return record_forward(self.model, self.mixers, self.cache, through)

    def _record_parts(self) -> tuple[Program, Program] | None:
        """All but the last layer, and that alone (`Model.enter`, `Model.finish`)."""
        if not self.model.can_enter or self.mixers.states is not None:
            return None
        enter, finish = self._record(self.model.enter), self._record(self.model.finish)
        return None if enter is None or finish is None else (enter, finish)

    def _make_mixers(self, config: EngineConfig) -> Mixers:
        shape, state, layout = self.model.config, self.state, config.layout
        angles, kv, states = self.model.angles(config.max_context, longest=config.max_stream), None, None
        if shape.token_layers:
            own = [one for one, spec in zip(angles, shape.layers, strict=True) if spec.reads_tokens]
            biases = self.model.distance_biases(config.max_context)
            values, tables, scales = self._kv_memory(config)
            quant = None
            if config.kv_calibration is not None:
                quant = load_calibration(Path(config.kv_calibration), shape, config.kv_dtype)
            kv = PagedKV(values, tables, attention_specs(shape.layers), own, layout.places, biases, scales, quant)
        if layout.states is not None:
            pool, tables = self.cache.flatten(1).view(torch.uint8), state.tables[layout.num_kv_groups :]
            states = PagedStates(pool, tables, layout.states, shape.layers, layout.interval)
        return Mixers(shape.layers, kv, states)

    def _kv_memory(self, config: EngineConfig) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """The memory that attention reads: keys and values, their page tables, and scales where there are any."""
        shape = self.model.config
        sizes = config.layout.layers_per_page, shape.num_kv_heads, config.page_size, shape.head_dim
        values, scales = views(self.cache, *sizes, config.kv_dtype)
        return values, self.state.kv_tables, scales

    def _find_fallback(self) -> str:
        """Why slower code runs than the compiled kernels' replay, or empty."""
        if native.lib is None:
            return f"the compiled kernels are not used: {native.why}. torch computes instead, several times slower"
        if not self.mixers.are_native:
            return (
                self.mixers.why_not
                or "the compiled kernels do not cover this model's states; torch computes their layers, several times slower"
            )
        if self.program is None or (self._phased is not None and self._rows_program is None):
            return "a replay of the recorded forward pass does not give the model's bits; its ops run one by one, slower"
        return ""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        self._begin(plan)
        batch = self._gather(plan)
        hidden_TH = self._forward_plan(plan, batch)
        result = self._sample(plan, batch, hidden_TH)
        for observe in self.observers:
            observe(plan, hidden_TH, result)
        return result

    def _begin(self, plan: StepPlan) -> None:
        """Applies the plan's changes of rows and pages before anything is computed."""
        self.state.stage(plan)
        self.state.apply()
        self.change_pages(plan)
        for row in (*plan.left_rows, *(copy.target for copy in plan.row_copies)):  # a copy's source has none
            self._policies.take(row, None)
        for new in plan.new_rows:
            self._policies.take(new.row, new.spec.cache)

    def _gather(self, plan: StepPlan) -> Batch:
        return gather_batch(plan.items, self.state, plan.trees, self._policies)

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        if self.mover is not None:
            tables = [table.numpy() for table in self.state.tables]
            anywhere = self._policies.rows | {new.row for new in plan.new_rows if new.spec.cache is not None}
            self.mover.store(plan.page_moves, changed_pages(plan, tables, self._groups, anywhere))
        if plan.page_zeroes:
            self.cache[plan.page_zeroes] = 0
        if plan.page_copies:
            copy_pages(self.cache, *torch.tensor(plan.page_copies).t())
        if self.mover is not None:
            self.mover.load(plan.page_moves)

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._phased is not None and 0 < self._gather_tokens <= batch.ids_T.numel():
            with self._phased.by_rows():
                return self._forward(batch, self._rows_program)
        if self.loras is None or (adapters := self.state.adapters[batch.rows]).max() < 0:
            return self._forward(batch, self.program)
        with self.loras.on(np.repeat(adapters, batch.counts)):
            return self._forward(batch, self._lora_program)

    def _forward_plan(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        read = self._find_read(plan, batch)
        return self.forward(batch) if read is None else self._forward_read(batch, read)

    def _find_read(self, plan: StepPlan, batch: Batch) -> np.ndarray | None:
        """Tokens whose hidden states are read, if it is worth it to compute no others. None: all."""
        if batch.ids_T.numel() - sum([item.num_draws for item in plan.items]) < _LEAST_UNREAD:
            return None
        if self.parts is None or self.observers or batch.entries is not None or batch.rounds:
            return None
        if any(map(self.state.asks_prompt, plan.items)):
            return None
        return _sources(plan.items, batch)

    def _forward_read(self, batch: Batch, read: np.ndarray) -> torch.Tensor:
        """The same as `forward`, with NaN in the place of hidden states that are not read. Of their tokens, the last layer
        computes keys and values."""
        rows_T = np.repeat(batch.rows, batch.counts)
        adapters_T, plan = self.state.adapters[rows_T], self.mixers.plan
        loras = None if adapters_T.max() < 0 else self.loras
        parts = self.parts if loras is None else self._lora_parts
        assert parts is not None

        def replay(program: Program, step: MixedStep, given: torch.Tensor, adapters: np.ndarray) -> torch.Tensor:
            with nullcontext() if loras is None else loras.on(adapters):
                return step.replay(program, given)

        step = plan(batch.rows, batch.starts, batch.counts, batch.positions_T, batch.slots_GT)
        given_TH = replay(parts[0], step, self._embed(batch), adapters_T)
        hidden_TH = torch.full_like(given_TH, torch.nan)
        if read.size:
            positions, slots = batch.positions_T[read], batch.slots_GT[:, read].contiguous()
            step = plan(rows_T[read], positions.numpy(), np.ones_like(read), positions, slots)
            hidden_TH[read] = replay(parts[1], step, given_TH[read], adapters_T[read])
        return hidden_TH

    def _embed(self, batch: Batch) -> torch.Tensor:
        return self.model.embed_at(batch.ids_T, batch.positions_T, batch.types_T)

    def _forward(self, batch: Batch, program: Program | None) -> torch.Tensor:
        entries = batch.entries or (batch.rows, batch.starts, batch.counts)
        step = self.mixers.plan(*entries, batch.positions_T, batch.slots_GT, batch.paths, batch.rounds)
        embedded_TH = self._embed(batch)
        if program:
            return step.replay(program, embedded_TH)
        return self.model(embedded_TH, step)

    def _sample(self, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        reports = [
            look_at_prompt(self.model, self.state, item, hidden_TH[last + 1 - item.count : last + 1], score)
            for item, last in zip(plan.items, batch.last_token.tolist(), strict=True)
            if self.state.asks_prompt(item)
        ]
        result = self._draw(plan, batch, hidden_TH)
        for report in reports:
            report.read(result)
        return result

    def _draw(self, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        pooled = {item.row: [0] for item in plan.items if item.samples and self.state.is_pooled(item.row)}  # they draw nothing
        items = [item for item in plan.items if item.samples and item.row not in pooled]
        if not items:
            return StepResult(pooled)
        assert isinstance(self.model, CausalLM)
        rows, positions = draws(items, plan.trees)
        sources = _sources(plan.items, batch, pooled)
        drawn_TH = hidden_TH if len(sources) == len(hidden_TH) else hidden_TH[sources]  # each token once, in order
        sampled = self.sampler.sample(self._logits(self.model, drawn_TH), rows, positions)
        drawn = sampled.token_ids.tolist()
        paths = right_drafts(items, plan.drafts, plan.trees, drawn) if plan.trees else {}
        result = StepResult(pooled | accept(items, plan.drafts, drawn, paths), paths=paths, broken=broken_rows(items, drawn))
        if paths:
            self._settle(items, result)
        else:
            self.state.tokens_cpu[rows, positions] = [max(token, 0) for token in drawn]  # as state.append, in a fifth of the time
        result.take_logprobs(rows, sampled.logprobs)
        return result

    def _logits(self, model: CausalLM, drawn_TH: torch.Tensor) -> torch.Tensor:
        """In memory that is kept: to give megabytes back to the system and to take them again costs up to 1 ms a step. Good until
        the next step. Those of several ranks are put together elsewhere first."""
        if native.lib is None or model.weight_plan.part.tables.size > 1:
            return model.logits(drawn_TH)
        if self._room.shape[0] < len(drawn_TH):
            self._room = drawn_TH.new_empty(len(drawn_TH), model.config.vocab_size)
        return model.logits(drawn_TH, self._room[: len(drawn_TH)])

    def _settle(self, items: list[StepItem], result: StepResult) -> None:
        """Tokens, and the keys and values of drafts of trees that are right, go where the next step looks for them."""
        assert self.mixers.kv is not None
        moves = []
        for item in items:
            first = item.start + item.count - item.num_drafts
            tokens = torch.tensor(result.tokens[item.row])
            self.state.append(torch.full_like(tokens, item.row), first + torch.arange(len(tokens)), tokens)
            path = result.paths.get(item.row, ())
            moves += [(item.row, first + draft, first + i) for i, draft in enumerate(path) if draft != i]
        if moves:
            move_tokens(self.mixers.kv, *np.array(moves).T)
