"""Matrices of which two of four values are zero, stored without them: values [out, in / 2], and a
bit for each value."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.weights.packed.base import PackedTensor, Stored, lacks


def _shape_part(stored: Stored) -> Stored:
    return stored.check(("I64",), (2, 1) if len(stored.shape) == 2 else (2,))


class Sparse24Tensor(PackedTensor):
    """sparse-24-bitmask of compressed-tensors: `compressed`, `bitmask` (the lowest bit first) and
    `shape`; with `weight_scale`, values are 8-bit codes or floats."""

    def __init__(self, module: str, parts: dict[str, Stored]) -> None:
        lacks(module, parts, ("compressed", "bitmask", "shape"))
        self._parts = parts
        num_out, width = (
            int(size) for size in _shape_part(parts["shape"]).read().flatten().tolist()
        )
        if not 0 < width < 2**31 or not 0 < num_out < 2**31 or width % 2:
            raise parts["shape"].broken(f"says {[num_out, width]}")
        self._values = parts["compressed"].check(
            ("F32", "F16", "BF16", "I8", "F8_E4M3"), (num_out, width // 2)
        )
        parts["bitmask"].check(("U8",), (num_out, -(-width // 8)))
        if "weight_scale" in parts and parts["weight_scale"].shape not in (
            (),
            (1,),
            (1, 1),
            (num_out, 1),
        ):
            raise parts["weight_scale"].broken("must be one number, or one for each row")
        super().__init__(
            module,
            parts,
            (num_out, width),
            "F16" if self._values.dtype in ("F16", "BF16") else "F32",
        )

    def codes(self) -> None:
        return None

    def read_into(self, out: torch.Tensor) -> None:
        num_out, width = self.shape
        mask = np.unpackbits(
            self._parts["bitmask"].read().numpy(), axis=1, count=width, bitorder="little"
        ).astype(bool)
        if not (mask.sum(1) == width // 2).all():
            raise self._parts["bitmask"].broken("does not mark half of each row")
        values = torch.zeros(num_out, width)
        values[torch.from_numpy(mask)] = self._values.read().float().flatten()
        if "weight_scale" in self._parts:
            values *= self._parts["weight_scale"].scales().reshape(-1, 1)
        out.copy_(values)
