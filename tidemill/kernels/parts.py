"""Columns of a matrix of activations, where ranks have parts of the hidden size."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def take_columns(x_TN: torch.Tensor, columns: range) -> torch.Tensor:
    if native.lib and not x_TN.is_cuda:
        return native.lib.columns(x_TN, columns.start, len(columns))
    return x_TN[:, columns.start : columns.stop].contiguous()
