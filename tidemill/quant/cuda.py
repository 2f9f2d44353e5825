"""bfloat16 weights on the GPU."""

from __future__ import annotations

import torch

from tidemill.kernels.linear import Weight
from tidemill.quant.base import LinearMethod
from tidemill.weights.checkpoint import WeightTensor


class CudaWeight(Weight):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias = weight_NK, bias_N

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._product(x_TK, x_TK.dtype)

    def logits(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._product(x_TK, torch.float32)

    def _product(self, x_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from tidemill.kernels.cuda.gemm import gemm

        out = gemm(x_TK, self._weight_NK, dtype=dtype)
        return out if self._bias is None else out.add_(self._bias)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_NK[ids_T]


class CudaDense(LinearMethod[torch.Tensor]):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        rows = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")
        tensor.read_into(rows)
        return rows if row_order is None else rows[row_order.to("cuda")]

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return CudaWeight(weight, None if bias is None else bias.to("cuda", torch.bfloat16))
