"""The layout of BitNet: four ternary numbers a byte, a quarter of the rows in each two bits, and
one scale."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.layouts.base import Layout
from tidemill.compress.stored import Stored


class BitNet(Layout):
    name = "bitnet"

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        weight = self.integers(name, stored)
        is_ternary = weight.zeros_NG is None and int(weight.codes_NK.abs().max()) <= 1
        if not is_ternary or weight.scales_NG.unique().numel() > 1:
            raise self.refuse(
                name,
                "it is not ternary with one scale",
                "Choose --method ternary --weights tensor.",
            )
        num_out = weight.codes_NK.shape[0]
        if num_out % 4 or weight.act_per != 1:
            why = (
                f"it has {num_out} rows, not a multiple of 4"
                if num_out % 4
                else "its activations are not quantized"
            )
            raise self.refuse(name, why, "Choose --format compressed-tensors.")
        quarters = (weight.codes_NK + 1).to(torch.uint8).view(4, num_out // 4, -1)
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        return {
            f"{name}.weight": packed,
            f"{name}.weight_scale": weight.scales_NG[:1, 0].to(torch.float32),
        }

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": ["lm_head"],
        }
