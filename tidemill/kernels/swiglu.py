"""silu(gate) * up, from the fused projection [gate | up]."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def swiglu_reference(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """Written with exp instead of torch's silu, whose vector and scalar paths round differently: an element's bits
    would depend on where a thread's share of the tensor ends."""
    gate, up = gate_up_TI2.chunk(2, dim=-1)
    out = torch.neg(gate).exp_().add_(1.0)
    return torch.div(gate, out, out=out).mul_(up)


def swiglu(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    return native.lib.swiglu(gate_up_TI2) if native.lib else swiglu_reference(gate_up_TI2)
