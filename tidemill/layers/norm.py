"""RMSNorm with its learned scale; LayerNorm with scale and bias, or without."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from tidemill.distributed.cuts import Size, num_of, whole_of
from tidemill.kernels.handover import Handover
from tidemill.kernels.norm import add_layer_norm, add_rms_norm, post_norm
from tidemill.kernels.pending import Pending
from tidemill.layers.base import Layer
from tidemill.weights.checkpoint import WeightTensor

_LAYER_NORM = {"weight": "weight", "bias": "weight.bias"}  # and the parts that are stored


class RMSNorm(Layer):
    def __init__(self, size: Size, eps: float, scale: float = 1.0) -> None:
        """`scale`: of what `add` adds."""
        super().__init__({"weight": (whole_of(size),)}, cuts={"weight": (size, 0)})
        self.weight = nn.Parameter(torch.empty(num_of(size)), requires_grad=False)
        self.eps, self._scale = eps, scale
        self.handover: Handover | None = None  # to the linear behind it
        self.is_alone: Callable[[], bool] | None = (
            None  # whether nothing but that linear sees the result
        )

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(None, x_TH, self.weight, self.eps)

    def add(self, x_TH: Pending | None, residual_TH: torch.Tensor) -> torch.Tensor:
        """Adds x, if any, to the residual in place and returns the norm of the sum."""
        alone = self.is_alone is not None and self.is_alone()
        return add_rms_norm(
            x_TH, residual_TH, self.weight, self.eps, self._scale, self.handover, alone
        )

    def added_to(self, residual_TH: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """The sum of the residual and the norm of x."""
        return post_norm(x_TH, residual_TH, self.weight, self.eps)


class LayerNorm(Layer):
    def __init__(
        self, size: int, eps: float, learned: Collection[str] = ("weight", "bias")
    ) -> None:
        """`learned`: what is stored; else weights are 1, and biases 0."""
        super().__init__({part: (size,) for name, part in _LAYER_NORM.items() if name in learned})
        devices = {
            name: None if name in learned else "cpu" for name in _LAYER_NORM
        }  # nothing is loaded there
        self.weight = nn.Parameter(torch.ones(size, device=devices["weight"]), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size, device=devices["bias"]), requires_grad=False)
        self.eps = eps

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = torch.empty(self.parts[part], dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        setattr(self, part.rpartition(".")[2], nn.Parameter(value, requires_grad=False))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return add_layer_norm(None, x_TH, self.weight, self.bias, self.eps)

    def add(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        """Adds x, if any, to the residual in place and returns the norm of the sum."""
        return add_layer_norm(x_TH, residual_TH, self.weight, self.bias, self.eps)
