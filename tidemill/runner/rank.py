"""The common start of every rank of a group, be it the engine's or a worker's: its part of the
model, and the runner of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

from tidemill.capabilities import Setup, in_use, why_not
from tidemill.capabilities.features import grid_of
from tidemill.config import EngineConfig, EngineOptions, decide_layout
from tidemill.config.options import Decision
from tidemill.config.parallel import decide_tensor_layout
from tidemill.distributed.channel import Channel
from tidemill.distributed.cuts import part_config
from tidemill.distributed.layouts import DEVICES, Phase, engine_seconds
from tidemill.distributed.shared import WEIGHTS_SUFFIX
from tidemill.distributed.stages import kv_layers
from tidemill.distributed.world import World
from tidemill.errors import ConfigError
from tidemill.layers.gathered import GatheredStreaming
from tidemill.layers.phased import PhasedWeights
from tidemill.layers.streamed import Streaming
from tidemill.models.base import CausalLM, Model, ProgressFn
from tidemill.quant import WeightPlan
from tidemill.runner.cpu_stage import PipelineStage
from tidemill.runner.make import make_runner
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.runner.worker_group import RankRunner
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_PROMPT, _OUTPUT, _BATCH = 512, 256, 8  # the load that `auto` takes a layout for


def largest_part(options: EngineOptions, model: ModelConfig) -> ModelConfig:
    """The part of a rank, of all the parts, that has the largest KV cache."""
    world = World(options.tensor_parallel, (model.num_layers,), *layout_of(options, model))
    parts = [
        part_config(model, world.part(rank), options.expert_parallel)
        for rank in range(world.tensor)
    ]
    return max(parts, key=lambda part: part.num_kv_heads)


def settle_layout(setup: Setup) -> Decision[str]:
    """Decides how ranks share layers. `auto`: by the cost of a prompt and an output, of the layouts
    that every model has; phased, which only a load finds out to be for a model, is asked for by
    name. It alone computes some steps in another way than others: a token's bits must not depend on
    what else is in its step, and the other layouts sum in different orders. By rates that are
    written down, not measured, so that every start chooses the same."""
    options, model, features = setup.options, setup.model, in_use(setup)
    if options.tensor_layout != "auto" or options.tensor_parallel == 1:
        return decide_tensor_layout(options)
    rates = DEVICES["h200" if setup.device == "cuda" else "cpu"]
    size, seconds = options.tensor_parallel, dict[str, float]()
    prefill, decode = (
        Phase("prefill", _PROMPT, 1, _PROMPT),
        Phase("decode", _BATCH, _BATCH, _PROMPT),
    )
    of_prompt, of_step = (engine_seconds(model, size, phase, rates) for phase in (prefill, decode))
    for name, spent in of_prompt.items():
        if name != "phased" and not why_not(f"tensor-layout {name}", features):
            seconds[name] = spent + of_step[name] * _OUTPUT / _BATCH
    best, *_ = order = sorted(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1000 * seconds[name]:.0f} ms" for name in order)
    return best, f"estimated for a prompt of {_PROMPT} tokens and {_OUTPUT} more: {told}"


def layout_of(options: EngineOptions | EngineConfig, model: ModelConfig) -> tuple[str, int]:
    """The way that ranks share layers, and the number of parts of the hidden size."""
    size, layout = options.tensor_parallel, options.tensor_layout
    return layout, grid_of(size) if layout == "2d" else 1


def world_of(
    options: EngineOptions | EngineConfig, model: ModelConfig, layers: Sequence[int]
) -> World:
    """`layers`: how many each stage has."""
    return World(options.tensor_parallel, tuple(accumulate(layers)), *layout_of(options, model))


def load_rank(
    architecture: type[Model],
    checkpoint: Checkpoint,
    model: ModelConfig,
    config: EngineConfig,
    world: World,
    rank: int,
    progress: ProgressFn | None = None,
    random: bool = False,
    shared: str = "",
) -> Model:
    """`shared`: the file of shared memory of the ranks that share its layers, if there is one."""
    part = world.part(rank)
    plan = WeightPlan(
        config.scheme,
        config.device,
        config.fast_math,
        part.shard,
        config.expert_parallel,
        part.hidden,
        part.rows,
    )
    streaming: Streaming | None = None
    if part.rows.size > 1:
        streaming = GatheredStreaming(part.rows, shared and shared + WEIGHTS_SUFFIX)
    elif world.layout == "phased":
        streaming = PhasedWeights(part.shard, shared + WEIGHTS_SUFFIX)
    return architecture.load(
        checkpoint, model, plan, progress, random, world.stage(rank), streaming
    )


def make_rank_runner(
    model: Model, config: EngineConfig, world: World, rank: int, channels: dict[int, Channel]
) -> RankRunner:
    layout = decide_layout(model.config, config.kv_dtype, config.page_size, config.max_context)[0]
    if layout.groups != config.layout.groups:
        raise ConfigError(
            f"Rank {rank} would have other KV groups than rank 0.",
            fix="Use fewer ranks for --tensor-parallel.",
        )
    stage = world.stage(rank)
    config = replace(
        config, layout=layout if stage is None else layout.only(kv_layers(model.config, stage))
    )
    if stage is None:
        return cast(RankRunner, make_runner(model, config))
    before, after = world.before(rank), world.after(rank)
    neighbours = (
        None if before is None else channels[before],
        None if after is None else channels[after],
    )
    if config.device != "cuda":
        return make_cpu_runner(model, config, PipelineStage(model, stage, *neighbours))
    from tidemill.runner.cuda_stage import PipelineStage as CudaPipelineStage  # needs Triton
    from tidemill.runner.make_cuda import make_cuda_runner

    config, generating = replace(config, nano_batching="off"), cast(CausalLM, model)
    own_stage = CudaPipelineStage(generating, config, stage, *neighbours)
    return make_cuda_runner(generating, config, own_stage)
