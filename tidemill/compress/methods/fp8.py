"""8-bit floats (E4M3) with a scale for the matrix, each row, or blocks of 128 × 128."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import CHANNEL, TENSOR
from tidemill.compress.methods.base import TOKEN, Method, among, with_activations
from tidemill.compress.methods.inputs import collect
from tidemill.compress.stored import Fp8Weight, Stored
from tidemill.compress.walk import LayerJob

MOST = 448.0  # of E4M3
BLOCK = 128


class FP8(Method):
    name = "fp8"
    defaults: ClassVar[dict[str, Any]] = {"weights": CHANNEL, "activations": TOKEN, "static": False}
    limits: ClassVar[dict[str, Any]] = {"weights": among(TENSOR, CHANNEL, "block")}
    formats = ("compressed-tensors", "fp8")

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        found = collect(job) if self.needs_text else {}
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            weight = to_fp8(matrix_of(module), self["weights"])
            with_activations(
                weight,
                self["activations"],
                found[name].largest if name in found else None,
                int(MOST),
            )
            stored[name] = weight
        return stored, {}


def to_fp8(matrix_NK: torch.Tensor, per: str) -> Fp8Weight:
    num_out, width = matrix_NK.shape
    rows, columns = {TENSOR: (num_out, width), CHANNEL: (1, width)}.get(per, (BLOCK, BLOCK))
    num_rows, num_columns = -(-num_out // rows), -(-width // columns)
    padded = torch.zeros(num_rows * rows, num_columns * columns, device=matrix_NK.device)
    padded[:num_out, :width] = matrix_NK
    scales = (padded.abs().view(num_rows, rows, num_columns, columns).amax((1, 3)) / MOST).clamp(
        min=1e-12
    )
    wide = scales.repeat_interleave(rows, 0)[:num_out].repeat_interleave(columns, 1)[:, :width]
    values = (matrix_NK / wide).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales, rows, columns)
