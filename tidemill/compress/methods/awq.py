"""AWQ: input features with large activations are scaled up before rounding, so that their weights
lose less; ranges are clipped where that helps."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import GROUP, Grid, quantize, rounded
from tidemill.compress.methods.base import Method
from tidemill.compress.methods.folds import Fold, folds
from tidemill.compress.methods.inputs import Inputs, collect, output_error
from tidemill.compress.stored import Stored
from tidemill.compress.walk import LayerJob

_NUM_TRIED = 12  # exponents of activations
_MAX_ROWS = 512  # of a matrix that they are tried on
_SHRINKS = [1.0 - 0.05 * i for i in range(10)]
_NOT_CLIPPED = (
    "q_proj",
    "k_proj",
    "qkv_proj",
    "query_key_value",
    "c_attn",
)  # a small error of scores is a large one after softmax


class AWQ(Method):
    name = "awq"
    defaults: ClassVar[dict[str, Any]] = {
        "bits": 4,
        "group": 128,
        "weights": GROUP,
        "symmetric": False,
        "clip": True,
    }
    formats = ("awq", "compressed-tensors", "gptq", "gguf")
    uses_text = True

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        found = collect(job, moments=True)
        changed: dict[str, torch.Tensor] = {}
        for fold in folds(job):
            scales = self._search(job, fold, found)
            if scales is not None:
                changed |= fold.apply(job, scales)
                found[fold.linears[0]].divide(scales)  # the others share it
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            matrix, grid = matrix_of(module), self.grid(name)
            is_clipped = self["clip"] and grid.group >= 0 and not name.endswith(_NOT_CLIPPED)
            stored[name] = quantize(
                matrix, grid, clipped(matrix, grid, found[name]) if is_clipped else None
            )
        return stored, changed

    def _search(self, job: LayerJob, fold: Fold, found: dict[str, Inputs]) -> torch.Tensor | None:
        """The scales with the least error of outputs; None: none is better than without."""
        inputs = found[fold.linears[0]]
        mean = fold.shared(inputs.mean_K).clamp(min=1e-8)
        matrices = {}
        for name in fold.linears:
            matrix = matrix_of(job.linears[name])
            matrices[name] = matrix[:: max(1, matrix.shape[0] // _MAX_ROWS)]
        best, least = None, self._error(matrices, inputs, torch.ones_like(mean))
        for i in range(1, _NUM_TRIED):
            scales = mean ** (i / _NUM_TRIED)
            scales = scales / (scales.max() * scales.min()).sqrt()
            error = self._error(matrices, inputs, scales)
            if error < least:
                best, least = scales, error
        return best

    def _error(
        self, matrices: dict[str, torch.Tensor], inputs: Inputs, scales_K: torch.Tensor
    ) -> float:
        total = 0.0
        for name, matrix in matrices.items():
            values = rounded(matrix * scales_K, self.grid(name)) / scales_K
            total += float(output_error(values - matrix, inputs)) * matrix.shape[0]
        return total


def clipped(matrix_NK: torch.Tensor, grid: Grid, inputs: Inputs) -> torch.Tensor:
    """The clipped part of each group's range that gives the least error of outputs, groups apart."""
    assert inputs.moments_KK is not None
    width = grid.width(matrix_NK.shape[1])
    num_groups = -(-matrix_NK.shape[1] // width)
    best = torch.ones(matrix_NK.shape[0], num_groups, device=matrix_NK.device)
    least = torch.full_like(best, torch.inf)
    for shrink in _SHRINKS:
        tried = torch.full_like(best, shrink)
        error = rounded(matrix_NK, grid, tried) - matrix_NK
        of_groups = torch.empty_like(best)
        for group in range(num_groups):
            part = slice(group * width, (group + 1) * width)
            of_groups[:, group] = (
                (error[:, part] @ inputs.moments_KK[part, part]) * error[:, part]
            ).sum(1)
        is_better = of_groups < least
        best, least = torch.where(is_better, tried, best), torch.where(is_better, of_groups, least)
    return best
