"""Weights that stay in the 2, 4 or 8 bits they are stored in (or are rounded to as they are read), by activations in bfloat16 on the
GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.kernels.quantized_linear import Codes
from tidemill.model_config import MoESpec
from tidemill.quant.base import ExpertParts
from tidemill.quant.cuda import CudaDense
from tidemill.quant.cuda_scaled import CudaScaledWeight, in_pairs, on_gpu
from tidemill.weights.checkpoint import WeightTensor

Part: TypeAlias = "Codes | Fp8Part | torch.Tensor"
_FROM_ROWS = 512  # a weight is dequantized into a buffer first
_buffers: dict[torch.device, torch.Tensor] = {}  # one for all weights: they are used one after the other


def _buffer(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    num = shape[0] * shape[1]
    if device not in _buffers or _buffers[device].numel() < num:
        _buffers[device] = torch.empty(num, dtype=torch.bfloat16, device=device)
    return _buffers[device][:num].view(shape)


class CudaPackedWeight(Weight):
    """`order_K`: column k multiplies input order_K[k]. `act`: as `CudaWeight` has it."""

    def __init__(self, weight: Any, bias_N: torch.Tensor | None, act: str, order_K: torch.Tensor | None, fast: bool) -> None:
        self._weight, self._bias, self._act, self._order, self._fast = weight, bias_N, act, order_K, fast
        self._device = weight.words_NW.device
        _buffer((weight.num_out, weight.num_in), self._device)  # memory is taken now, not when a step needs it

    @property
    def num_bytes(self) -> int:
        num: int = self._weight.num_bytes
        return num

    def _multiply(self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None) -> torch.Tensor:
        from tidemill.kernels.cuda.gemm import gemm, matmul
        from tidemill.kernels.cuda.packed_gemm import dequantize, gemm_packed

        weight = self._weight
        if self._order is not None:
            x_TK = x_TK.index_select(1, self._order)
        if x_TK.shape[0] < _FROM_ROWS:
            return gemm_packed(x_TK, weight, bias_N=self._bias, act=act, out=out)
        dense = dequantize(weight, out=_buffer((weight.num_out, weight.num_in), self._device))
        if out is not None:
            return gemm(x_TK, dense, bias_N=self._bias, act=act, out=out)
        return matmul(x_TK, dense, self._bias, act, any_order=self._fast)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_TK, self._act)

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_TK, "")

    def activate(self, y_TN: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.elementwise import glu

        return glu(y_TN, self._act) if self._act else y_TN

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(x_TK.shape[0], self._weight.num_out, dtype=torch.float32, device=x_TK.device)
        return self._multiply(x_TK, "", out)

    def compile(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.tuning import compile_tiles

        for rows in nums_rows:
            self(torch.empty(rows, self._weight.num_in, dtype=torch.bfloat16, device=self._device))
        if many := [rows for rows in nums_rows if rows >= _FROM_ROWS]:
            compile_tiles(_buffer((self._weight.num_out, self._weight.num_in), self._device), self._bias, self._act, many)

    def prepare(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile, library_agrees
        from tidemill.kernels.cuda.packed_gemm import dequantize
        from tidemill.kernels.cuda.tuning import find_tiles

        num_out, num_in = self._weight.num_out, self._weight.num_in
        many = [rows for rows in nums_rows if rows >= _FROM_ROWS]
        if not many:
            return
        dense = dequantize(self._weight, out=_buffer((num_out, num_in), self._device))
        find_tiles(dense, self._act, library=self._bias is None)
        for num_rows in many:
            if self._bias is None and not self._fast and choose_tile(num_rows, num_out, num_in) is LIBRARY:
                library_agrees(num_rows, num_out, num_in, self._device)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.packed_gemm import dequantize

        return dequantize(self._weight, ids_T)


def pack_codes(codes: Codes) -> Any:
    """As the kernels hold them. None: no kernel has their groups."""
    from tidemill.kernels.cuda.packed_gemm import E2M1, NF4, pack

    num_in = codes.codes_NK.shape[1]
    whole = codes.scales_NG.shape[1] == 1
    if not whole and (codes.group % 32 or num_in % codes.group):
        return None
    on = codes.codes_NK.to("cuda"), codes.scales_NG.to("cuda").float()
    zeros, offsets = (None if one is None else one.to("cuda").float() for one in (codes.zeros_NG, codes.offsets_NG))
    if codes.table is not None:
        kind = next((name for name, table in (("nf4", NF4), ("e2m1", E2M1)) if _same(codes.table, table)), None)
        return None if kind is None else pack(on[0], 4, kind, on[1], None)
    if codes.bits == 8:
        if zeros is not None:
            offsets = -zeros * on[1]
        return pack(on[0], 8, "zeros" if offsets is None else "offsets", on[1], offsets)
    if codes.bits == 2:  # -1, 0 and 1
        return pack(on[0] + 1, 2, "zeros", on[1], torch.ones_like(on[1]))
    if zeros is not None:
        return pack(on[0], 4, "zeros", on[1], zeros)
    if offsets is not None:
        return pack(on[0], 4, "offsets", on[1], offsets)
    from tidemill.kernels.quantized_linear import _MX4_NUMBERS

    numbers = torch.from_numpy(_MX4_NUMBERS).to(on[0].device)[on[0].long() + 12]
    return pack(numbers, 4, "e2m1", on[1] * 2, None)  # the codes are twice the values


def _same(table: torch.Tensor, other: tuple[float, ...]) -> bool:
    return torch.allclose(table.cpu().float(), torch.tensor(other, device="cpu"), atol=1e-6)
