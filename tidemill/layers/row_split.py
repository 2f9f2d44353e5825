"""Ranks that compute different rows of a step with whole weights. Attention needs all rows, and has
some heads on each rank: so before it, rows are exchanged for heads, and heads for rows after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tidemill.distributed.cuts import heads_of
from tidemill.distributed.group import Group
from tidemill.distributed.shard import Shard
from tidemill.distributed.shared import SharedGroup
from tidemill.kernels import native
from tidemill.kernels.kv_cache import HeadWeights
from tidemill.kernels.native.exchanges import Exchange
from tidemill.layers.attention import AttentionStep
from tidemill.types.model_config import ModelConfig


class RowSplit:
    """The split of the rows of any step: those of this rank, and what it exchanges with others.
    `config`: of the whole model, whose layers all have attention with the same heads. `by_rank`: q,
    k and v of a row are those of rank 0, then those of rank 1, and so on, as parts of weights give
    them; else q of all heads, then k, then v."""

    def __init__(self, config: ModelConfig, group: Group, by_rank: bool = False) -> None:
        self._group, self._shard = group, Shard(group.rank, group.size)
        spec, dim = config.layers[0], config.head_dim
        heads = [heads_of(spec, Shard(rank, group.size)) for rank in range(group.size)]
        nums = (spec.num_heads, *(part.num_heads for part in spec.stored))
        firsts = [sum(nums[:i]) * dim for i in range(3)]
        self._runs = [
            [
                (first + run.start * dim, len(run) * dim)
                for first, cut in zip(firsts, (one.heads, one.groups, one.groups), strict=True)
                for run in cut.runs
            ]
            for one in heads
        ]
        width = sum(nums) * dim
        if by_rank:
            own = [(one.heads.num + 2 * one.groups.num) * dim for one in heads]
            width, self._runs = sum(own), [[(sum(own[:rank]), num)] for rank, num in enumerate(own)]
        self._by_rank, self._widths = by_rank, [one.heads.num * dim for one in heads]
        (self._own_heads,) = heads[group.rank].heads.runs
        self._sinks: dict[int, torch.Tensor] = {}
        self._by_kernel = None
        if isinstance(group, SharedGroup):
            runs, sizes = self._runs[group.rank], [config.hidden_size] * group.size
            self._by_kernel = (
                Exchange(group.address, group.rank, runs, self._widths, width),
                Exchange(group.address, group.rank, runs, self._widths, sum(self._widths)),
                Exchange(
                    group.address, group.rank, [(0, config.hidden_size)], sizes, config.hidden_size
                ),
            )

    def own(self, x_TH: torch.Tensor) -> torch.Tensor:
        if native.lib is not None:
            return native.lib.own_rows(x_TH, self._shard.rank, self._shard.size)
        rows = self._shard.range(x_TH.shape[0])
        return x_TH[rows.start : rows.stop].clone()

    def gather(self, x_RH: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The rows of all ranks."""
        if self._by_kernel is not None:
            return self._to_columns(self._by_kernel[2], x_RH, num_rows)
        return self._group.all_gather(x_RH, 0, [len(one) for one in self._rows(num_rows)])

    def to_heads(self, qkv_RC: torch.Tensor, num_rows: int) -> torch.Tensor:
        """From own rows of all heads to all rows of own heads."""
        if self._by_kernel is not None:
            return self._to_columns(self._by_kernel[0], qkv_RC, num_rows)
        parts = [
            torch.cat([qkv_RC[:, first : first + num] for first, num in runs], 1).reshape(-1, 1)
            for runs in self._runs
        ]
        width = sum(num for _, num in self._runs[self._shard.rank])
        came = self._group.all_to_all(parts, [len(rows) * width for rows in self._rows(num_rows)])
        return torch.cat([part.view(-1, width) for part in came])

    def to_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        """From all rows of own heads to own rows of all heads."""
        if self._by_kernel is not None:
            assert native.lib is not None
            failed, made = native.lib.to_rows(
                self._by_kernel[1], x_TC, self._shard.rank, self._shard.size
            )
            native.check_group(failed)
            return made
        rows = self._rows(x_TC.shape[0])
        own = len(rows[self._shard.rank])
        parts = [x_TC[one.start : one.stop].reshape(-1, 1) for one in rows]
        came = self._group.all_to_all(parts, [own * width for width in self._widths])
        return torch.cat(
            [part.view(own, width) for part, width in zip(came, self._widths, strict=True)], 1
        )

    def _to_columns(self, exchange: Exchange, x_RN: torch.Tensor, num_rows: int) -> torch.Tensor:
        assert native.lib is not None
        failed, made = native.lib.to_columns(exchange, x_RN, num_rows)
        native.check_group(failed)
        return made

    def _rows(self, num_rows: int) -> list[range]:
        return [Shard(rank, self._shard.size).range(num_rows) for rank in range(self._shard.size)]

    def own_heads(self, layer: int, learned: HeadWeights) -> HeadWeights:
        if learned.sinks is None or self._by_rank:
            return learned
        if layer not in self._sinks:
            self._sinks[layer] = learned.sinks[self._own_heads.start : self._own_heads.stop].clone()
        return replace(learned, sinks=self._sinks[layer])


@dataclass(slots=True)
class RowStep:
    """A step of which this rank computes some rows."""

    split: RowSplit
    whole: AttentionStep
    num_rows: int

    def attend(self, layer: int, qkv_RC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        qkv_TC = self.split.to_heads(qkv_RC.contiguous(), self.num_rows)
        return self.split.to_rows(
            self.whole.attend(layer, qkv_TC, self.split.own_heads(layer, learned))
        )


def can_split(config: ModelConfig) -> bool:
    """Tells if rows have nothing but attention to do with each other, which is the same in all
    layers."""
    is_same = config.has_equal_parts and all(spec.reads is None for spec in config.layers)
    return is_same and all(spec.num_exchanged for spec in config.layers)
