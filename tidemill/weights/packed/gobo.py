"""GOBO: each value is one of a few centroids of its matrix, except for outliers, which are stored as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks, unpack


class CentroidTensor(PackedTensor):
    """`weight_packed`: a stream of bits for each row; `weight_centroids` [2 ** bits]; `weight_outliers` and their places among all
    values, if there are any."""

    def __init__(self, module: str, parts: dict[str, Stored], bits: int) -> None:
        lacks(module, parts, ("weight_packed", "weight_shape", "weight_centroids"))
        self._parts, self._bits = parts, bits
        num_out, width = (int(size) for size in parts["weight_shape"].check(("I64",), (2,)).read().tolist())
        if not 0 < num_out < 2**31 or not 0 < width < 2**31:
            raise parts["weight_shape"].broken(f"says {[num_out, width]}")
        parts["weight_packed"].check(("I32",), (num_out, -(-width * bits // 32)))
        parts["weight_centroids"].check(("F32",), (2**bits,))
        if "weight_outliers" in parts or "weight_places" in parts:
            lacks(module, parts, ("weight_outliers", "weight_places"))
            (num,) = parts["weight_outliers"].check(("F32",), (None,)).shape
            parts["weight_places"].check(("I32",), (num,))
        super().__init__(module, parts, (num_out, width), "F32")

    def codes(self) -> None:
        return None

    def read_into(self, out: torch.Tensor) -> None:
        codes = torch.from_numpy(unpack(self._parts["weight_packed"].read(), self._bits, self.shape[1]))
        values = self._parts["weight_centroids"].scales()[codes.long()]
        if "weight_outliers" in self._parts:
            places = self._parts["weight_places"].read().long()
            if int(places.min()) < 0 or int(places.max()) >= values.numel():
                raise self._parts["weight_places"].broken("names places outside of the matrix")
            values.view(-1)[places] = self._parts["weight_outliers"].scales()
        out.copy_(values)


class GOBO(Scheme):
    parts = ("weight_packed", "weight_shape", "weight_centroids", "weight_outliers", "weight_places")

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        self._bits = self.number(settings, "bits")
        if not 1 <= self._bits <= 8:
            raise self.refuse(f"GOBO of {self._bits} bits cannot be read", "1 to 8 bits can.")

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor:
        return CentroidTensor(module, parts, self._bits)
