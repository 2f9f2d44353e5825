"""An activation without a gate: gelu, exact or by a tanh, and relu."""

from __future__ import annotations

import math

import torch

from tidemill.kernels import native
from tidemill.kernels.glu import GELU_CUBIC, GELU_LINEAR

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2}  # and their numbers in encoder.c
# 1 - erf(z) = t (a1 + t (a2 + ...)) exp(-z^2), t = 1 / (1 + p z), z >= 0: Abramowitz and Stegun 7.1.26, off by 1.5e-7.
_ERF_P, _ERF = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def activate_reference(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    """Of separate ops, not torch's gelu, whose vector and scalar paths round differently (glu.py)."""
    if act == "relu":
        return x_TI.clamp(min=0)
    if act == "gelu_tanh":
        z = (x_TI * x_TI).mul_(-GELU_CUBIC).sub_(GELU_LINEAR).mul_(x_TI)
        return torch.div(x_TI, z.exp_().add_(1.0), out=z)
    size = x_TI.abs().mul_(math.sqrt(0.5))
    t = torch.reciprocal(size * _ERF_P + 1.0)
    tail = torch.full_like(t, _ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        tail.mul_(t).add_(coefficient)
    tail.mul_(t).mul_((size * size).neg_().exp_()).mul_(size).mul_(math.sqrt(0.5))
    return x_TI.clamp(min=0).sub_(tail)


def activate(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    return native.lib.activate(x_TI, ACTIVATIONS[act]) if native.lib else activate_reference(x_TI, act)
