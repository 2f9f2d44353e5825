"""The interface between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tidemill.kernels.glu import glu
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

Part = TypeVar("Part")


@dataclass(slots=True)
class ExpertStacks:
    """The destination of the matrices of a layer's experts as they are read, so that they are never
    there twice."""

    gate_up_E2IH: torch.Tensor  # rows of gate first
    down_EHI: torch.Tensor

    def read(
        self, side: str, expert: int, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> None:
        """`side`: gate, up, gate_up or down."""
        size = self.down_EHI.shape[2]
        rows = {"gate": slice(0, size), "up": slice(size, None)}.get(side, slice(None))
        place = (self.down_EHI if side == "down" else self.gate_up_E2IH)[expert, rows]
        if row_order is None:
            tensor.read_into(place)
            return
        stored = torch.empty_like(place)
        tensor.read_into(stored)
        place.copy_(stored[row_order.to(place.device)])


class LinearRows(ABC):
    """The destination of the matrices of a linear layer as they are read, one below the other, so
    that they are never there twice."""

    @abstractmethod
    def read(self, name: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        """One of them, its rows reordered if an order is given."""

    @abstractmethod
    def weight(self, bias: torch.Tensor | None) -> Weight:
        """All have been read."""


@dataclass(slots=True)
class ExpertParts(Generic[Part]):
    """The matrices of a layer's experts, as they were read. `stacks`: has them all but the shared
    expert's, if it is there. `first`: the number of the first, where some of the spec's experts are
    on other ranks."""

    gate_ups: list[list[Part]]  # of each expert, gate and up, or both as one; one below the other
    downs: list[Part]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 I]
    down_bias: torch.Tensor | None = None  # [E, H]
    shared: tuple[list[Part], Part] | None = None  # of the shared expert, the same
    stacks: ExpertStacks | None = None
    first: int = 0


class LinearMethod(ABC, Generic[Part]):
    """The method that turns stored matrices into a weight: each is read as it streams by, then
    those that are fused by rows are joined."""

    def __init__(self, fast: bool = False) -> None:
        """`fast`: sums may run in an order that depends on the number of rows."""
        self._fast = fast

    @abstractmethod
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Part:
        """One stored matrix, its rows reordered if an order is given."""

    @abstractmethod
    def join(self, parts: list[Part], bias: torch.Tensor | None) -> Weight:
        """All of them, one below the other, laid out for a kernel."""

    def join_gated(self, gate: Part, up: Part, bias: torch.Tensor | None, act: str) -> Weight:
        """The two, laid out for a matmul that gives act(gate) * up. `act`: a name in
        `glu.ACTIVATIONS`."""
        return Gated(self.join([gate, up], bias), act)

    def new_rows(self, nums_out: Mapping[str, int], num_in: int) -> LinearRows | None:
        """The rows for a layer of these matrices, if that is where they are to be read."""
        return None

    def new_stacks(self, spec: MoESpec, hidden_size: int) -> ExpertStacks | None:
        """If that is where experts are to be read."""
        return None

    @abstractmethod
    def join_experts(self, parts: ExpertParts[Part], spec: MoESpec) -> ExpertWeights:
        """All experts of a layer, laid out for a kernel."""


class OfAFeedForward(LinearMethod[torch.Tensor]):
    """Reads as another method does. Of a layer whose neurons are computed in another way, and that
    has no experts."""

    def __init__(self, inner: LinearMethod[torch.Tensor]) -> None:
        super().__init__()
        self._inner = inner

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        return self._inner.read(tensor, row_order)

    def join_experts(self, parts: ExpertParts[torch.Tensor], spec: MoESpec) -> ExpertWeights:
        raise AssertionError("a feed-forward without experts")


class Gated(Weight):
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

    @property
    def ungated(self) -> Weight:
        return self._both
