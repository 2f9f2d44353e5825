"""RMSNorm, with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)


def add_rms_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to the residual in place and returns the norm of the sum."""
    residual_TH.add_(x_TH)
    return rms_norm(residual_TH, weight_H, eps)
