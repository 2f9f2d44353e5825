"""BitNet b1.58: weights of -1, 0 and 1 with one scale, four to a byte along the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.kernels.quantized_linear import Activations, Codes
from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks


class TernaryTensor(PackedTensor):
    """`weight` uint8 [out / 4, in]: a quarter of the rows in each two bits. `is_inverse`: values
    are divided by the scale."""

    def __init__(self, module: str, parts: dict[str, Stored], is_inverse: bool) -> None:
        lacks(module, parts, ("weight", "weight_scale"))
        quarter, width = parts["weight"].check(("U8",), (None, None)).shape
        parts["weight_scale"].single()
        self._parts, self._is_inverse = parts, is_inverse
        super().__init__(module, parts, (quarter * 4, width), "TERNARY")

    def codes(self) -> Codes:
        scale = self._parts["weight_scale"].scales().flatten()
        if not scale.item() > 0:
            raise self._parts["weight_scale"].broken("must be above 0")
        raw = self._parts["weight"].read().numpy()
        numbers = np.concatenate([(raw >> shift) & 3 for shift in (0, 2, 4, 6)])
        if (numbers == 3).any():
            raise self._parts["weight"].broken("holds codes that are not ternary")
        scales = (1 / scale if self._is_inverse else scale).expand(self.shape[0], 1).contiguous()
        return Codes(
            2,
            torch.from_numpy(numbers).view(torch.int8) - 1,
            scales,
            None,
            group=self.shape[1],
            activations=Activations(),
        )


class BitNet(Scheme):
    parts = ("weight_scale", "weight")

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        kind, mode = (
            settings.get("linear_class", "bitlinear"),
            settings.get("quantization_mode", "offline"),
        )
        if kind not in ("bitlinear", "autobitlinear") or (
            kind == "autobitlinear" and mode != "offline"
        ):
            raise self.refuse(
                f"BitNet of {str(kind)[:50]!r}, {str(mode)[:50]!r} cannot be read",
                "Packed weights (offline) can.",
            )
        if settings.get("use_rms_norm"):
            raise self.refuse(
                "BitNet with norms within linears (use_rms_norm) cannot be read",
                "Use a model without them.",
            )
        self._is_inverse = kind == "bitlinear"

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor | None:
        if "weight" not in parts or parts["weight"].dtype != "U8":
            return None
        return TernaryTensor(module, parts, self._is_inverse)
