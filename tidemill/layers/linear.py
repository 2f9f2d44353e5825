"""Linear: one matrix product, possibly of several stored matrices fused by rows (q, k, v; gate, up)."""

from __future__ import annotations

import torch

from tidemill.layers.base import Layer
from tidemill.quant import METHODS
from tidemill.weights.checkpoint import WeightTensor


class Linear(Layer):
    def __init__(self, num_in: int, outs: dict[str, int], *, bias: bool = False, dtype: str = "float32") -> None:
        """`outs`: stored matrices by name, with their output features, in the order in which they are fused."""
        parts: dict[str, tuple[int, ...]] = {name: (num_out, num_in) for name, num_out in outs.items()}
        if bias:
            parts |= {f"{name}.bias": (num_out,) for name, num_out in outs.items()}
        super().__init__(parts)
        self._first_row: dict[str, int] = {}
        num_rows = 0
        for name, num_out in outs.items():
            self._first_row[name] = num_rows
            num_rows += num_out
        self._bias: torch.Tensor | None = torch.empty(num_rows, device="cpu") if bias else None
        self._method = METHODS[dtype](num_rows, num_in)

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        name, _, is_bias = part.partition(".")
        first = self._first_row[name]
        if is_bias:
            assert self._bias is not None
            rows = self._bias[first : first + tensor.shape[0]]
            tensor.read_into(rows)
            if row_order is not None:
                rows.copy_(rows[row_order])
        else:
            self._method.load(first, tensor, row_order)

    def finish(self) -> None:
        self._method.finish(self._bias)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._method.apply(x_TK)
