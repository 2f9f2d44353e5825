"""The slots of a CPU's runner, put together from the configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.config import EngineConfig
from tidemill.kernels import native
from tidemill.kernels.kv_cache import PagedKV, attention_specs
from tidemill.kernels.mixers import Mixers
from tidemill.kernels.state import PagedStates
from tidemill.layers.lora import Loras
from tidemill.layers.phased import PhasedWeights
from tidemill.models.base import Model
from tidemill.runner.cpu_kinds import (
    AdapterRows,
    AllLayers,
    ForwardFn,
    LastLayerApart,
    ManyTokens,
    NoAdapters,
    Pass,
    Passes,
    StepKind,
)
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.cpu_stage import OnlyStage
from tidemill.runner.graphs import check_phases, record_forward
from tidemill.runner.inputs import InputRows
from tidemill.runner.paged import PagedLayout, new_pool
from tidemill.runner.state import RowState
from tidemill.runner.virtual import VirtualLayout
from tidemill.weights.kv_calibration import load_calibration


def make_cpu_runner(
    model: Model, config: EngineConfig, stage: OnlyStage | None = None
) -> CpuRunner:
    """`stage`: of a pipeline."""
    shape, stage = model.config, stage or OnlyStage(model)
    longest = max(config.max_context, config.max_stream)
    state = RowState(
        config.max_requests,
        config.max_context,
        config.page_size,
        groups=config.layout.groups,
        max_tokens=longest,
        has_inputs=shape.takes_embeddings,
    )
    kv_layout: PagedLayout | VirtualLayout
    if config.kv_layout == "virtual":
        kv_layout = VirtualLayout(config, shape, state)
    else:
        kv_layout = PagedLayout(new_pool(config, shape), config, shape, state)
    mixers = make_mixers(model, config, state, kv_layout)
    recorder = _Recorder(model, mixers, kv_layout)
    plain = recorder.record(model)
    parts = recorder.record_parts() if plain.program is not None else []
    loras, whole = None, Passes(plain, plain)
    write_kv_and_last = [Passes(part, part) for part in parts]
    if config.max_loras:
        loras = Loras(model.lora_places(), config.max_loras, config.max_lora_rank)
        whole = Passes(plain, recorder.record(loras.forward(model)))
        if parts:
            adapted = recorder.record_parts(loras)
            both = zip(parts, adapted, strict=False)  # none with adapters: none at all
            write_kv_and_last = [Passes(*pair) for pair in both]
    adapters = NoAdapters() if loras is None else AdapterRows(state, loras.step)
    slots = mixers, stage.embed, adapters
    all_layers = AllLayers(*slots, whole)
    kinds: list[StepKind] = [all_layers]
    if write_kv_and_last:
        kinds.insert(0, LastLayerApart(*slots, state, *write_kv_and_last))
    passes = [plain]
    if isinstance(model.streaming, PhasedWeights):
        check_phases(model, mixers, kv_layout.pool, model.streaming)
        by_rows = recorder.record(model.streaming.forward(model))
        passes.append(by_rows)
        if config.gather_tokens > 0:
            kinds.insert(0, ManyTokens(*slots, by_rows, config.gather_tokens))
    fallback = find_fallback(mixers, passes)
    runner = CpuRunner(
        model, config, state, kv_layout, mixers, loras, stage, kinds, all_layers, fallback
    )
    if shape.takes_embeddings:
        num_rows = shape.num_input_rows(config.token_budget)
        runner.inputs = stage.inputs = InputRows(num_rows, shape.hidden_size, torch.float32)
    return runner


def make_mixers(
    model: Model, config: EngineConfig, state: RowState, kv_layout: PagedLayout | VirtualLayout
) -> Mixers:
    """The attention, or states, of all layers."""
    shape, layout, kv, states = model.config, config.layout, None, None
    angles = model.angles(config.max_context, longest=config.max_stream)
    if shape.token_layers:
        specs = zip(angles, shape.layers, strict=True)
        own = [angle for angle, spec in specs if spec.reads_tokens]
        biases = model.distance_biases(config.max_context)
        values, scales = kv_layout.kv_memory
        quant = None
        if config.kv_calibration is not None:
            quant = load_calibration(Path(config.kv_calibration), shape, config.kv_dtype)
        about = attention_specs(shape.layers), own, layout.places, biases, scales, quant
        kv = PagedKV(values, kv_layout.tables, *about, page_size=config.page_size)
    if layout.states is not None:
        pool, tables = kv_layout.pool.flatten(1), state.tables[layout.num_kv_groups :]
        about_states = layout.states, shape.layers, layout.interval
        states = PagedStates(pool.view(torch.uint8), tables, *about_states)
    return Mixers(shape.layers, kv, states)


class _Recorder:
    """Records forward passes, where the kernels can."""

    def __init__(
        self, model: Model, mixers: Mixers, kv_layout: PagedLayout | VirtualLayout
    ) -> None:
        self._model, self._mixers, self._kv_layout = model, mixers, kv_layout
        self._can_record = native.lib is not None and mixers.are_native

    def record(self, forward: ForwardFn) -> Pass:
        if not self._can_record:
            return Pass(forward)
        with self._kv_layout.trial_pages() as pages:
            return Pass(forward, record_forward(self._model, self._mixers, pages, forward))

    def record_parts(self, loras: Loras | None = None) -> list[Pass]:
        """All but the last layer, and that alone (`Model.enter`, `Model.finish`); none, if they
        cannot be recorded."""
        model = self._model
        if not model.can_enter or self._mixers.states is not None:
            return []
        forwards: list[ForwardFn] = [model.enter, model.finish]
        if loras is not None:
            forwards = [loras.forward(forward) for forward in forwards]
        parts = [self.record(forward) for forward in forwards]
        return [] if any(part.program is None for part in parts) else parts


def find_fallback(mixers: Mixers, passes: list[Pass]) -> str:
    """Why slower code runs than the compiled kernels' replay, or empty."""
    slower = "torch computes instead, several times slower"
    if native.lib is None:
        return f"the compiled kernels are not used: {native.why}. {slower}"
    if not mixers.are_native:
        return mixers.why_not or (
            "the compiled kernels do not cover this model's states; torch computes their layers, several times slower"
        )
    if any(each.program is None for each in passes):
        return "a replay of the recorded forward pass does not give the model's bits; its ops run one by one, slower"
    return ""
