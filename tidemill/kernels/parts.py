"""Columns of a matrix of activations, where each belongs to another part of a weight."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def take_columns(x_TN: torch.Tensor, columns: range) -> torch.Tensor:
    if native.lib and not x_TN.is_cuda:
        return native.lib.columns(x_TN, columns.start, len(columns))
    return x_TN[:, columns.start : columns.stop].contiguous()


def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts side by side as one matrix."""
    if not native.lib or parts[0].is_cuda:
        return torch.cat(parts, 1)
    while len(parts) > 1:
        parts = [native.lib.concat(parts[:3]), *parts[3:]]
    return parts[0]
