"""y = (x Wᵀ) * scales in 8 bits: fp8 (e4m3) or int8 weights by activations of the same type.

A weight has a scale for each row, activations have one for each token: they meet in the end, on the
sums. Or both have one for every 128 columns (`BLOCKS`): then each 128 products are summed by the
tensor cores and scaled before they join the rest.

One pass over K in order, no split. The tensor cores sum fp8 with fewer bits than float32 has, in an
order that K alone decides, and int8 exactly; so a row's bits are the same at every number of rows
and in every tile, also where the operands are swapped (`SWAP`): a Hopper instruction takes at least
64 rows of the first one, and a weight always has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda import hopper_gemm
from tidemill.kernels.cuda.gemm import _finish, _place
from tidemill.kernels.cuda.launch import begin, how, launch
from tidemill.kernels.cuda.rounding import LARGEST, Scaled, quantized, rounded

BLOCK = 128  # columns to a scale, where there is more than one
# strips of rows that share one of the weight: of 2,048 rows all, so that a weight is read from
# memory once
GROUP = 16
ALIGN = 16  # bytes of a row that the bulk copy engine asks for


@dataclass(frozen=True, slots=True)
class ScaledTile:
    rows: int
    outs: int
    ins: int
    stages: int
    warps: int
    swap: int = 0


# ---- activations


@triton.jit
def _quantize_rows(
    x_ptr, out_ptr, scales_ptr, static_ptr, width, padded,
    LARGEST: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Activations in 8 bits. Reference: `quantized_linear.quantize`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    begin(AHEAD)
    x = tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
        values = rounded(x * tl.div_rn(1.0, scale), LARGEST, AHEAD)
        scale = tl.where(tl.sum(x - x, 0) == 0.0, scale, float("nan"))
    else:
        scale, values = quantized(x, 0, LARGEST, AHEAD)
    tl.store(out_ptr + row * padded + columns, values, mask=columns < padded)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_blocks(
    x_ptr, out_ptr, scales_ptr, num_rows, width, padded,
    LARGEST: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Activations in 8 bits. Reference: `quantized_linear.quantize`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    begin(AHEAD)
    x = tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    scales, values = quantized(x, 1, LARGEST, AHEAD)
    tl.store(out_ptr + row * padded + columns, values, mask=columns < padded)
    tl.store(scales_ptr + block.to(tl.int64) * num_rows + row, scales, mask=block * SIZE < width)


def quantize_rows(
    x_TK: torch.Tensor, dtype: torch.dtype, padded: int, static: torch.Tensor | None = None
) -> Scaled:
    """Activations with a scale for each token: the largest value's, or `static`, the same for all."""
    num_rows, width = x_TK.shape
    values = torch.empty(num_rows, padded, dtype=dtype, device=x_TK.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x_TK.device)
    block = triton.next_power_of_2(padded)
    launch(
        _quantize_rows, (num_rows,), x_TK, values.view(torch.int8), scales, scales if static is None else static, width, padded,
        LARGEST=LARGEST[dtype], STATIC=static is not None, BLOCK=block, num_warps=min(8, max(1, block // 512)),
        **how(num_rows),
    )  # fmt: skip
    return Scaled(values, scales)


def quantize_blocks(x_TK: torch.Tensor, dtype: torch.dtype, padded: int) -> Scaled:
    """Activations with a scale for each token and 128 columns: [K / 128, T]."""
    num_rows, width = x_TK.shape
    num_blocks = triton.cdiv(width, BLOCK)
    values = torch.empty(num_rows, padded, dtype=dtype, device=x_TK.device)
    scales = torch.empty(num_blocks, num_rows, dtype=torch.float32, device=x_TK.device)
    launch(
        _quantize_blocks, (num_rows, triton.cdiv(num_blocks, 16)), x_TK, values.view(torch.int8), scales, num_rows, width, padded,
        LARGEST=LARGEST[dtype], BLOCKS=16, SIZE=BLOCK, num_warps=4, **how(num_rows),
    )  # fmt: skip
    return Scaled(values, scales)


# ---- the matmul


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_scaled(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, BLOCKS: tl.constexpr,
    INT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Matmul in 8 bits. Reference: `linear.linear_reference`."""
    begin(AHEAD)
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    rows, outs = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
    kind: tl.constexpr = tl.int32 if INT else tl.float32
    if BLOCKS:
        acc = tl.zeros((ROWS, OUTS), tl.float32)
        for k in range(0, num_in, INS):  # INS is a block
            x_scale = tl.load(
                x_scales_ptr + (k // INS) * num_rows + rows, mask=rows < num_rows, other=0.0
            )
            w_scale = tl.load(
                w_scales_ptr + (k // INS) * num_out + outs, mask=outs < num_out, other=0.0
            )
            if SWAP:
                part = tl.dot(
                    w_desc.load([n * OUTS, k]), x_desc.load([m * ROWS, k]).T, out_dtype=kind
                ).T
            else:
                part = tl.dot(
                    x_desc.load([m * ROWS, k]), w_desc.load([n * OUTS, k]).T, out_dtype=kind
                )
            acc = tl.fma(part.to(tl.float32), x_scale[:, None] * w_scale[None, :], acc)
    else:
        if SWAP:
            sums = tl.zeros((OUTS, ROWS), kind)
            for k in range(0, num_in, INS):
                sums = tl.dot(
                    w_desc.load([n * OUTS, k]), x_desc.load([m * ROWS, k]).T, sums, out_dtype=kind
                )
            sums = sums.T
        else:
            sums = tl.zeros((ROWS, OUTS), kind)
            for k in range(0, num_in, INS):
                sums = tl.dot(
                    x_desc.load([m * ROWS, k]), w_desc.load([n * OUTS, k]).T, sums, out_dtype=kind
                )
        x_scale = tl.load(x_scales_ptr + rows, mask=rows < num_rows, other=0.0)
        w_scale = tl.load(w_scales_ptr + outs, mask=outs < num_out, other=0.0)
        acc = sums.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    acc = _finish(acc, bias_ptr, outs, num_out, HAS_BIAS, ACT, ROWS, OUTS, out_ptr.dtype.element_ty)
    width: tl.constexpr = OUTS // 2 if ACT != "" else OUTS
    num_out = num_out // 2 if ACT != "" else num_out
    outs = n * width + tl.arange(0, width)
    where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(
        where,
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out),
    )


def own_tile(num_rows: int, num_out: int, num_in: int, has_blocks: bool) -> ScaledTile:
    """The tile that was best on an H200 (bench/gpu_quant.py). It changes at numbers of
    `gemm.CHOICES` only."""
    if has_blocks:
        if num_rows <= 16:
            return (
                ScaledTile(16, 128, BLOCK, 6, 4, 1)
                if num_out > 8192
                else ScaledTile(16, 64, BLOCK, 8, 4, 1)
            )
        return (
            ScaledTile(64, 64, BLOCK, 5, 4) if num_rows <= 64 else ScaledTile(128, 128, BLOCK, 3, 4)
        )
    if num_rows <= 16:
        return (
            ScaledTile(16, 128, 128, 6, 4, 1)
            if num_out > 8192
            else ScaledTile(16, 64, 256, 6, 4, 1)
        )
    if num_rows <= 32:
        return (
            ScaledTile(32, 128, 128, 6, 4, 1)
            if num_out > 8192
            else ScaledTile(32, 64, 256, 6, 4, 1)
        )
    if num_rows <= 64:
        return (
            ScaledTile(64, 256, 128, 4, 8) if num_out > 8192 else ScaledTile(64, 64, 256, 5, 4, 1)
        )
    if num_rows <= 128:
        if num_out > 8192:
            return ScaledTile(128, 256, 128, 4, 8)
        return (
            ScaledTile(64, 64, 128, 8, 4) if num_out <= 4096 else ScaledTile(128, 64, 128, 6, 4, 1)
        )
    if num_rows <= 256:
        if num_out > 8192:
            return ScaledTile(256, 128, 128, 4, 8, 1)
        return (
            ScaledTile(64, 128, 128, 6, 4) if num_out <= 4096 else ScaledTile(256, 64, 128, 5, 8, 1)
        )
    return (
        ScaledTile(128, 128, 128, 5, 4)
        if num_rows <= 512 and num_out <= 8192
        else ScaledTile(128, 256, 128, 4, 8)
    )


@cache
def choose_tile(num_rows: int, num_out: int, num_in: int, has_blocks: bool) -> ScaledTile:
    return own_tile(num_rows, num_out, num_in, has_blocks)


def gemm_scaled(
    x: Scaled,
    weight: Scaled,
    dtype: torch.dtype,
    tile: ScaledTile | None = None,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`dtype`: of the result. `act`, `out`: as `gemm` has them."""
    num_rows, num_in = x.values_NK.shape
    num_out = weight.values_NK.shape[0]
    if out is None:
        out = torch.empty(
            num_rows, num_out // 2 if act else num_out, dtype=dtype, device=x.values_NK.device
        )
    # 512: one of `gemm.CHOICES`
    many = tile is None and num_rows > 512 and bias_N is None and not weight.has_blocks
    if many and hopper_gemm.covers(x.values_NK, weight.values_NK, act, out):
        return hopper_gemm.gemm_warp_specialized(
            x.values_NK, weight.values_NK, out, act, scales=(x.scales, weight.scales)
        )
    tile = tile or choose_tile(num_rows, num_out, num_in, weight.has_blocks)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs),)
    options: dict[str, Any] = {
        "ROWS": tile.rows, "OUTS": tile.outs, "INS": tile.ins, "GROUP": GROUP, "SWAP": tile.swap, "BLOCKS": weight.has_blocks,
        "INT": weight.values_NK.dtype == torch.int8, "HAS_BIAS": bias_N is not None, "ACT": act,
        "num_stages": tile.stages, "num_warps": tile.warps, **how(num_rows),
    }  # fmt: skip
    launch(
        _gemm_scaled,
        grid,
        TensorDescriptor.from_tensor(x.values_NK, [tile.rows, tile.ins]),
        TensorDescriptor.from_tensor(weight.values_NK, [tile.outs, tile.ins]),
        x.scales, weight.scales, weight.scales if bias_N is None else bias_N, out, num_rows, num_out, num_in, **options,
    )  # fmt: skip
    return out
