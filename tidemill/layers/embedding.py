"""The table from token ids to vectors, and the head that is the same table used the other way."""

from __future__ import annotations

import torch
from torch import nn

from tidemill.kernels.linear import Weight
from tidemill.layers.linear import Linear
from tidemill.quant import PLAIN, WeightPlan


class Embedding(Linear):
    """Rows of a weight, stored as any linear's."""

    def __init__(self, num_tokens: int, size: int, weights: WeightPlan = PLAIN) -> None:
        super().__init__(size, {"weight": num_tokens}, weights=weights.of_tables)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.weight.rows(ids_T)


class Head(Linear):
    """Logits from a table of its own."""

    def __init__(self, size: int, num_tokens: int, weights: WeightPlan = PLAIN) -> None:
        super().__init__(size, {"head": num_tokens}, weights=weights.of_tables)

    def forward(self, x_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight.logits(x_TH, out)


class TiedHead(nn.Module):
    """Logits from the embedding's own table: it is there once."""

    def __init__(self, table: Embedding) -> None:
        super().__init__()
        self._table = [table]  # in a list: it is the model's module, not this one's

    @property
    def weight(self) -> Weight:
        return self._table[0].weight

    def forward(self, x_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight.logits(x_TH, out)
