"""GOBO: every value is one of a few centroids of its matrix, but for outliers, which are stored as
they are.

`weight_packed`: numbers of centroids as a stream of bits for each row; `weight_shape`;
`weight_centroids` [2 ** bits]; `weight_outliers` and `weight_places`, where row * width +
column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.kernels.quantized_linear import Codes, Outliers
from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks, unpack

_FLOATS = ("F32", "F16", "BF16")


class CentroidTensor(PackedTensor):
    def __init__(self, module: str, parts: dict[str, Stored], bits: int) -> None:
        lacks(module, parts, ("weight_packed", "weight_shape", "weight_centroids"))
        self._has_outliers = "weight_outliers" in parts or "weight_places" in parts
        if self._has_outliers:
            lacks(module, parts, ("weight_outliers", "weight_places"))
        self._parts, self._bits = parts, bits
        num_out, width = (
            int(size) for size in parts["weight_shape"].check(("I64", "I32"), (2,)).read().tolist()
        )
        if not 0 < width < 2**31 or not 0 < num_out < 2**31:
            raise parts["weight_shape"].broken(f"says {[num_out, width]}")
        parts["weight_packed"].check(("I32",), (num_out, -(-width * bits // 32)))
        parts["weight_centroids"].check(_FLOATS, (2**bits,))
        if self._has_outliers and (
            parts["weight_outliers"].dtype not in _FLOATS
            or parts["weight_places"].dtype not in ("I32", "I64")
        ):
            raise parts["weight_places"].broken("or the outliers have types that cannot be read")
        if self._has_outliers and (
            parts["weight_outliers"].shape != parts["weight_places"].shape
            or len(parts["weight_places"].shape) != 1
        ):
            raise parts["weight_places"].broken("does not have a place for each outlier")
        super().__init__(module, parts, (num_out, width), f"CENTROIDS{4 if bits <= 4 else 8}")

    def codes(self) -> Codes:
        num_out, width = self.shape
        numbers = unpack(self._parts["weight_packed"].read(), self._bits, width)
        table = torch.zeros(16)
        table[: 2**self._bits] = self._parts["weight_centroids"].scales()
        codes = torch.from_numpy(np.ascontiguousarray(numbers)).view(torch.int8)
        return Codes(
            4,
            codes,
            torch.ones(num_out, 1),
            None,
            group=width,
            table=table,
            outliers=self._outliers(table[codes.int()]),
        )

    def _outliers(self, values_NK: torch.Tensor) -> Outliers | None:
        if not self._has_outliers or self._parts["weight_places"].shape == (0,):
            return None
        stored = self._parts["weight_places"]
        places, order = stored.check(("I32", "I64")).read().long().sort()
        if places[0] < 0 or places[-1] >= values_NK.numel() or bool((places.diff() == 0).any()):
            raise stored.broken("has places outside the matrix, or one twice")
        return Outliers(
            places, self._parts["weight_outliers"].scales()[order] - values_NK.view(-1)[places]
        )


class GOBO(Scheme):
    parts = (
        "weight_packed",
        "weight_shape",
        "weight_centroids",
        "weight_outliers",
        "weight_places",
    )

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        self._bits = self.number(settings, "bits")
        if not 1 <= self._bits <= 4:
            raise self.refuse(f"GOBO of {self._bits} bits cannot be read", "1 to 4 bits can.")

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor:
        return CentroidTensor(module, parts, self._bits)
