"""The rates that this machine reaches: operations, bytes read, bytes copied a second. Measured in
about a second, for estimates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.kernels.linear import pack_linear

_WIDTH, _ROWS, _TALL = 1024, 256, 16384
_TIMES = 5


@dataclass(frozen=True, slots=True)
class Rates:
    flops: float
    memory: float
    copies: float


def measure_rates() -> Rates:
    """By the compiled kernels, with the threads that are set: a matmul of many rows, one of a
    single row by a matrix larger than caches, and a copy of it."""
    matrix = torch.randn(_TALL, _WIDTH)
    wide, tall = pack_linear(matrix[:_WIDTH].clone()), pack_linear(matrix)
    many, one, copy = torch.randn(_ROWS, _WIDTH), torch.randn(1, _WIDTH), torch.empty_like(matrix)
    return Rates(
        2 * _ROWS * _WIDTH * _WIDTH / _best(lambda: wide(many)),
        matrix.nbytes / _best(lambda: tall(one)),
        matrix.nbytes / _best(lambda: copy.copy_(matrix)),
    )


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
