"""Matrices that stay the two factors they are stored as, where that is fewer bytes."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.kernels.low_rank import Factors
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.packed.lowrank import LowRankTensor


def read_factors(tensor: WeightTensor, row_order: torch.Tensor | None) -> Factors | None:
    """None: it is stored as one matrix, or would be smaller as one."""
    if not isinstance(tensor, LowRankTensor) or not tensor.is_smaller:
        return None
    factors = tensor.factors()
    return factors if row_order is None else factors.take(row_order)


def plain(part: Any) -> Any:
    """Multiplied out, for layouts that hold whole matrices."""
    return part.product() if isinstance(part, Factors) else part
