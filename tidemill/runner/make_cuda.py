"""The slots of a GPU's runner, put together from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tidemill.capabilities import why_not
from tidemill.config import HEADS, TREES, EngineConfig
from tidemill.distributed.group import group_of
from tidemill.kernels.cuda.records import LIVE
from tidemill.kernels.flex_attention import FlexAttention
from tidemill.kernels.kv_cache import PagedKV, attention_specs
from tidemill.kernels.policies import Policies
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_attention import Attention, FlexListAttention, ListAttention
from tidemill.runner.cuda_buffers import StepBuffers
from tidemill.runner.cuda_graphs import GraphPool, NoGraphs, sizes
from tidemill.runner.cuda_kinds import Decode, FlashPrompts, Mixed, NoFlash
from tidemill.runner.cuda_last import AllLayers, LastLayerApart
from tidemill.runner.cuda_microbatches import Microbatches, NoMicrobatches
from tidemill.runner.cuda_policies import CudaPolicies, Launches, PolicySteps
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.runner.cuda_sampler import CudaSampler
from tidemill.runner.cuda_sampling import CudaSampling
from tidemill.runner.cuda_slots import (
    Captured,
    CudaSlots,
    NoAdapters,
    RowAdapters,
    StatesDropped,
    StatesKept,
    StepKind,
)
from tidemill.runner.cuda_stage import OnlyStage, PipelineStage, StageSteps
from tidemill.runner.cuda_step import find_missing, new_pool, new_states
from tidemill.runner.cuda_trees import CudaTrees, NoTrees, TreeSteps
from tidemill.runner.device import CopiedTables
from tidemill.runner.flash_trial import refused_flash
from tidemill.runner.inputs import InputRows
from tidemill.runner.paged import PagedLayout
from tidemill.runner.state import RowState
from tidemill.runner.virtual_cuda import ContiguousAttention, VirtualCudaLayout

_DECODE_STEPS = ((4, 1), (64, 8), (256, 16), (1024, 32))
_MIXED_STEPS = ((64, 16), (256, 32), (1024, 64), (2048, 128), (16384, 256))


@torch.inference_mode()
def make_cuda_runner(
    model: CausalLM, config: EngineConfig, stage: PipelineStage | None = None
) -> CudaRunner:
    """`stage`: of a pipeline."""
    device, shape, is_alone = torch.device("cuda"), model.config, stage is None
    is_virtual, has_heads = config.kv_layout == "virtual", _has_heads(config)
    state = RowState(
        config.max_requests + 1,
        config.max_context,
        config.page_size,
        device,
        config.layout.groups,
        max(config.max_context, config.max_stream),
        shape.takes_embeddings,
    )
    tables, sampler = CopiedTables(state), CudaSampler(state, shape.vocab_size)
    kv_layout: PagedLayout | VirtualCudaLayout
    if is_virtual:
        kv_layout = VirtualCudaLayout(config, shape, state, tables)
    else:
        kv_layout = PagedLayout(new_pool(config, shape, device), config, shape, state)
    kv = _paged_kv(model, config, kv_layout, device)
    missing = find_missing(shape)
    states = new_states(config, shape, kv_layout.pool, state.tables)
    kv_tables = tables.by_group[: config.layout.num_kv_groups]
    attention: Attention
    if isinstance(kv_layout, VirtualCudaLayout):
        attention = ContiguousAttention(config, kv, kv_layout)
    elif missing:
        about_attention = config, shape, kv, state, kv_tables, states
        attention = FlexListAttention(FlexAttention(kv), *about_attention)
    else:
        attention = ListAttention(config, shape, kv, state, kv_tables, states)
    buffers = StepBuffers(config, shape, attention.num_slots, attention.num_copies, device)
    model.see_live(buffers.metadata[LIVE : LIVE + 1])
    loras = None
    if config.max_loras:
        most = config.max_loras, config.max_lora_rank, config.token_budget
        loras = CudaLoras(model.lora_places(), *most, device)
    is_streamed = model.streaming is not None and model.streaming.is_in_use
    own_stage = stage or OnlyStage(model)
    if shape.takes_embeddings:
        num_rows = shape.num_input_rows(config.token_budget)
        own_stage.inputs = InputRows(num_rows, shape.hidden_size, torch.bfloat16, device)
    slots = CudaSlots(
        model,
        state,
        buffers,
        attention,
        NoAdapters() if loras is None else RowAdapters(loras, state),
        StatesKept(buffers.hidden) if has_heads else StatesDropped(),
        NoGraphs(model) if is_streamed else GraphPool(config.fast_math or bool(missing)),
        sizes(config.max_draws, _DECODE_STEPS) if is_alone else [],
        sizes(config.token_budget, _MIXED_STEPS),
        own_stage.embed,
    )
    last = AllLayers(slots)
    if model.can_enter and is_alone and not (missing or is_virtual or has_heads):
        last = LastLayerApart(slots)
    mixed, decode = Mixed(slots, last), Decode(slots)
    kinds: list[StepKind] = [decode, mixed]
    captured: list[Captured] = [mixed]
    flash: FlashPrompts | NoFlash = NoFlash(refused_flash(config, shape))
    if not flash.trial.why and isinstance(attention, ListAttention):
        flash = FlashPrompts(slots, attention, mixed, config)
        captured.append(flash)
    captured.append(decode)
    if isinstance(last, LastLayerApart):
        captured.append(last)
    microbatches: Microbatches | NoMicrobatches = NoMicrobatches()
    if config.nano_batching != "off" and isinstance(attention, ListAttention):
        about = config, kv_layout.pool, group_of(model.weight_plan.shard)
        microbatches = Microbatches(slots, attention, (mixed, decode), *about)
        captured.append(microbatches)
        kinds.insert(0, microbatches)
    trees: TreeSteps | NoTrees = NoTrees()
    takes_trees = has_heads and not set(TREES).isdisjoint(config.speculate)
    if takes_trees and why_not("draft trees", config.features) is None:
        assert isinstance(attention, ListAttention)
        paths = CudaTrees(config.token_budget, config.max_drafts, device)
        trees = TreeSteps(slots, attention, paths)
        captured.append(trees)
        kinds.insert(0, trees)
    policies = Policies(kv, keeps_memory=False)
    warm_ups: list[Callable[[], None]] = []
    if own_stage.is_last:
        warm_ups.append(partial(sampler.warm_up, model, buffers.hidden, buffers.logits))
    if config.kv_policies and isinstance(attention, ListAttention):
        launches = _launches(config, attention, slots.mixed_sizes[-1])
        with_policies = CudaPolicies(kv, tables.by_group[0], launches, policies)
        warm_ups.append(with_policies.warm_up)
        kinds.insert(0, PolicySteps(slots, with_policies))
    if stage is not None:
        kinds, captured = [StageSteps(slots, mixed, stage)], [mixed]
    runner = CudaRunner(
        config,
        slots,
        kv_layout,
        tables,
        policies,
        loras,
        own_stage,
        CudaSampling(state, sampler),
        trees,
        flash,
        microbatches,
        kinds,
        captured,
        warm_ups,
        _fallback(missing, is_streamed),
    )
    runner.inputs = own_stage.inputs
    return runner


def _has_heads(config: EngineConfig) -> bool:
    """Trained heads draft."""
    return not set(HEADS).isdisjoint(config.speculate)


def _paged_kv(
    model: CausalLM,
    config: EngineConfig,
    kv_layout: PagedLayout | VirtualCudaLayout,
    device: torch.device,
) -> PagedKV:
    """The memory that attention reads."""
    shape, (values, scales) = model.config, kv_layout.kv_memory
    angles = model.angles(config.max_context, device, config.max_stream)
    specs = zip(angles, shape.layers, strict=True)
    own = [angle for angle, spec in specs if spec.reads_tokens]
    biases = model.distance_biases(config.max_context)
    about = attention_specs(shape.layers), own, config.layout.places, biases, scales
    return PagedKV(values, kv_layout.tables, *about, page_size=config.page_size)


def _fallback(missing: str, is_streamed: bool) -> str:
    """Why slower code runs than there is for this GPU, or empty."""
    flex = f"{missing}; torch's FlexAttention computes it, several times slower"
    streamed = "weights are streamed: steps run without CUDA graphs"
    return "; ".join([flex] * bool(missing) + [streamed] * is_streamed)


def _launches(config: EngineConfig, attention: ListAttention, size: int) -> Launches:
    grid = attention.mixed_grid(size, True)
    return Launches(
        attention.partial,
        attention.done,
        attention.members_per_tile,
        attention.prompt_tile,
        attention.at_once,
        attention.warp_specialized,
        *grid[:3],
        config.max_draws,
    )
