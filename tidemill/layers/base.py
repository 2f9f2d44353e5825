"""Layer: a module that takes its stored tensors one by one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from tidemill.distributed.cuts import Cut, Size
from tidemill.errors import CheckpointError
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.slices import NoRows, take_rows


class Layer(nn.Module):
    """`load` takes a tensor for one named part; when the last one is there, `finish` lays the layer
    out for its kernel."""

    def __init__(
        self,
        parts: dict[str, tuple[int, ...]],
        optional: bool = False,
        cuts: Mapping[str, tuple[Size, Size]] = MappingProxyType({}),
    ) -> None:
        """`cuts`: of parts of which this rank has some rows or columns."""
        super().__init__()
        self.parts = parts  # name to expected shape
        self.optional = optional
        self.num_bytes = 0  # of the checkpoint, read so far
        self._cuts = {
            part: (
                rows if isinstance(rows, Cut) else None,
                columns if isinstance(columns, Cut) else None,
            )
            for part, (rows, columns) in cuts.items()
        }
        self._loaded: set[str] = set()

    @property
    def missing(self) -> set[str]:
        """Parts that must still come."""
        return set() if self.optional else set(self.parts) - self._loaded

    def lacks(self, part: str) -> bool:
        return part in self.missing

    def load(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None = None) -> None:
        self.check_shape(part, tensor)
        if part in self._loaded:
            raise CheckpointError(f"Tensor {tensor.name} stands in the checkpoint twice.")
        self.take(part, *self.own(part, tensor, row_order))
        self._loaded.add(part)
        if self.is_complete():
            self.finish()

    def check_shape(self, part: str, tensor: WeightTensor) -> None:
        if not self.fits(part, tuple(tensor.shape)):
            asked = list(self.parts[part])
            raise CheckpointError(
                f"Tensor {tensor.name} has shape {list(tensor.shape)}; the model's configuration asks for {asked}."
            )

    def own(
        self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> tuple[WeightTensor, torch.Tensor | None]:
        """The part of a stored tensor that this rank has, and the order of its rows."""
        rows, columns = self._cuts.get(part, (None, None))
        if columns is not None:
            tensor = columns_of(tensor, columns)
        if rows is not None:
            tensor, row_order = rows_of(tensor, rows, row_order)
        elif row_order is not None and row_order.numel() < tensor.shape[0]:
            tensor, row_order = take_rows(tensor, row_order)
        self.num_bytes += tensor.num_bytes
        return tensor, row_order

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """Tells if a stored tensor of this shape can be the part."""
        return shape == self.parts[part]

    def is_complete(self) -> bool:
        return self._loaded == set(self.parts)

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        """Default: a parameter of that name, on the meta device until now."""
        setattr(self, part, nn.Parameter(read_values(tensor, row_order), requires_grad=False))

    def finish(self) -> None:
        """All parts are there."""


def rows_of(
    tensor: WeightTensor, cut: Cut, row_order: torch.Tensor | None
) -> tuple[WeightTensor, torch.Tensor | None]:
    """The rows of a rank, in the model's order; and the order that what is read must have."""
    if not cut.num:
        return NoRows(tensor), None
    own = torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in cut.runs])
    return take_rows(tensor, own if row_order is None else row_order[own])


def columns_of(tensor: WeightTensor, cut: Cut) -> WeightTensor:
    (run,) = cut.runs
    return tensor if cut.is_whole else tensor.columns(run.start, run.stop)


def read_values(tensor: WeightTensor, row_order: torch.Tensor | None = None) -> torch.Tensor:
    """Reads the values as float32."""
    values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    tensor.read_into(values)
    return values if row_order is None else values[row_order]
