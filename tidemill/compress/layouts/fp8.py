"""The layout of Transformers' fp8 (DeepSeek's): blocks of 128 × 128 with a scale each."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.layouts.base import Layout
from tidemill.compress.stored import Fp8Weight, Stored


class FP8Layout(Layout):
    name = "fp8"

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        if (
            not isinstance(stored, Fp8Weight)
            or stored.block_rows != stored.block_columns
            or stored.act_scale is not None
        ):
            raise self.refuse(
                name,
                "it is not fp8 in blocks",
                "Choose --method fp8 --weights block, or another --format.",
            )
        self._block = [stored.block_rows, stored.block_columns]
        return {
            f"{name}.weight": stored.values_NK,
            f"{name}.weight_scale_inv": stored.scales.to(torch.float32),
        }

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": self._block,
            "modules_to_not_convert": ["lm_head"],
        }
