"""The interface between a linear layer and the format of its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from tidemill.weights.checkpoint import WeightTensor


class LinearMethod(ABC):
    """Stores a weight [out, in], filled part by part as tensors stream in, and multiplies by it."""

    def __init__(self, num_out: int, num_in: int) -> None:
        self.num_out = num_out
        self.num_in = num_in

    @abstractmethod
    def load(self, first_row: int, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        """Rows first_row .. are `tensor`, reordered by `row_order` if given."""

    @abstractmethod
    def finish(self, bias: torch.Tensor | None) -> None:
        """All rows are there: bring the weight into the form it is used in."""

    @abstractmethod
    def apply(self, x_TK: torch.Tensor) -> torch.Tensor: ...
