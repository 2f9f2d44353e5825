"""Weights as numbers of 32 or 16 bits; matmuls in float32."""

from __future__ import annotations

import torch

from tidemill.kernels import native
from tidemill.kernels.linear import Weight, pack_linear
from tidemill.quant.base import LinearMethod
from tidemill.weights.checkpoint import WeightTensor

_SHORT = {"F16": torch.float16, "BF16": torch.bfloat16}


class Dense(LinearMethod[torch.Tensor]):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        """16-bit values stay as they are where the compiled kernels widen them on the way; the results are the same."""
        dtype = _SHORT.get(tensor.type_name, torch.float32) if native.lib else torch.float32
        rows = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        tensor.read_into(rows)
        return rows if row_order is None else rows[row_order]

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        if len({part.dtype for part in parts}) > 1:
            parts = [part.float() for part in parts]
        return pack_linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)
