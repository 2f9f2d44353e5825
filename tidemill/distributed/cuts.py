"""The cuts of a model for tensor parallelism: which heads, channels, columns and rows a rank has.
Ints only.

Heads stay whole. Where there are at least as many groups of heads (KV heads, groups of a state) as
ranks, a rank has whole groups, some ranks one more than others. Where there are fewer, a group's
key and value are on several ranks, which share out its query heads. The feed-forward evens out what
that makes unequal: ranks with fewer heads have more of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tidemill.distributed.shard import Shard
from tidemill.distributed.world import Part
from tidemill.errors import ConfigError
from tidemill.types.model_config import LayerSpec, ModelConfig, MoESpec

_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # of columns: blocks of codes, and what vectors like
_SMALLEST_QUANTIZED = 32
_FINE = 24  # units a rank should have, so that shares can be evened out


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of `whole` rows or columns, those of a rank, in this order."""

    whole: int
    runs: tuple[range, ...]

    @property
    def num(self) -> int:
        return sum(map(len, self.runs))

    def times(self, values: int) -> Cut:
        """The cut of things that have so many values each."""
        return Cut(
            self.whole * values,
            tuple(range(run.start * values, run.stop * values) for run in self.runs),
        )

    @property
    def is_whole(self) -> bool:
        return self.num == self.whole

    @property
    def size(self) -> Size:
        """A number where that says all."""
        return self.whole if self.is_whole else self


Size: TypeAlias = int | Cut  # all of so many, or a rank's part


def num_of(size: Size) -> int:
    return size if isinstance(size, int) else size.num


def whole_of(size: Size) -> int:
    return size if isinstance(size, int) else size.whole


def together(*cuts: Cut) -> Cut:
    """The cut of things that lie one after the other."""
    runs, begin = list[range](), 0
    for cut in cuts:
        runs += [range(begin + run.start, begin + run.stop) for run in cut.runs]
        begin += cut.whole
    return Cut(begin, tuple(runs))


def even(whole: int, shard: Shard, unit: int = 1) -> Cut:
    return Cut(whole, (shard.range(whole, unit),))


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's heads, and the groups (KV heads) that they belong to. `is_first`: no rank before it
    has the same group."""

    heads: Cut
    groups: Cut
    is_first: bool = True


def share_heads(num_heads: int, num_groups: int, shard: Shard) -> Heads:
    per_group = num_heads // num_groups
    if num_groups >= shard.size:
        groups = even(num_groups, shard)
        return Heads(groups.times(per_group), groups)
    ranks = [Shard(group, num_groups).range(shard.size) for group in range(num_groups)]
    group = next(i for i, own in enumerate(ranks) if shard.rank in own)
    at = shard.rank - ranks[group].start
    heads = Shard(at, len(ranks[group])).range(per_group)
    if per_group < len(ranks[group]):
        raise ConfigError(
            f"{num_heads} heads in {num_groups} groups cannot be shared out among {shard.size} ranks.",
            fix=f"Use --tensor-parallel {num_heads} or less.",
        )
    begin = group * per_group
    return Heads(
        Cut(num_heads, (range(begin + heads.start, begin + heads.stop),)),
        Cut(num_groups, (range(group, group + 1),)),
        at == 0,
    )


def heads_of(spec: LayerSpec, shard: Shard) -> Heads:
    return share_heads(spec.num_heads, spec.head_groups, shard)


def mixer_values(config: ModelConfig, layer: int, shard: Shard) -> int:
    """Weights of a layer's attention, or of what it has instead, on this rank."""
    return rank_spec(config.layers[layer], shard).num_parameters(
        config.hidden_size, config.gated_attention
    )


def feed_forward_cut(config: ModelConfig, layer: int, shard: Shard) -> Cut:
    """Columns of a dense feed-forward."""
    per_column = (3 if config.is_gated else 2) * config.hidden_size
    return _balanced(config, layer, shard, config.intermediate_size, per_column)


def expert_cut(config: ModelConfig, layer: int, shard: Shard) -> Cut:
    """Columns of each expert."""
    spec = config.moe(layer)
    assert spec is not None
    return _balanced(
        config, layer, shard, spec.expert_size, 3 * config.hidden_size * spec.num_experts
    )


def shared_cut(config: ModelConfig, spec: MoESpec, shard: Shard) -> Cut:
    """Columns of the expert that all tokens go through."""
    return even(spec.shared_size, shard, unit_of(spec.shared_size, shard.size, config.is_quantized))


