"""What every rank of a group does alike, be it the engine's or a worker's: its part of the model, and the runner of that."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from tidemill.config import EngineConfig, EngineOptions, decide_layout
from tidemill.errors import ConfigError
from tidemill.model_config import ModelConfig
from tidemill.models.base import Model, ProgressFn
from tidemill.parallel.channel import Channel
from tidemill.parallel.cuts import rank_config
from tidemill.parallel.shard import Shard
from tidemill.parallel.world import World, split_layers
from tidemill.quant import WeightPlan
from tidemill.runner.make import make_runner
from tidemill.runner.stage_runner import StageRunner
from tidemill.runner.worker_group import RankRunner
from tidemill.weights.checkpoint import Checkpoint


def largest_part(options: EngineOptions, model: ModelConfig) -> ModelConfig:
    """Of the parts that ranks have of a model, the one with the largest KV cache."""
    size = options.tensor_parallel
    parts = [rank_config(model, Shard(rank, size), options.expert_parallel) for rank in range(size)]
    return max(parts, key=lambda part: part.num_kv_heads)


def world_of(config: EngineConfig, model: ModelConfig) -> World:
    """Stages cost about the same: what a token reads of their weights, and of the head."""
    costs, head = layer_costs(model), model.vocab_size * model.hidden_size
    return World(config.tensor_parallel, split_layers(costs, config.pipeline_parallel, head))


def layer_costs(model: ModelConfig) -> list[int]:
    """Weights of each layer that a token is multiplied by."""
    rest = replace(model, layers=model.layers[:1], experts=model.experts[:1], stored={})
    embeddings = rest.num_active_parameters - _without_embeddings(rest)
    costs = []
    for layer in range(model.num_layers):
        one = replace(model, layers=(model.layers[layer],), experts=model.experts[layer : layer + 1], stored={})
        costs.append(one.num_active_parameters - embeddings)
    return costs


def _without_embeddings(one: ModelConfig) -> int:
    small = replace(one, vocab_size=1, num_positions=0, num_token_types=0)
    return small.num_active_parameters - one.hidden_size * (1 if one.tie_embeddings else 2)


def load_rank(
    architecture: type[Model],
    checkpoint: Checkpoint,
    model: ModelConfig,
    config: EngineConfig,
    world: World,
    rank: int,
    progress: ProgressFn | None = None,
    random: bool = False,
) -> Model:
    plan = WeightPlan(config.scheme, config.device, config.fast_math, world.shard(rank), config.expert_parallel)
    return architecture.load(checkpoint, model, plan, progress, random, world.stage(rank))


def make_rank_runner(model: Model, config: EngineConfig, world: World, rank: int, channels: dict[int, Channel]) -> RankRunner:
    layout = decide_layout(model.config, config.kv_dtype, config.page_size, config.max_context)[0]
    if layout.groups != config.layout.groups:
        raise ConfigError(f"Rank {rank} would have other KV groups than rank 0.", fix="Use fewer ranks for --tensor-parallel.")
    config = replace(config, layout=layout)
    stage = world.stage(rank)
    if stage is None:
        return cast(RankRunner, make_runner(model, config))
    before, after = world.before(rank), world.after(rank)
    return StageRunner(
        model,
        config,
        stage,
        None if before is None else channels[before],
        None if after is None else channels[after],
    )
