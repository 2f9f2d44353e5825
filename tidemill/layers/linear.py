"""Linear: one matmul, possibly of several stored matrices fused by rows (q, k, v; gate, up)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.lora import LinearLora
from tidemill.layers.base import Layer
from tidemill.quant import PLAIN, WeightPlan
from tidemill.weights.checkpoint import WeightTensor

if TYPE_CHECKING:
    from tidemill.layers.lora import Loras


class Linear(Layer):
    act = ""  # of a gated layer

    def __init__(
        self,
        num_in: int,
        outs: dict[str, int],
        *,
        bias: bool = False,
        weights: WeightPlan = PLAIN,
        stored: dict[str, int] | None = None,
    ) -> None:
        """`outs`: stored matrices by name, with their output features, in the order in which they are fused. `stored`: the rows
        of one of which the model's `row_order` takes only some."""
        parts: dict[str, tuple[int, ...]] = {name: ((stored or outs).get(name, num), num_in) for name, num in outs.items()}
        if bias:
            parts |= {f"{name}.bias": (num_out,) for name, num_out in outs.items()}
        super().__init__(parts)
        self.num_in, self.outs = num_in, outs
        self._names, self._has_bias, self._taken = list(outs), bias, outs
        self._method = weights.method
        self._read: dict[str, Any] = {}  # until all are there
        self._weight: Weight | None = None
        self.loras: Loras | None = None  # adapters of the model, and those of this layer
        self.lora: LinearLora | None = None

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """Some formats store by themselves the rows that others have among more."""
        name = part.partition(".")[0]
        return shape in (self.parts[part], (self._taken[name], *self.parts[part][1:]))

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        if part in self._names:
            self._read[part] = self._method.read(tensor, row_order)
            return
        rows = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.read_into(rows)
        self._read[part] = rows if row_order is None else rows[row_order]

    def finish(self) -> None:
        bias = torch.cat([self._read[f"{name}.bias"] for name in self._names]) if self._has_bias else None
        self._weight = self._join([self._read[name] for name in self._names], bias)
        self._read.clear()

    def _join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self._method.join(parts, bias)

    @property
    def weight(self) -> Weight:
        assert self._weight is not None
        return self._weight

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.loras is None or self.lora is None or not self.loras.is_on:
            return self.weight(x_TK)
        y_TN = self.weight.matmul(x_TK)
        activated = self.lora.add(x_TK, y_TN)
        return self.weight.activate(y_TN) if activated is None else activated


class GatedLinear(Linear):
    """act(gate) * up of two matmuls of the same input. `act`: a name in `glu.ACTIVATIONS`."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, weights: WeightPlan, act: str) -> None:
        super().__init__(num_in, {"gate": num_out, "up": num_out}, bias=bias, weights=weights)
        self.act = act

    def _join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        gate, up = parts
        return self._method.join_gated(gate, up, bias, self.act)
