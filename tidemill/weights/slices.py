"""Some rows or columns of stored tensors. What a format can read by itself it slices; the rest is
read whole and cut here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tidemill.kernels.quantized_linear import Codes, concat

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

_PIECE_BYTES = 2**18


class Inner:
    """Neighbouring rows (`dim` 0) or columns (1) of a tensor that is read whole: of blocks that a
    cut goes through, or of a format that cannot be read in parts."""

    reads_rows = False

    def __init__(self, tensor: WeightTensor, dim: int, begin: int, end: int) -> None:
        self._tensor, self._dim, self._begin, self._end = tensor, dim, begin, end
        self.name, self.type_name, self.num_bytes = tensor.name, tensor.type_name, tensor.num_bytes
        self.shape = (*tensor.shape[:dim], end - begin, *tensor.shape[dim + 1 :])

    def read_into(self, out: torch.Tensor) -> None:
        whole = torch.empty(self._tensor.shape, dtype=out.dtype, device=out.device)
        self._tensor.read_into(whole)
        out.copy_(whole.narrow(self._dim, self._begin, self._end - self._begin))

    def codes(self) -> Codes | None:
        """None where columns go through a group of codes: those are read as plain numbers."""
        codes = self._tensor.codes()
        if codes is None:
            return None
        return (
            codes.columns(self._begin, self._end)
            if self._dim
            else codes.take(torch.arange(self._begin, self._end))
        )

    def matrix(self, number: int) -> WeightTensor:
        raise AssertionError("a part of a matrix is no stack of them")

    def rows(self, begin: int, end: int) -> WeightTensor:
        if self._dim == 0:
            return Inner(self._tensor, 0, self._begin + begin, self._begin + end)
        return Inner(self._tensor.rows(begin, end), self._dim, self._begin, self._end)

    def columns(self, begin: int, end: int) -> WeightTensor:
        if self._dim == 1:
            return Inner(self._tensor, 1, self._begin + begin, self._begin + end)
        return Inner(self._tensor.columns(begin, end), self._dim, self._begin, self._end)


class NoRows:
    """None of the rows of a tensor."""

    num_bytes = 0
    reads_rows = False

    def __init__(self, tensor: WeightTensor) -> None:
        self.name, self.type_name, self.shape = (
            tensor.name,
            tensor.type_name,
            (0, *tensor.shape[1:]),
        )

    def read_into(self, out: torch.Tensor) -> None:
        return

    def codes(self) -> Codes | None:
        return None

    def matrix(self, number: int) -> WeightTensor:
        raise AssertionError("no rows are no stack of matrices")

    def rows(self, begin: int, end: int) -> WeightTensor:
        return self

    def columns(self, begin: int, end: int) -> WeightTensor:
        return self


class Below:
    """Tensors one below the other."""

    reads_rows = False

    def __init__(self, parts: list[WeightTensor]) -> None:
        first, self._parts = parts[0], parts
        self.name, self.type_name = first.name, first.type_name
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.shape = (sum(part.shape[0] for part in parts), *first.shape[1:])

    def read_into(self, out: torch.Tensor) -> None:
        begin = 0
        for part in self._parts:
            part.read_into(out[begin : begin + part.shape[0]])
            begin += part.shape[0]

    def codes(self) -> Codes | None:
        codes = [part.codes() for part in self._parts]
        return (
            None
            if any(one is None for one in codes)
            else concat([one for one in codes if one is not None])
        )

    def matrix(self, number: int) -> WeightTensor:
        raise AssertionError("rows of a matrix are no stack of them")

    def rows(self, begin: int, end: int) -> WeightTensor:
        return Inner(self, 0, begin, end)

    def columns(self, begin: int, end: int) -> WeightTensor:
        return Below([part.columns(begin, end) for part in self._parts])


def pieces(tensor: WeightTensor) -> list[WeightTensor]:
    """The tensor as neighbouring rows of a few bytes each, one after the other; in one piece, if
    its format is read whole."""
    if not tensor.reads_rows or not tensor.num_bytes:
        return [tensor]
    num = max(8, _PIECE_BYTES * tensor.shape[0] // tensor.num_bytes // 8 * 8)
    return [
        tensor.rows(begin, min(begin + num, tensor.shape[0]))
        for begin in range(0, tensor.shape[0], num)
    ]


def take_rows(tensor: WeightTensor, rows: torch.Tensor) -> tuple[WeightTensor, torch.Tensor | None]:
    """A tensor of just these rows, each read once, and how they must then be ordered; None: as they
    are."""
    wanted, order = torch.unique(rows, return_inverse=True)
    ends = (
        torch.cat([wanted.diff() != 1, torch.ones(1, dtype=torch.bool)])
        .nonzero()
        .flatten()
        .tolist()
    )
    begins = [0, *(end + 1 for end in ends[:-1])]
    first = wanted.tolist()
    runs = [
        tensor.rows(first[begin], first[end] + 1) for begin, end in zip(begins, ends, strict=True)
    ]
    is_sorted = torch.equal(order, torch.arange(order.numel()))
    return runs[0] if len(runs) == 1 else Below(runs), None if is_sorted else order
