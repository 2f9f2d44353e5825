"""The interface between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tidemill.config import MoESpec
from tidemill.kernels.glu import glu
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.weights.checkpoint import WeightTensor

Part = TypeVar("Part")


@dataclass(slots=True)
class ExpertParts(Generic[Part]):
    """The matrices of a layer's experts, as they were read."""

    gate_ups: list[list[Part]]  # of each expert, gate and up, or both as one; one below the other
    downs: list[Part]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 I]
    down_bias: torch.Tensor | None = None  # [E, H]
    shared: tuple[list[Part], Part] | None = None  # of the shared expert, the same


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

    @abstractmethod
    def join_experts(self, parts: ExpertParts[Part], spec: MoESpec) -> ExpertWeights:
        """All experts of a layer, laid out for a kernel."""


class _Gated(Weight):
    """The fused matmul, then its gate."""

    def __init__(self, both: Weight, act: str) -> None:
        self._both, self._act = both, act

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return glu(self._both(x_TK), self._act)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._both.rows(ids_T)
