"""Activations, and the gated ones of feed-forwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation function of kernels/glu.py."""
    if ACT == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif ACT == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    elif ACT == "gelu":
        size = tl.abs(x) * 0.70710678118654752
        t = 1.0 / (1.0 + 0.3275911 * size)
        tail = (
            ((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736
        ) * t + 0.254829592
        return (
            tl.where(x < 0.0, 0.0, x) - tail * t * tl.exp(-size * size) * size * 0.70710678118654752
        )
    else:
        z = x
        if ACT == "gelu_tanh":
            z = x * tl.fma(x * x, x * 0.0 + 0.0713548162726, x * 0.0 + 1.5957691216)
        return x / (1.0 + tl.exp(-z))


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """act(gate) * up. What is not a number stays so."""
    if ACT == "swiglu_clamped":
        gate, up = (
            tl.where(gate > 7.0, 7.0, gate),
            tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)),
        )
        return gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    else:
        return activated(gate, ACT) * up


@triton.jit(do_not_specialize=["num"])
def _activate(x_ptr, out_ptr, num, ACT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Activation. Reference: `glu.activate_reference`."""
    begin(AHEAD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < num, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, activated(x, ACT).to(out_ptr.dtype.element_ty), mask=i < num)


def activate(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    out, num = torch.empty_like(x_TI), x_TI.numel()
    launch(
        _activate,
        (triton.cdiv(num, 1024),),
        x_TI,
        out,
        num,
        ACT=act,
        BLOCK=1024,
        num_warps=4,
        **HOW,
    )
    return out


@triton.jit
def _glu(gate_up_ptr, out_ptr, width, ACT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Gated activation. Reference: `glu.glu_reference`."""
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.load(gate_up_ptr + row * 2 * width + both, mask=both < 2 * width, other=0.0).to(
        tl.float32
    )
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    tl.store(
        out_ptr + row * width + columns,
        gated(gate, up, ACT).to(out_ptr.dtype.element_ty),
        mask=columns < width,
    )


def glu(gate_up_TI2: torch.Tensor, act: str) -> torch.Tensor:
    """The gated activation of columns that hold gate and up in turn. (Our own matmul has it built
    in; this follows the library's.)"""
    num_rows, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out = gate_up_TI2.new_empty(num_rows, width)
    launch(
        _glu,
        (num_rows, triton.cdiv(width, 1024)),
        gate_up_TI2,
        out,
        width,
        ACT=act,
        BLOCK=1024,
        num_warps=4,
        **HOW,
    )
    return out
