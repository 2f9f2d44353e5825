"""Values cut off at a limit on both sides."""

from __future__ import annotations

import torch

from tidemill.kernels import native


def clip(x_TC: torch.Tensor, limit: float) -> torch.Tensor:
    """In place. What is no number stays none."""
    if native.lib and not x_TC.is_cuda:
        return native.lib.clip(x_TC, limit)
    return x_TC.clamp_(-limit, limit)
