"""8-bit weights that meet 8-bit activations on the GPU: fp8 or int8, as stored, or made of a plain
checkpoint as it is read."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.kernels.handover import Handover
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.quant.base import ExpertParts
from tidemill.quant.cuda import CudaDense, CudaMatrix
from tidemill.types.model_config import MoESpec


class CudaScaledWeight(CudaMatrix):
    """`values_NK`: float8_e4m3fn or int8. `scales`: float32 [N], or [K / 128, N]. `static`: the
    scale of all activations; None: each token has its own, by its largest value. `threshold`: of
    int8, activations of this size and more are multiplied as they are (LLM.int8()). `act`: as
    `CudaWeight` has it."""

    def __init__(
        self,
        values_NK: torch.Tensor,
        scales: torch.Tensor,
        bias_N: torch.Tensor | None,
        act: str = "",
        static: torch.Tensor | None = None,
        threshold: float | None = None,
    ) -> None:
        from tidemill.kernels.cuda.rounding import Scaled
        from tidemill.kernels.cuda.scaled_gemm import ALIGN

        self._num_out, self._num_in = values_NK.shape
        missing = -self._num_in % ALIGN
        if missing:
            values_NK = F.pad(values_NK.view(torch.int8), (0, missing)).view(values_NK.dtype)
        self._weight = Scaled(values_NK.contiguous(), scales.contiguous())
        self._bias, self._act, self._static, self._threshold = bias_N, act, static, threshold
        if not missing and static is None and threshold is None and not self._weight.has_blocks:
            self.handover = Handover(values_NK.dtype)

    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from tidemill.kernels.cuda.scaled_gemm import gemm_scaled, quantize_blocks, quantize_rows

        if self._threshold is not None:
            return self._in_two(x_TK, self._threshold, act, out)
        weight, kind, padded = (
            self._weight,
            self._weight.values_NK.dtype,
            self._weight.values_NK.shape[1],
        )
        x = None if self.handover is None else self.handover.take(x_TK)
        if x is None:
            x = (
                quantize_blocks(x_TK, kind, padded)
                if weight.has_blocks
                else quantize_rows(x_TK, kind, padded, self._static)
            )
        return gemm_scaled(x, weight, x_TK.dtype, bias_N=self._bias, act=act, out=out)

    def _in_two(
        self, x_TK: torch.Tensor, threshold: float, act: str, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Bytes by bytes, then activations that are no bytes."""
        from tidemill.kernels.cuda.outliers import add_outliers, split_rows
        from tidemill.kernels.cuda.scaled_gemm import gemm_scaled

        x, kept = split_rows(x_TK, threshold, self._weight.values_NK.shape[1])
        sums = torch.empty(x_TK.shape[0], self._num_out, dtype=torch.float32, device=x_TK.device)
        gemm_scaled(x, self._weight, torch.float32, out=sums)
        return add_outliers(kept, self._weight, sums, bias_N=self._bias, act=act, out=out)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        values, scales = self._weight.values_NK[ids_T, : self._num_in].float(), self._weight.scales
        if self._weight.has_blocks:
            return (values * scales[:, ids_T].t().repeat_interleave(128, 1)[:, : self._num_in]).to(
                torch.bfloat16
            )
        return (values * scales[ids_T, None]).to(torch.bfloat16)


def quantize_weight(
    values_NK: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight with a scale for each row, by its largest value."""
    from tidemill.kernels.cuda.rounding import LARGEST

    scales = (values_NK.abs().amax(1).float() / LARGEST[dtype]).clamp_min_(1e-30)
    parts = [  # some rows at a time: in float32 they take four times the room
        (
            rows.float() / by[:, None]
            if dtype.is_floating_point
            else (rows.float() / by[:, None]).round_()
        ).to(dtype)
        for rows, by in zip(values_NK.split(4096), scales.split(4096), strict=True)
    ]
    return torch.cat(parts), scales


class CudaOnline(CudaDense):
    """A plain checkpoint, quantized as it is read: linears of layers, not tables, routers and
    experts."""

    dtype = torch.float8_e4m3fn

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        return self._quantized(parts[0] if len(parts) == 1 else torch.cat(parts), on_gpu(bias))

    def join_gated(
        self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str
    ) -> Weight:
        return self._quantized(torch.stack([gate, up], 1).flatten(0, 1), in_pairs(bias), act)

    def _quantized(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, act: str = ""
    ) -> Weight:
        return CudaScaledWeight(*quantize_weight(weight_NK, self.dtype), bias_N, act)

    def join_experts(self, parts: ExpertParts[torch.Tensor], spec: MoESpec) -> ExpertWeights:
        return CudaDense(self._fast).join_experts(parts, spec)


class CudaFP8(CudaOnline):
    """fp8 (e4m3) weights with a scale for each row, and activations with one for each token."""


class CudaInt8(CudaOnline):
    """int8 likewise (W8A8)."""

    dtype = torch.int8


def on_gpu(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.to("cuda", torch.bfloat16)


def in_pairs(bias: torch.Tensor | None) -> torch.Tensor | None:
    """The bias with values of gate and up in turn."""
    return (
        None if bias is None else torch.stack(bias.chunk(2), 1).flatten().to("cuda", torch.bfloat16)
    )
