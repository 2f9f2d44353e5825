"""Matrices stored as two factors, as `tidemill prune --method svd` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

_A, _B = "low_rank_a", "low_rank_b"
_TYPES = ("F32", "F16", "BF16")


class LowRankTensor(PackedTensor):
    """b a, multiplied out when it is read."""

    def __init__(self, module: str, parts: dict[str, Stored], path: Path) -> None:
        lacks(module, parts, (_A, _B))
        self._a, self._b = parts[_A].check(_TYPES, (None, None)), parts[_B].check(_TYPES, (None, None))
        if self._a.shape[0] != self._b.shape[1]:
            shapes = f"{list(self._b.shape)} and {list(self._a.shape)}"
            raise CheckpointError(f"{path}: the factors of {module} have shapes {shapes}, which cannot be multiplied.")
        super().__init__(module, parts, (self._b.shape[0], self._a.shape[1]), self._a.dtype)

    def codes(self) -> Codes | None:
        return None

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self._b.read().float() @ self._a.read().float())


class LowRank(Scheme):
    parts = (_A, _B)

    def tensor(self, module: str, parts: dict[str, Stored]) -> WeightTensor | None:
        return LowRankTensor(module, parts, self.path)
