"""Stored tensors seen differently: under another name, transposed, or cut by rows."""

from __future__ import annotations

import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.slices import take_rows


class View:
    """The same tensor under another name. If it is stored as plain numbers: `transposed`, or with
    its `rows` in this order."""

    def __init__(
        self,
        tensor: WeightTensor,
        name: str,
        transposed: bool = False,
        rows: torch.Tensor | None = None,
    ) -> None:
        self._source, self._transposed, self._rows = tensor, transposed, rows
        self._tensor, self._order = (tensor, None) if rows is None else take_rows(tensor, rows)
        self.name, self.type_name, self.num_bytes = name, tensor.type_name, self._tensor.num_bytes
        self.reads_rows = tensor.reads_rows and not transposed and rows is None
        self.shape = (
            tensor.shape[::-1]
            if transposed
            else tensor.shape
            if rows is None
            else (rows.numel(), *tensor.shape[1:])
        )

    def read_into(self, out: torch.Tensor) -> None:
        is_plain = not self._transposed and self._order is None
        stored = (
            out if is_plain else torch.empty(self._tensor.shape, dtype=out.dtype, device=out.device)
        )
        self._tensor.read_into(stored)
        if self._transposed:
            out.copy_(stored.t())
        elif self._order is not None:
            out.copy_(stored[self._order.to(out.device)])

    def codes(self) -> Codes | None:
        codes = None if self._transposed else self._tensor.codes()
        return codes if codes is None or self._order is None else codes.take(self._order)

    def matrix(self, number: int) -> View:
        return View(self._source.matrix(number), self.name, self._transposed)

    def rows(self, begin: int, end: int) -> View:
        if self._transposed:
            return View(self._source.columns(begin, end), self.name, True)
        if self._rows is None:
            return View(self._source.rows(begin, end), self.name)
        return View(self._source, self.name, rows=self._rows[begin:end])

    def columns(self, begin: int, end: int) -> View:
        if self._transposed:
            return View(self._source.rows(begin, end), self.name, True)
        return View(self._source.columns(begin, end), self.name, rows=self._rows)


def joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of tensors one below the other."""
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def cut(tensor: WeightTensor, shapes: list[tuple[int, ...]]) -> list[WeightTensor]:
    """The tensor's rows, shared out among pieces of these shapes. Where each has the shape of the
    whole, each takes the rows it wants."""
    if len(shapes) == 1 or all(shape == tuple(tensor.shape) for shape in shapes):
        return [tensor] * len(shapes)
    if tuple(tensor.shape) != joined(shapes):
        raise CheckpointError(
            f"Tensor {tensor.name} has shape {list(tensor.shape)}; the model's configuration asks for {list(joined(shapes))}."
        )
    begin, pieces = 0, list[WeightTensor]()
    for shape in shapes:
        pieces.append(tensor.rows(begin, begin + shape[0]))
        begin += shape[0]
    return pieces
