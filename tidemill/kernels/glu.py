"""Activations: act(x), and act(gate) * up from the fused projection [gate | up]."""

from __future__ import annotations

import math

import torch

from tidemill.kernels import native

# Activations, and their numbers in glu.c. Three are x / (1 + exp(-z)): of silu, z = x; of
# gelu_tanh, the usual approximation of
# gelu by a tanh, z = 2 sqrt(2 / pi) (x + 0.044715 x^3); of swiglu_clamped (gpt-oss), z = 1.702 x,
# where x is at most 7, up within
# -7 .. 7, and the product is by up + 1.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2, "gelu": 3, "relu": 4, "relu2": 5}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = GELU_LINEAR * 0.044715
# 1 - erf(z) = t (a1 + t (a2 + ...)) exp(-z^2), t = 1 / (1 + p z), z >= 0: Abramowitz and Stegun
# 7.1.26, off by 1.5e-7.
_ERF_P, _ERF = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def activate_reference(x: torch.Tensor, act: str) -> torch.Tensor:
    """Written with exp instead of torch's silu and gelu, whose vector and scalar paths round
    differently: an element's bits would depend on where a thread's share of the tensor ends."""
    if act == "relu":
        return x.clamp(min=0)
    if act == "relu2":
        return x.clamp(min=0).square_()
    if act == "gelu":
        return _gelu(x)
    out = torch.neg(x) if act == "silu" else (x * x).mul_(-GELU_CUBIC).sub_(GELU_LINEAR).mul_(x)
    return torch.div(x, out.exp_().add_(1.0), out=out)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    size = x.abs().mul_(math.sqrt(0.5))
    t = torch.reciprocal(size * _ERF_P + 1.0)
    tail = torch.full_like(t, _ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        tail.mul_(t).add_(coefficient)
    tail.mul_(t).mul_((size * size).neg_().exp_()).mul_(size).mul_(math.sqrt(0.5))
    return x.clamp(min=0).sub_(tail)


def activate(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    if x_TI.is_cuda:
        from tidemill.kernels.cuda import glu

        return glu.activate(x_TI, act)
    return (
        native.lib.activate(x_TI, ACTIVATIONS[act]) if native.lib else activate_reference(x_TI, act)
    )


def glu_reference(gate_up_TI2: torch.Tensor, act: str = "silu") -> torch.Tensor:
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    if act == "swiglu_clamped":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return torch.div(gate, (gate * -SWIGLU_ALPHA).exp_().add_(1.0)).mul_(up)
    return activate_reference(gate, act).mul_(up)


def glu(gate_up_TI2: torch.Tensor, act: str) -> torch.Tensor:
    return (
        native.lib.glu(gate_up_TI2, ACTIVATIONS[act])
        if native.lib
        else glu_reference(gate_up_TI2, act)
    )
