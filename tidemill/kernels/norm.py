"""RMSNorm and LayerNorm, with the residual addition before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.kernels import native


def add_rms_norm_reference(
    x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    if x_TH is not None:
        residual_TH.add_(x_TH)
    return F.rms_norm(residual_TH, (residual_TH.shape[-1],), weight_H, eps)


def add_rms_norm(x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x, if any, to the residual in place and returns the norm of the sum."""
    if residual_TH.is_cuda:
        from tidemill.kernels.cuda import elementwise

        return elementwise.add_rms_norm(x_TH, residual_TH, weight_H, eps)
    if native.lib:
        return native.lib.add_rms_norm(x_TH, residual_TH, weight_H, eps)
    return add_rms_norm_reference(x_TH, residual_TH, weight_H, eps)


def add_layer_norm_reference(
    x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float
) -> torch.Tensor:
    if x_TH is not None:
        residual_TH.add_(x_TH)
    return F.layer_norm(residual_TH, (residual_TH.shape[-1],), weight_H, bias_H, eps)


def add_layer_norm(
    x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x, if any, to the residual in place and returns the norm of the sum."""
    if native.lib:
        return native.lib.add_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps)
    return add_layer_norm_reference(x_TH, residual_TH, weight_H, bias_H, eps)
