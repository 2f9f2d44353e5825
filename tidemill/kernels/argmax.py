"""The first index of each row's highest value: a greedy draw. -1: it is not finite, or the row has
a NaN."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def argmax_reference(x_SV: torch.Tensor) -> torch.Tensor:
    return torch.where(x_SV.amax(-1).isfinite(), x_SV.argmax(-1), -1)  # amax of a NaN is NaN


def argmax(x_SV: torch.Tensor) -> torch.Tensor:
    return native.lib.argmax(x_SV) if native.lib and not x_SV.is_cuda else argmax_reference(x_SV)
