"""Values in 8 bits with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LARGEST = {
    torch.float8_e4m3fn: 448,
    torch.int8: 127,
    torch.uint8: 7,
}  # of the values of types that have scales; the last: int4


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix [N, K] of 8-bit values; columns are padded with zeros to a multiple of ALIGN."""

    values_NK: torch.Tensor  # float8_e4m3fn or int8
    scales: torch.Tensor  # float32: [N], or [K / 128, N]

    @property
    def has_blocks(self) -> bool:
        return self.scales.dim() == 2


@triton.jit
def code_of(x, LARGEST: tl.constexpr):
    """The nearest int8, or e4m3: the upper bits of a float32 times 2**-120, rounded to even."""
    if LARGEST == 448:
        bits = (tl.abs(x) * 7.52316384526264e-37).to(tl.int32, bitcast=True)
        code = tl.minimum((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20, 0x7E)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)
    else:
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def rounded(x, LARGEST: tl.constexpr, AHEAD: tl.constexpr):
    """To bytes; the largest stand for what is beyond them."""
    if LARGEST == 448 and AHEAD:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)  # one instruction for two
    else:
        return code_of(x if LARGEST == 448 else tl.clamp(x, -127.0, 127.0), LARGEST)


@triton.jit
def quantized(x, axis: tl.constexpr, LARGEST: tl.constexpr, AHEAD: tl.constexpr):
    """A scale for each row, which is NaN if a value is not finite, and the values over it."""
    bits = tl.max(
        x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis
    )  # as integers, what is not finite is the largest
    is_finite, top = bits < 0x7F800000, bits.to(tl.float32, bitcast=True)
    factor = tl.where(is_finite & (top > 1e-30), tl.div_rn(tl.zeros_like(top) + LARGEST, top), 0.0)
    scale = tl.where(is_finite, tl.div_rn(top, tl.zeros_like(top) + LARGEST), float("nan"))
    x = x * tl.expand_dims(factor, axis)
    return scale, rounded(tl.where(x == x, x, 0.0), LARGEST, AHEAD)
