"""Results of a matmul that the next kernel completes: split-K partials, and what adapters add."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class SplitK(NamedTuple):
    """Partial sums over K, float32 [chunk, T, N]: to be added in this order, then rounded."""

    partials: torch.Tensor


class PendingLora(NamedTuple):
    """A product and what adapters add to it, both rounded, to be added and rounded again. The
    latter is computed on another stream, which the current one waits for by `wait`."""

    y_TN: torch.Tensor
    added_TN: torch.Tensor
    wait: Callable[[], None]


Pending = torch.Tensor | SplitK | PendingLora


def with_added(y_TN: torch.Tensor | PendingLora) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A product and what is to be added to it, for which the current stream has waited."""
    if isinstance(y_TN, torch.Tensor):
        return y_TN, None
    y_TN.wait()
    return y_TN.y_TN, y_TN.added_TN
