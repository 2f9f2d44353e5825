"""x * sigmoid(gate): of attention whose output is gated."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def gate_reference(x_TH: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
    """From separate ops, like kernels/glu.py: an element's bits do not depend on where it stands."""
    return (x_TH / (1 + torch.exp(-gate_TH.float()))).to(x_TH.dtype)


def gated(x_TH: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
    if x_TH.is_cuda:
        from tidemill.kernels.cuda import scan

        return scan.gate(x_TH, gate_TH)
    if native.lib and x_TH.shape[1] % 8 == 0:
        return native.lib.gate(x_TH, gate_TH)
    return gate_reference(x_TH, gate_TH)
