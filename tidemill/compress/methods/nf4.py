"""NF4: sixteen numbers that a Gaussian's values are nearest to, times the largest absolute value of
64 consecutive ones, which may be quantized to 8 bits itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.methods.base import Method, among
from tidemill.compress.stored import Stored, TableWeight
from tidemill.compress.walk import LayerJob

# The published numbers: quantiles of the normal distribution, scaled to -1 to 1, with an exact 0.
NF4_TABLE = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
_NESTED_BLOCK = 256
_EXPONENTS = 7


class NF4(Method):
    """`double`: scales are quantized, too."""

    name = "nf4"
    defaults: ClassVar[dict[str, Any]] = {"group": 64, "double": True}
    limits: ClassVar[dict[str, Any]] = {"group": among(64, 128, 256, 512, 1024, 2048, 4096)}
    formats = ("bitsandbytes",)

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        return {
            name: nf4(matrix_of(module), self["group"], self["double"])
            for name, module in job.linears.items()
        }, {}


def nf4(matrix_NK: torch.Tensor, block: int, is_double: bool) -> TableWeight:
    flat = matrix_NK.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % block)]).view(-1, block)
    largest = padded.abs().amax(1).clamp(min=1e-12)
    weight = TableWeight(torch.empty(0), NF4_TABLE.to(flat.device), block, largest)
    if is_double:
        offset = largest.mean()
        shifted = largest - offset
        parts = torch.cat([shifted, shifted.new_zeros(-shifted.numel() % _NESTED_BLOCK)]).view(
            -1, _NESTED_BLOCK
        )
        of_parts = parts.abs().amax(1).clamp(min=1e-12)
        table = dynamic_table().to(flat.device)
        codes = nearest(parts / of_parts[:, None], table).view(-1)[: largest.numel()]
        weight.largest, weight.nested_codes, weight.nested_table = (
            None,
            codes.to(torch.uint8),
            table,
        )
        weight.nested_largest, weight.nested_block, weight.nested_offset = (
            of_parts,
            _NESTED_BLOCK,
            float(offset),
        )
    scaled = padded / weight.of_blocks()[:, None]
    weight.codes_NK = (
        nearest(scaled, weight.table).to(torch.uint8).view(-1)[: flat.numel()].view(matrix_NK.shape)
    )
    return weight


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2)


def dynamic_table() -> torch.Tensor:
    """256 numbers from -1 to 1: a sign, a decimal exponent in unary, and the fraction in the bits
    that are left."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1, dtype=torch.float64)
        for value in ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - _EXPONENTS + 1)).tolist():
            values += [value, -value]
    return torch.tensor(sorted(values), dtype=torch.float64).float()
