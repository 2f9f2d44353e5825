"""Matrices of LLM.int8(), GOBO, low rank and ternary on the GPU at hand, timed beside bfloat16:
`python -m bench.gpu_compressed`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tidemill.kernels.cuda.tuning import time_us
from tidemill.kernels.low_rank import Factors
from tidemill.kernels.quantized_linear import Activations, Codes, Outliers
from tidemill.quant.cuda import CudaWeight
from tidemill.quant.cuda_packed import CudaQuantized

SHAPES = {"o": (4096, 4096), "gate_up": (28672, 4096)}
ROWS = (1, 16, 256, 2048)


def int8(num_out: int, num_in: int, threshold: float | None = 6.0) -> Codes:
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    scales = torch.full((num_out, 1), 1 / 73 / num_in**0.5)
    activations = None if threshold is None else Activations(threshold=threshold)
    return Codes(8, codes, scales, None, group=num_in, activations=activations)


def gobo(num_out: int, num_in: int) -> Codes:
    codes = torch.randint(0, 8, (num_out, num_in), dtype=torch.int8)
    table = torch.zeros(16)
    table[:8] = torch.linspace(-2, 2, 8) / num_in**0.5
    places = torch.randperm(num_out * num_in)[: num_out * num_in // 1000].sort().values
    outliers = Outliers(places, torch.randn(places.numel()) * 5 / num_in**0.5)
    return Codes(
        4, codes, torch.ones(num_out, 1), None, group=num_in, table=table, outliers=outliers
    )


def ternary(num_out: int, num_in: int) -> Codes:
    """As TQ2_0."""
    codes = torch.randint(-1, 2, (num_out, num_in), dtype=torch.int8)
    scales = torch.full((num_out, num_in // 256), num_in**-0.5)
    return Codes(2, codes, scales, None, group=256, activations=Activations())


def low_rank(num_out: int, num_in: int) -> Factors:
    rank = num_out * num_in // (num_out + num_in) // 4 // 64 * 64
    b, a = torch.randn(num_out, rank) * rank**-0.5, torch.randn(rank, num_in) * num_in**-0.5
    return Factors(b.to("cuda", torch.bfloat16), a.to("cuda", torch.bfloat16))


KINDS: dict[str, Callable[[int, int], Any]] = {
    "LLM.int8()": int8, "int8, weight only": partial(int8, threshold=None), "GOBO": gobo, "ternary": ternary,
    "a quarter by rank": low_rank,
}  # fmt: skip


def time_matrix(name: str, kind: str) -> None:
    torch.manual_seed(0)
    num_out, num_in = SHAPES[name]
    part = KINDS[kind](num_out, num_in)
    values = (part.product() if isinstance(part, Factors) else part.dequantize()).to("cuda")
    weight = CudaQuantized().join([part], None)
    plain = CudaWeight(values.bfloat16(), None, False)
    x = torch.randn(2048, num_in, device="cuda", dtype=torch.bfloat16)
    print(f"{kind} {name}: {type(weight).__name__}", flush=True)
    for rows in ROWS:
        given = x[:rows].clone()
        took, other = (time_us([partial(one, given)] * 4, 5) for one in (weight, plain))
        print(
            f"    M={rows}: {took:.1f} us, bfloat16 {other:.1f} ({other / took:.2f}x)", flush=True
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in SHAPES:
        for kind in KINDS:
            time_matrix(name, kind)


if __name__ == "__main__":
    main()
