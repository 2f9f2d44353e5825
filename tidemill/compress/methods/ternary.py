"""Ternary weights as BitNet b1.58 has them: -1, 0 or 1 times the matrix's mean absolute value;
layers may be trained for it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import TENSOR, fake_activations
from tidemill.compress.methods.base import NONE, TOKEN, Method, among, with_activations
from tidemill.compress.methods.tune import tune
from tidemill.compress.stored import IntWeight, Stored
from tidemill.compress.walk import LayerJob


class Ternary(Method):
    """`steps` of quantization-aware training of each layer; 0: none. `group`: columns that share a
    scale, if not the matrix."""

    name = "ternary"
    defaults: ClassVar[dict[str, Any]] = {
        "weights": TENSOR, "group": 128, "activations": TOKEN, "steps": 0, "rate": 2e-2,
    }  # fmt: skip
    limits: ClassVar[dict[str, Any]] = {"activations": among(NONE, TOKEN)}
    formats = ("bitnet", "compressed-tensors")

    @property
    def needs_text(self) -> bool:
        return self["steps"] > 0

    @property
    def needs_truth(self) -> bool:
        return self["steps"] > 0

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        if self["steps"]:
            rounding = {
                name: lambda matrix: _fake(matrix, self._width(matrix)) for name in job.linears
            }
            act = (
                {}
                if self["activations"] == NONE
                else {name: lambda x: fake_activations(x, True) for name in job.linears}
            )
            tune(job, rounding, act, self["steps"], self["rate"])
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            weight = ternary(matrix_of(module), self._width(matrix_of(module)))
            with_activations(weight, self["activations"], None, 127)
            stored[name] = weight
        return stored, {}

    def _width(self, matrix_NK: torch.Tensor) -> int:
        grid = self.grid("")
        return -1 if grid.group < 0 else grid.width(matrix_NK.shape[1])


def ternary(matrix_NK: torch.Tensor, width: int) -> IntWeight:
    """`width`: columns that share a scale; -1: the whole matrix."""
    num_out, num_in = matrix_NK.shape
    own = num_in if width < 0 else width
    index = torch.arange(num_in, device=matrix_NK.device) // own
    sums = torch.zeros(num_out, int(index[-1]) + 1, device=matrix_NK.device).index_add_(
        1, index, matrix_NK.abs()
    )
    scales = sums / torch.bincount(index)
    if width < 0:
        scales = scales.mean().expand_as(scales)
    scales = scales.clamp(min=2.0**-24).to(torch.float16).float().contiguous()
    codes = torch.round(matrix_NK / scales[:, index]).clamp(-1, 1)
    return IntWeight(2, codes.short(), scales, own)


def _fake(matrix_NK: torch.Tensor, width: int) -> torch.Tensor:
    with torch.no_grad():
        difference = ternary(matrix_NK, width).dequantize() - matrix_NK
    return matrix_NK + difference