def unit_of(num: int, size: int, is_quantized: bool) -> int:
    """Columns that stay together: as many as leave every rank with enough units."""
    units = [
        unit
        for unit in _UNITS
        if num % unit == 0 and (not is_quantized or unit >= _SMALLEST_QUANTIZED)
    ]
    return next((unit for unit in units if num // unit >= _FINE * size), units[-1] if units else 1)


def _balanced(config: ModelConfig, layer: int, shard: Shard, num: int, per_column: int) -> Cut:
    unit = unit_of(num, shard.size, config.is_quantized)
    others = [mixer_values(config, layer, Shard(rank, shard.size)) for rank in range(shard.size)]
    ends = shares(num, unit, per_column, others)
    own = range(ends[shard.rank], ends[shard.rank + 1])
    if not own:
        raise ConfigError(
            f"{num} columns of a feed-forward cannot be shared out among {shard.size} ranks in units of {unit}.",
            fix="Use fewer ranks for --tensor-parallel.",
        )
    return Cut(num, (own,))


def shares(num: int, unit: int, per_column: int, others: Sequence[int]) -> list[int]:
    """The beginning and end of the ranks' columns, so that each holds as much as others, with what
    it has besides."""
    size, total, ends, before = len(others), sum(others) + num * per_column, [0], 0
    for rank, other in enumerate(others[:-1]):
        before += other
        wanted = ((rank + 1) * total - size * before) / (size * per_column)
        ends.append(max(ends[-1], min(num, round(wanted / unit) * unit)))
    return [*ends, num]


def rank_spec(spec: LayerSpec, shard: Shard) -> LayerSpec:
    """The spec of a layer as this rank has it."""
    ranks = [heads_of(spec, Shard(rank, shard.size)) for rank in range(shard.size)]
    own, ends = ranks[shard.rank], [rank.heads.runs[0].stop for rank in ranks]
    return spec.cut(own.heads.runs[0], own.groups.num, ends)


def rank_config(config: ModelConfig, shard: Shard, expert_parallel: bool = False) -> ModelConfig:
    """The model as this rank has it: its heads make its cache. The vocabulary stays whole, since
    logits are gathered."""
    if shard.size == 1:
        return config
    if config.pooler is not None:
        raise ConfigError(
            "Encoders cannot be cut for tensor parallelism.", fix="Use --data-parallel."
        )
    if expert_parallel and any(
        spec is not None and spec.num_experts < shard.size for spec in config.experts
    ):
        raise ConfigError(
            "There are more ranks than experts.",
            fix="Use fewer ranks, or leave --expert-parallel out.",
        )
    layers = tuple(rank_spec(spec, shard) for spec in config.layers)
    if config.has_states:
        _check_alike(config, shard)
    experts = tuple(
        None if spec is None else _rank_experts(config, layer, spec, shard, expert_parallel)
        for layer, spec in enumerate(config.experts)
    )
    dense = [layer for layer in range(config.num_layers) if config.moe(layer) is None]
    inner = (
        feed_forward_cut(config, dense[0], shard).num
        if dense and config.intermediate_size
        else config.intermediate_size
    )
    stored = {kind: -(-num // shard.size) for kind, num in config.stored.items()}
    return replace(
        config,
        layers=layers,
        experts=experts,
        intermediate_size=inner,
        stored=stored,
        num_ranks=shard.size,
    )


def part_config(config: ModelConfig, part: Part, expert_parallel: bool = False) -> ModelConfig:
    """The model as a rank with this part has it."""
    if part.rows.size == 1:
        own, size = rank_config(config, part.shard, expert_parallel), part.tables.size
        stored = {kind: -(-num // size) for kind, num in config.stored.items()}
        return own if part.hidden.size == 1 else replace(own, stored=stored, num_ranks=size)
    if config.pooler is not None:
        raise ConfigError("Encoders cannot be divided among ranks.", fix="Use --data-parallel.")
    size, num_layers = part.rows.size, config.num_layers
    layers = (
        config.layers
        if config.has_states
        else tuple(rank_spec(spec, part.rows) for spec in config.layers)
    )
    stored = {
        kind: min(num, -(-num // size) + 2 * num // num_layers)
        for kind, num in config.stored.items()
    }
    return replace(config, layers=layers, stored=stored)


def _check_alike(config: ModelConfig, shard: Shard) -> None:
    """Pages of states are planned for all ranks at once: they must have the same sizes everywhere."""
    for spec in dict.fromkeys(config.layers):
        own = {
            rank_spec(spec, Shard(rank, shard.size)).but(first_head=0) for rank in range(shard.size)
        }
        if len(own) > 1:
            raise ConfigError(
                f"{spec.num_heads} heads of a model that has states cannot be shared out evenly among {shard.size} ranks.",
                fix="Use a number of ranks that divides heads, KV heads and groups.",
            )


def _rank_experts(
    config: ModelConfig, layer: int, spec: MoESpec, shard: Shard, expert_parallel: bool
) -> MoESpec:
    shared = shared_cut(config, spec, shard).num if spec.shared_size else 0
    if expert_parallel:
        return replace(spec, shared_size=shared, num_held=len(shard.range(spec.num_experts)))
    return replace(spec, expert_size=expert_cut(config, layer, shard).num, shared_size=shared)
