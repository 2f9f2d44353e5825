"""The interface between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from tidemill.kernels.glu import glu
from tidemill.kernels.linear import Weight
from tidemill.weights.checkpoint import WeightTensor

Part = TypeVar("Part")


class LinearMethod(ABC, Generic[Part]):
    """How stored matrices become a weight: each is read as it streams by, then those that are fused by rows are joined."""

    @abstractmethod
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Part:
        """One stored matrix, its rows reordered if an order is given."""

    @abstractmethod
    def join(self, parts: list[Part], bias: torch.Tensor | None) -> Weight:
        """All of them, one below the other, laid out for a kernel."""

    def join_gated(self, gate: Part, up: Part, bias: torch.Tensor | None, act: str) -> Weight:
        """The two, laid out for a matmul that gives act(gate) * up. `act`: a name in `glu.ACTIVATIONS`."""
        return _Gated(self.join([gate, up], bias), act)


class _Gated(Weight):
    """The fused matmul, then its gate."""

    def __init__(self, both: Weight, act: str) -> None:
        self._both, self._act = both, act

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.activate(self.matmul(x_TK))

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._both(x_TK)

    def activate(self, y_TN: torch.Tensor) -> torch.Tensor:
        return glu(y_TN, self._act)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._both.rows(ids_T)
