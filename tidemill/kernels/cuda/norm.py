"""RMSNorm and LayerNorm, with the residual addition before or after them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import begin, how, launch
from tidemill.kernels.cuda.rounding import LARGEST, Scaled, quantized
from tidemill.kernels.handover import Handover
from tidemill.kernels.pending import Pending, SplitK, with_added


@triton.jit
def _add_rms_norm(
    x_ptr, added_ptr, residual_ptr, weight_ptr, out_ptr, codes_ptr, scales_ptr, width, eps, factor,
    CHUNKS: tl.constexpr, ADDS: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`CHUNKS`: of which x is the sum, [chunk, row, column]; 0: there is no x. `ADDS`: to that,
    what adapters add. `CODES`: the largest value of the 8-bit type in which the norm is written,
    with a scale for the row; 0: it is not. `PLAIN`: it is written as it is. Reference:
    `norm.add_rms_norm_reference`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    value = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if CHUNKS:
        x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        for chunk in tl.static_range(1, CHUNKS):
            x += tl.load(
                x_ptr + (chunk * tl.num_programs(0) + row) * width + columns, mask=inside, other=0.0
            )
        if ADDS:
            x += tl.load(added_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value += x.to(residual_ptr.dtype.element_ty).to(tl.float32) * factor
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value = (value * scale * weight).to(residual_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(out_ptr + row * width + columns, value, mask=inside)
    if CODES:
        scale, codes = quantized(tl.where(inside, value.to(tl.float32), 0.0), 0, CODES, AHEAD)
        tl.store(codes_ptr + row * width + columns, codes, mask=inside)
        tl.store(scales_ptr + row, scale)


def _of_a_row(width: int) -> dict[str, int]:
    """A program has a whole row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 512))}


def add_rms_norm(
    x_TH: Pending | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    handover: Handover | None = None,
    alone: bool = False,
) -> torch.Tensor:
    """Adds x * scale, if there is an x, to the residual in place and returns the norm of the sum.
    `handover`: the result is put in there, too, in its type; `alone`: only there. What is
    returned has no memory then, so that nothing can read it."""
    alone = alone and handover is not None
    out = torch.empty_like(residual_TH, device="meta" if alone else None)
    num_rows, width = residual_TH.shape
    added, made, num_chunks = None, None, 1
    if isinstance(x_TH, SplitK):
        x, num_chunks = x_TH.partials, x_TH.partials.shape[0]
    elif x_TH is None:
        x, num_chunks = residual_TH, 0
    else:
        x, added = with_added(x_TH)
    if handover is not None:
        made = Scaled(
            torch.empty_like(residual_TH, dtype=handover.dtype),
            residual_TH.new_empty(num_rows, dtype=torch.float32),
        )
    launch(
        _add_rms_norm, (num_rows,), x, residual_TH if added is None else added, residual_TH,
        weight_H, residual_TH if alone else out,
        out if made is None else made.values_NK.view(torch.int8),
        out if made is None else made.scales, width, eps, scale,
        CHUNKS=num_chunks, ADDS=added is not None,
        CODES=0 if handover is None else LARGEST[handover.dtype], PLAIN=not alone,
        **_of_a_row(width), **how(num_rows),
    )  # fmt: skip
    if handover is not None and made is not None:
        handover.put(out, made)
    return out


@triton.jit
def _post_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """RMSNorm, residual addition. Reference: `norm.post_norm_reference`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(
        out_ptr + row * width + columns,
        (residual + x * scale * weight).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def post_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """The sum of the residual and the norm of x."""
    out = torch.empty_like(residual_TH)
    num_rows, width = residual_TH.shape
    launch(
        _post_norm,
        (num_rows,),
        x_TH,
        residual_TH,
        weight_H,
        out,
        width,
        eps,
        **_of_a_row(width),
        **how(num_rows),
    )
    return out


@triton.jit
def _qk_norm(
    qkv_ptr, q_ptr, k_ptr, num_q, num_k, num_columns, eps, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """The norm of a row's queries or its keys, in place. Reference: `norm.qk_norm_reference`."""
    is_k = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    width = tl.where(is_k == 1, num_k, num_q)
    inside = columns < width
    weight = tl.load(q_ptr + columns, mask=columns < num_q * (1 - is_k), other=0.0).to(tl.float32)
    weight += tl.load(k_ptr + columns, mask=columns < num_k * is_k, other=0.0).to(tl.float32)
    begin(AHEAD)
    base = qkv_ptr + tl.program_id(0).to(tl.int64) * num_columns + is_k * num_q
    x = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(base + columns, (x * scale * weight).to(qkv_ptr.dtype.element_ty), mask=inside)


def qk_norm(
    qkv_TC: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm of all query heads of a row together, and of all key heads, in place."""
    num_q, num_k = q_weight.numel(), k_weight.numel()
    launch(
        _qk_norm, (qkv_TC.shape[0], 2), qkv_TC, q_weight, k_weight, num_q, num_k, qkv_TC.shape[1],
        eps,
        **_of_a_row(max(num_q, num_k)), **how(qkv_TC.shape[0]),
    )  # fmt: skip
    return qkv_TC


@triton.jit
def _add_layer_norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, width, eps,
    HAS_X: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Residual addition, LayerNorm. Reference: `norm.add_layer_norm_reference`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    value = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        value += tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(
        out_ptr + row * width + columns,
        (centred * scale * weight + bias).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def add_layer_norm(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds x, if any, to the residual in place and returns the LayerNorm of the sum."""
    out = torch.empty_like(residual_TH)
    num_rows, width = residual_TH.shape
    x = residual_TH if x_TH is None else x_TH
    launch(
        _add_layer_norm, (num_rows,), x, residual_TH, weight_H, bias_H, out, width, eps,
        HAS_X=x_TH is not None,
        **_of_a_row(width), **how(num_rows),
    )  # fmt: skip
    return out
