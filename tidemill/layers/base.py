"""Layer: a module that takes its stored tensors one by one."""

from __future__ import annotations

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.weights.checkpoint import WeightTensor


class Layer(nn.Module):
    """`load` takes a tensor for one named part; when the last one is there, `finish` lays the layer out for its kernel."""

    def __init__(self, parts: dict[str, tuple[int, ...]], optional: bool = False) -> None:
        super().__init__()
        self.parts = parts  # name to expected shape
        self.optional = optional
        self._loaded: set[str] = set()

    @property
    def missing(self) -> set[str]:
        """Parts that must still come."""
        return set() if self.optional else set(self.parts) - self._loaded

    def lacks(self, part: str) -> bool:
        return part in self.missing

    def load(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None = None) -> None:
        expected = self.parts[part]
        if not self.fits(part, tuple(tensor.shape)):
            raise CheckpointError(
                f"Tensor {tensor.name} has shape {list(tensor.shape)}; the model's configuration asks for {list(expected)}."
            )
        if part in self._loaded:
            raise CheckpointError(f"Tensor {tensor.name} stands in the checkpoint twice.")
        self.take(part, tensor, row_order)
        self._loaded.add(part)
        if self.is_complete():
            self.finish()

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can be the part."""
        return shape == self.parts[part]

    def is_complete(self) -> bool:
        return self._loaded == set(self.parts)

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        """Default: a parameter of that name, on the meta device until now."""
        value = torch.empty(self.parts[part], dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        setattr(self, part, nn.Parameter(value, requires_grad=False))

    def finish(self) -> None:
        """All parts are there."""
