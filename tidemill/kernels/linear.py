"""y = x Wᵀ + b in float32 with the same bits for a row at every number of rows.

A BLAS picks another routine, and so another order of summation, by the number of rows; a token's result would then depend on
its batch. Three ways to avoid it, fastest first; the first that proves row-invariant on this machine for this shape is taken:

- onednn: the weight packed once into oneDNN's layout. Measured on Neoverse-N1: invariant from 1 row up, and 1.3 to 4 times as
  fast as the plain BLAS at few rows, since the BLAS repacks the weight at every call.
- blas: the transposed weight and at least two rows (one row would take the matrix-vector routine).
- tiles: always 32 rows at a time, so that every call has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F

LinearFn: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_TILE = 32
_MAX_ROWS = 512  # of one product; more are done in turns, so that no number of rows goes unprobed
_PROBE_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 128, 256, _MAX_ROWS)
_PROBE_WIDTH = 512  # output features used for the probe: their number does not change how one of them is summed


def linear_reference(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x_TK, weight_NK, bias_N)


def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearFn:
    """Take over a weight; the caller may free its own copy."""
    name = choose_backend(min(weight_NK.shape[0], _PROBE_WIDTH), weight_NK.shape[1], torch.get_num_threads())
    linear = BACKENDS[name](weight_NK, bias_N)

    def apply(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= _MAX_ROWS:
            return linear(x)
        return torch.cat([linear(part) for part in x.split(_MAX_ROWS)])

    return apply


@cache
def choose_backend(num_out: int, num_in: int, num_threads: int) -> str:
    """The first backend whose rows keep their bits for this shape on this machine."""
    generator = torch.Generator().manual_seed(num_out * 7919 + num_in)
    weight = torch.randn(num_out, num_in, generator=generator)
    x = torch.randn(max(_PROBE_ROWS), num_in, generator=generator)
    for name, make in BACKENDS.items():
        try:
            if is_row_invariant(make(weight, None), x):
                return name
        except (RuntimeError, AttributeError):  # an op this build of torch does not have
            continue
    return "tiles"


def is_row_invariant(linear: LinearFn, x: torch.Tensor) -> bool:
    whole = linear(x)
    for num_rows in _PROBE_ROWS:
        for start in (0, x.shape[0] - num_rows):
            if not torch.equal(linear(x[start : start + num_rows].clone()), whole[start : start + num_rows]):
                return False
    return True


def _onednn(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> LinearFn:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias_N, "none", [], "")


def _blas(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> LinearFn:
    weight_KN = weight_NK.t().contiguous()

    def apply(x: torch.Tensor) -> torch.Tensor:
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        out = torch.mm(rows, weight_KN)[: x.shape[0]]
        return out if bias_N is None else out + bias_N

    return apply


def _tiles(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> LinearFn:
    weight_KN = weight_NK.t().contiguous()

    def apply(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % _TILE))
        out = torch.cat([torch.mm(tile, weight_KN) for tile in padded.split(_TILE)])[: x.shape[0]]
        return out if bias_N is None else out + bias_N

    return apply


BACKENDS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], LinearFn]] = {
    "onednn": _onednn,
    "blas": _blas,
    "tiles": _tiles,
}
