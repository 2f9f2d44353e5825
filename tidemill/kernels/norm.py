"""RMSNorm and LayerNorm, with the residual addition before or after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.handover import Handover
from tidemill.kernels.pending import Pending

Reduce = Callable[[torch.Tensor], torch.Tensor]


def add_rms_norm_reference(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    scale: float = 1.0,
) -> torch.Tensor:
    if x_TH is not None:
        residual_TH.add_(x_TH if scale == 1.0 else x_TH * scale)
    return F.rms_norm(residual_TH, (residual_TH.shape[-1],), weight_H, eps)


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
    `handover`: on a GPU, the result is put in there, too, in 8 bits; `alone`: only there."""
    if residual_TH.is_cuda:
        from tidemill.kernels.cuda import norm

        return norm.add_rms_norm(x_TH, residual_TH, weight_H, eps, scale, handover, alone)
    assert x_TH is None or isinstance(x_TH, torch.Tensor)  # kernels of a CPU leave nothing pending
    if native.lib:
        return native.lib.add_rms_norm(x_TH, residual_TH, weight_H, eps, scale)
    return add_rms_norm_reference(x_TH, residual_TH, weight_H, eps, scale)


def add(x_TH: torch.Tensor, residual_TH: torch.Tensor, scale: float = 1.0) -> None:
    """Adds x * scale to the residual in place, as `add_rms_norm` does."""
    if native.lib and not residual_TH.is_cuda:
        native.lib.add(x_TH, residual_TH, scale)
    else:
        residual_TH.add_(x_TH if scale == 1.0 else x_TH * scale)


def post_norm_reference(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    return residual_TH + F.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)


def post_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """The sum of the residual and the RMSNorm of x."""
    if residual_TH.is_cuda:
        from tidemill.kernels.cuda import norm

        return norm.post_norm(x_TH, residual_TH, weight_H, eps)
    if native.lib:
        return native.lib.post_norm(x_TH, residual_TH, weight_H, eps)
    return post_norm_reference(x_TH, residual_TH, weight_H, eps)


def qk_norm_reference(
    qkv_TC: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out, begin = qkv_TC.clone(), 0
    for weight in (q_weight, k_weight):
        some = slice(begin, begin + weight.numel())
        out[:, some] = F.rms_norm(qkv_TC[:, some].contiguous(), weight.shape, weight, eps)
        begin = some.stop
    return out


def qk_norm(
    qkv_TC: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of all query heads of a row together, and of all key heads; values stay. qkv may be
    overwritten."""
    if qkv_TC.is_cuda:
        from tidemill.kernels.cuda import norm

        return norm.qk_norm(qkv_TC, q_weight, k_weight, eps)
    if native.lib:
        return native.lib.qk_norm(qkv_TC, q_weight, k_weight, eps)
    return qk_norm_reference(qkv_TC, q_weight, k_weight, eps)


@dataclass(frozen=True, slots=True)
class NormGroup:
    """Neighbouring columns that are normed together, with others that other ranks have."""

    number: int  # among all groups of all ranks
    columns: slice
    size: int  # of all ranks
    counts: bool = True  # False: a rank before this one has the same values


def shared_rms_norm(
    x_TC: torch.Tensor,
    groups: Sequence[NormGroup],
    num_groups: int,
    weights: Sequence[torch.Tensor],
    eps: float,
    reduce: Reduce,
) -> torch.Tensor:
    """In place. `reduce`: the sum over ranks."""
    sums_TG = x_TC.new_zeros(x_TC.shape[0], num_groups, dtype=torch.float32)
    for group in groups:
        if group.counts:
            sums_TG[:, group.number] = x_TC[:, group.columns].float().square().sum(1)
    sums_TG = reduce(sums_TG)
    for group, weight in zip(groups, weights, strict=True):
        values = x_TC[:, group.columns]
        factor_T1 = torch.rsqrt(sums_TG[:, group.number, None] / group.size + eps)
        values.copy_(values.float() * factor_T1 * weight)
    return x_TC


def add_layer_norm_reference(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if x_TH is not None:
        residual_TH.add_(x_TH)
    return F.layer_norm(residual_TH, weight_H.shape, weight_H, bias_H, eps)


def add_layer_norm(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds x, if any, to the residual in place and returns the LayerNorm of the sum."""
    if residual_TH.is_cuda:
        from tidemill.kernels.cuda import norm

        return norm.add_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps)
    if native.lib:
        return native.lib.add_layer_norm(x_TH, residual_TH, weight_H, bias_H, eps)
    return add_layer_norm_reference(x_TH, residual_TH, weight_H, bias_H, eps)
