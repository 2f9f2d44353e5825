"""Activations: act(x), and act(gate) * up from the fused projection [gate | up]."""

from __future__ import annotations

import math

import torch

from tidemill.kernels import native

# Activations, and their numbers in rows.c. Each is x / (1 + exp(-z)): of silu, z = x; of gelu_tanh, the usual approximation of
# gelu by a tanh, z = 2 sqrt(2 / pi) (x + 0.044715 x^3); of swiglu_clamped (gpt-oss), z = 1.702 x, where x is at most 7, up within
# -7 .. 7, and the product is by up + 1.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = GELU_LINEAR * 0.044715


def activate_reference(x: torch.Tensor, act: str) -> torch.Tensor:
    """Written with exp instead of torch's silu and gelu, whose vector and scalar paths round differently: an element's bits
    would depend on where a thread's share of the tensor ends."""
    out = torch.neg(x) if act == "silu" else (x * x).mul_(-GELU_CUBIC).sub_(GELU_LINEAR).mul_(x)
    return torch.div(x, out.exp_().add_(1.0), out=out)


def activate(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    if x_TI.is_cuda:
        from tidemill.kernels.cuda import elementwise

        return elementwise.activate(x_TI, act)
    return native.lib.activate(x_TI, ACTIVATIONS[act]) if native.lib else activate_reference(x_TI, act)


def glu_reference(gate_up_TI2: torch.Tensor, act: str = "silu") -> torch.Tensor:
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    if act == "swiglu_clamped":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return torch.div(gate, (gate * -SWIGLU_ALPHA).exp_().add_(1.0)).mul_(up)
    return activate_reference(gate, act).mul_(up)


def glu(gate_up_TI2: torch.Tensor, act: str) -> torch.Tensor:
    return native.lib.glu(gate_up_TI2, ACTIVATIONS[act]) if native.lib else glu_reference(gate_up_TI2, act)
