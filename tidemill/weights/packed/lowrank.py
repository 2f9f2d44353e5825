"""Matrices stored as two factors, as `tidemill prune --method svd` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.low_rank import Factors
from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

_A, _B = "low_rank_a", "low_rank_b"
_TYPES = ("F32", "F16", "BF16")


class LowRankTensor(PackedTensor):
    """b a: as factors, or multiplied out when it is read. `rows` of b and `columns` of a: a part of
    it."""

    def __init__(
        self,
        module: str,
        parts: dict[str, Stored],
        path: Path,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        lacks(module, parts, (_A, _B))
        self._a, self._b = (
            parts[_A].check(_TYPES, (None, None)),
            parts[_B].check(_TYPES, (None, None)),
        )
        rank = self._a.shape[0]
        if rank != self._b.shape[1]:
            shapes = f"{list(self._b.shape)} and {list(self._a.shape)}"
            raise CheckpointError(
                f"{path}: the factors of {module} have shapes {shapes}, which cannot be multiplied."
            )
        if self._a.dtype != self._b.dtype:
            raise CheckpointError(
                f"{path}: the factors of {module} have types {self._b.dtype} and {self._a.dtype}."
            )
        self._module, self._parts, self._path, self._rows, self._columns = (
            module,
            parts,
            path,
            rows,
            columns,
        )
        shape = len(range(self._b.shape[0])[rows]), len(range(self._a.shape[1])[columns])
        num_values = rank * sum(shape)
        self.is_smaller = num_values < shape[0] * shape[1]
        kind = (
            f"{self._a.dtype}-L{num_values}/{shape[0] * shape[1]}"
            if self.is_smaller
            else self._a.dtype
        )
        super().__init__(module, parts, shape, kind)
        self.num_bytes = num_values * (4 if self._a.dtype == "F32" else 2)

    def codes(self) -> Codes | None:
        return None

    def factors(self) -> Factors:
        b, a = (
            self._b.view()[self._rows].contiguous(),
            self._a.view()[:, self._columns].contiguous(),
        )
        for stored, values in ((self._b, b), (self._a, a)):
            if not bool(values.isfinite().all()):
                raise stored.broken("holds values that are no finite numbers")
        return Factors(b, a)

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self.factors().product())

    def rows(self, begin: int, end: int) -> LowRankTensor:
        first = self._rows.start or 0
        return LowRankTensor(
            self._module, self._parts, self._path, slice(first + begin, first + end), self._columns
        )

    def columns(self, begin: int, end: int) -> LowRankTensor:
        first = self._columns.start or 0
        return LowRankTensor(
            self._module, self._parts, self._path, self._rows, slice(first + begin, first + end)
        )


class LowRank(Scheme):
    parts = (_A, _B)

    def tensor(self, module: str, parts: dict[str, Stored]) -> WeightTensor | None:
        return LowRankTensor(module, parts, self.path)
