"""Plain float32 weights, packed for a row-invariant product."""

from __future__ import annotations

import torch

from tidemill.kernels.linear import LinearFn, pack_linear
from tidemill.quant.base import LinearMethod
from tidemill.weights.checkpoint import WeightTensor


class Dense(LinearMethod):
    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__(num_out, num_in)
        self._weight: torch.Tensor | None = None  # while loading
        self._apply: LinearFn | None = None

    def load(self, first_row: int, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        if self._weight is None:
            self._weight = torch.empty(self.num_out, self.num_in)
        rows = self._weight[first_row : first_row + tensor.shape[0]]
        tensor.read_into(rows)
        if row_order is not None:
            rows.copy_(rows[row_order])

    def finish(self, bias: torch.Tensor | None) -> None:
        assert self._weight is not None
        self._apply = pack_linear(self._weight, bias)
        self._weight = None

    def apply(self, x_TK: torch.Tensor) -> torch.Tensor:
        assert self._apply is not None
        return self._apply(x_TK)
