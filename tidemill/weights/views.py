"""Stored tensors seen differently: under another name, transposed, or cut by rows."""

from __future__ import annotations

import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.checkpoint import WeightTensor


class View:
    """The same tensor under another name. If it is stored as plain numbers: `transposed`, or with its `rows` in this order."""

    def __init__(self, tensor: WeightTensor, name: str, transposed: bool = False, rows: torch.Tensor | None = None) -> None:
        self._tensor, self._transposed, self._rows = tensor, transposed, rows
        self.name, self.type_name, self.num_bytes = name, tensor.type_name, tensor.num_bytes
        self.shape = tensor.shape[::-1] if transposed else tensor.shape

    def read_into(self, out: torch.Tensor) -> None:
        is_plain = not self._transposed and self._rows is None
        stored = out if is_plain else torch.empty(self._tensor.shape, dtype=out.dtype, device=out.device)
        self._tensor.read_into(stored)
        if self._transposed:
            out.copy_(stored.t())
        elif self._rows is not None:
            out.copy_(stored[self._rows.to(out.device)])

    def codes(self) -> Codes | None:
        return self._tensor.codes()

    def matrix(self, number: int) -> View:
        return View(self._tensor.matrix(number), self.name, self._transposed)


class _Whole:
    """A tensor that is read once for all its pieces, which keep it alive."""

    def __init__(self, tensor: WeightTensor) -> None:
        self.tensor = tensor
        self._read: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._codes: list[Codes | None] = []

    def values(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if (dtype, device) not in self._read:
            self._read[dtype, device] = torch.empty(self.tensor.shape, dtype=dtype, device=device)
            self.tensor.read_into(self._read[dtype, device])
        return self._read[dtype, device]

    def codes(self) -> Codes | None:
        if not self._codes:
            self._codes.append(self.tensor.codes())
        return self._codes[0]


class _Piece:
    def __init__(self, whole: _Whole, begin: int, shape: tuple[int, ...]) -> None:
        self._whole, self._rows, self.shape = whole, slice(begin, begin + shape[0]), shape
        self.name, self.type_name = whole.tensor.name, whole.tensor.type_name
        self.num_bytes = whole.tensor.num_bytes * shape[0] // whole.tensor.shape[0]

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self._whole.values(out.dtype, out.device)[self._rows])

    def codes(self) -> Codes | None:
        codes = self._whole.codes()
        return None if codes is None else codes.take(torch.arange(self._rows.start, self._rows.stop, device="cpu"))

    def matrix(self, number: int) -> WeightTensor:
        raise AssertionError("a piece of a matrix is no stack of them")


def joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Of tensors one below the other."""
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def cut(tensor: WeightTensor, shapes: list[tuple[int, ...]]) -> list[WeightTensor]:
    """The tensor's rows, shared out among pieces of these shapes. Where each has the shape of the whole, each takes the rows it
    wants."""
    if len(shapes) == 1 or all(shape == tuple(tensor.shape) for shape in shapes):
        return [tensor] * len(shapes)
    if tuple(tensor.shape) != joined(shapes):
        raise CheckpointError(
            f"Tensor {tensor.name} has shape {list(tensor.shape)}; the model's configuration asks for {list(joined(shapes))}."
        )
    whole, begin, pieces = _Whole(tensor), 0, list[WeightTensor]()
    for shape in shapes:
        pieces.append(_Piece(whole, begin, shape))
        begin += shape[0]
    return pieces
