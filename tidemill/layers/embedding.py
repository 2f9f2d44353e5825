"""The table from token ids to vectors, and the head that is the same table used the other way. Of
several ranks, each has some rows: a look-up adds up what they have, which is zeros on all but one,
and logits are gathered."""

from __future__ import annotations

import torch
from torch import nn

from tidemill.distributed.cuts import Size, even
from tidemill.distributed.group import group_of
from tidemill.distributed.shard import Shard
from tidemill.kernels.linear import Weight
from tidemill.layers.linear import Linear
from tidemill.quant import PLAIN, WeightPlan


class Table:
    """The part of a table's rows that is here."""

    def __init__(self, num: int, shard: Shard) -> None:
        self.own, self.group = shard.range(num), group_of(shard)
        self.sizes = [len(Shard(rank, shard.size).range(num)) for rank in range(shard.size)]

    def look_up(self, weight: Weight, ids_T: torch.Tensor) -> torch.Tensor:
        if len(self.sizes) == 1:
            return weight.rows(ids_T)
        is_here = (ids_T >= self.own.start) & (ids_T < self.own.stop)
        rows_TH = weight.rows((ids_T - self.own.start).clamp(0, len(self.own) - 1))
        return self.group.all_reduce(rows_TH.masked_fill_(~is_here[:, None], 0.0))

    def logits(self, weight: Weight, x_TH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if len(self.sizes) == 1:
            return weight.logits(x_TH, out)
        gathered = self.group.all_gather(weight.logits(x_TH), 1, self.sizes)
        return gathered if out is None else out.copy_(gathered)


def _rows(num: int, shard: Shard) -> Size:
    return num if shard.size == 1 else even(num, shard)


class Embedding(Linear):
    """Rows of a weight, stored as any linear's."""

    def __init__(self, num_tokens: int, size: int, weights: WeightPlan = PLAIN) -> None:
        weights = weights.of_tables
        super().__init__(size, {"weight": _rows(num_tokens, weights.shard)}, weights=weights)
        self.table = Table(num_tokens, weights.shard)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.table.look_up(self.weight, ids_T)


class Head(Linear):
    """Logits from a table of its own."""

    def __init__(
        self, size: int, num_tokens: int, weights: WeightPlan = PLAIN, *, bias: bool = False
    ) -> None:
        weights = weights.of_tables
        super().__init__(
            size, {"head": _rows(num_tokens, weights.shard)}, bias=bias, weights=weights
        )
        self.table = Table(num_tokens, weights.shard)

    def forward(self, x_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.table.logits(self.weight, x_TH, out)


class TiedHead(nn.Module):
    """Logits from the embedding's own table: it is there once."""

    def __init__(self, table: Embedding) -> None:
        super().__init__()
        self._table = [table]  # in a list: it is the model's module, not this one's

    @property
    def weight(self) -> Weight:
        return self._table[0].weight

    def forward(self, x_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._table[0].table.logits(self.weight, x_TH, out)
