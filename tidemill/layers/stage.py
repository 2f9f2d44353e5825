"""The stand-in, in a stage of a pipeline, for the layers that other stages have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tidemill.distributed.world import Stage
from tidemill.kernels.norm import add


class StageBlocks(nn.ModuleList):
    """The blocks of a stage. They keep their numbers; a forward pass has only them."""

    def __init__(self, blocks: nn.ModuleList, stage: Stage) -> None:
        super().__init__(
            block if number in stage else nn.Identity() for number, block in enumerate(blocks)
        )
        self._stage = stage

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[number] for number in range(self._stage.first, self._stage.end))


class ResidualSum(nn.Identity):
    """The place of the last norm in a stage that is not the last: the sum goes on to the next
    stage."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self._scale = scale

    def add(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        if x_TH is not None:
            add(x_TH, residual_TH, self._scale)
        return residual_TH
