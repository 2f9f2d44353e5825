"""The table from token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn

from tidemill.layers.base import Layer


class Embedding(Layer):
    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__({"weight": (num_tokens, size)})
        self.weight = nn.Parameter(torch.empty(num_tokens, size), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids_T)
