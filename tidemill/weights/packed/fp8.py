"""Weights in 8-bit floats (E4M3) with a scale for the matrix, for each row, or for blocks (128 ×
128: DeepSeek, Qwen)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, lacks

_KINDS = {"F8_E4M3": "F8_E4M3", "F8_E5M2": "F8_E5M2"}


class FP8Tensor(PackedTensor):
    """`block`: rows and columns that share a scale, if some do."""

    def __init__(
        self, module: str, parts: dict[str, Stored], scale: str, block: tuple[int, int] | None
    ) -> None:
        lacks(module, parts, ("weight", scale))
        self._weight = parts["weight"].check(tuple(_KINDS), (None, None))
        self._scale = parts[scale].check(("F32", "BF16", "F16", "F8_E8M0"))
        num_out, width = self._weight.shape
        self.block = self._granularity(block)
        super().__init__(module, parts, (num_out, width), self._weight.dtype)

    def _granularity(self, block: tuple[int, int] | None) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        (num_out, width), shape = self._weight.shape, self._scale.shape
        if shape in ((), (1,), (1, 1)):
            return num_out, width
        if shape in ((num_out,), (num_out, 1)) and block is None:
            return 1, width
        if (
            block is not None
            and min(block) > 0
            and shape == (-(-num_out // block[0]), -(-width // block[1]))
        ):
            return block
        raise self._scale.broken(
            f"has shape {list(shape)}, which does not fit a matrix of {[num_out, width]}"
        )

    def scales(self) -> torch.Tensor:
        """float32 [rows / block's, columns / block's]."""
        rows = -(-self.shape[0] // self.block[0])
        return self._scale.scales().reshape(rows, -1)

    def values(self) -> torch.Tensor:
        """The values as they are stored: [out, in]."""
        return self._weight.read()

    def codes(self) -> None:
        return None

    def read_into(self, out: torch.Tensor) -> None:
        values = self.values().to(out.device).float()
        scales = self.scales().to(out.device)
        num_out, width = self.shape
        wide = (
            scales.repeat_interleave(self.block[1], 1)[:, :width] if scales.shape[1] > 1 else scales
        )
        tall = (
            wide.repeat_interleave(self.block[0], 0)[:num_out]
            if wide.shape[0] not in (1, num_out)
            else wide
        )
        values *= tall
        if not values.isfinite().all():
            raise self._weight.broken("holds values that are not finite")
        out.copy_(values)


class FP8(Scheme):
    """The FP8 layouts of Transformers (`fp8`, `fbgemm_fp8`) and DeepSeek: values are multiplied by
    `weight_scale_inv`, or `weight_scale`."""

    parts = ("weight", "weight_scale_inv", "weight_scale")
    dropped = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale")

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise self.refuse(
                f"weight_block_size is {str(block)[:50]!r}",
                "It must be two whole numbers, like [128, 128].",
            )
        self._block = None if block is None else (block[0], block[1])

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor | None:
        if "weight" not in parts or not parts["weight"].dtype.startswith("F8"):
            return None
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        block = (
            self._block
            if scale in parts and len(parts[scale].shape) == 2 and parts[scale].shape[1] > 1
            else None
        )
        return FP8Tensor(
            module, parts, scale, block or (self._block if scale == "weight_scale_inv" else None)
        )
