"""2:4 sparse weights on the GPU at hand, beside dense ones, at the shapes of an 8B Llama: `python -m bench.gpu_sparse`

By cuSPARSELt (each of its algorithms that works) and by CUTLASS, as torch has them: the time, the error, whether it can be
captured, and whether a row has the same bits at other numbers of rows, which batch invariance asks for, and as with dense
weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidemill.kernels.cuda.elementwise import Scaled
from tidemill.kernels.cuda.gemm import matmul
from tidemill.kernels.cuda.scaled_gemm import gemm_scaled
from tidemill.kernels.cuda.tuning import time_us

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 64, 256, 2048)
LEAST = 16  # rows, to which fewer are filled up
Call = Callable[[torch.Tensor], torch.Tensor]  # [T, K] to [T, N]


def pruned(num_out: int, num_in: int) -> torch.Tensor:
    weight = torch.randn(num_out, num_in, device="cuda")
    groups = weight.unflatten(1, (-1, 4))
    keep = torch.zeros_like(groups).scatter_(2, groups.abs().topk(2, 2).indices, 1)
    return (groups * keep).flatten(1) / num_in**0.5


def padded(call: Call) -> Call:
    def run(x: torch.Tensor) -> torch.Tensor:
        missing = -x.shape[0] % LEAST
        given = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return call(given)[: x.shape[0]]

    return run


def library(packed: torch.Tensor, algorithm: int, **more: Any) -> Call:
    return padded(lambda x: torch._cslt_sparse_mm(packed, x.t(), alg_id=algorithm, transpose_result=True, **more))


def cutlass(weight: torch.Tensor) -> Call:
    from torch.sparse import SparseSemiStructuredTensorCUTLASS as Sparse

    made = Sparse.from_dense(weight)
    packed, meta = made.packed, made.meta
    assert packed is not None
    assert meta is not None
    return padded(lambda x: torch._sparse_semi_structured_mm(packed, meta, x.t()).t())


def bits(call: Call, x: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Numbers of rows at which some have other bits."""
    return [num for num in (1, 5, 16, 33, 64, 100, 256, 700) if not torch.equal(call(x[:num].clone()), whole[:num])]


def measure(name: str, kind: str) -> list[dict[str, Any]]:
    num_out, num_in = SHAPES[name]
    weight = pruned(num_out, num_in)
    if kind == "bf16":
        values = weight.bfloat16()
        dense: Call = lambda x: matmul(x, values, None, "")  # noqa: E731
        more: dict[str, Any] = {}
    else:
        values = (weight / (weight.abs().amax() / 127)).round().to(torch.int8)
        ones = torch.ones(num_out, device="cuda")
        dense = lambda x: gemm_scaled(Scaled(x, torch.ones(x.shape[0], device="cuda")), Scaled(values, ones), torch.float32)  # noqa: E731
        more = {"out_dtype": torch.int32}
    x = torch.randn(2048, num_in, device="cuda")
    x = x.bfloat16() if kind == "bf16" else (x * 20).round().clamp(-127, 127).to(torch.int8)
    packed = torch._cslt_compress(values)
    calls: dict[str, Call] = {f"cuSPARSELt {i}": library(packed, i, **more) for i in range(4)}
    if kind == "bf16":
        calls["CUTLASS"] = cutlass(values)
    exact = x[:700].float() @ values.float().t()
    lines = []
    for label, call in calls.items():
        try:
            whole = call(x[:700].clone())
            off = float((whole.float() - exact).norm() / exact.norm())
            wrong = bits(call, x, whole)
            same = torch.equal(whole.float(), dense(x[:700].clone()).float())
        except Exception as failure:
            print(f"  {kind} {name} {label}: {type(failure).__name__}: {str(failure).splitlines()[0][:120]}", flush=True)
            continue
        print(f"  {kind} {name} {label}: error {off:.5f}; other bits at rows {wrong or 'none'}; dense's bits: {same}", flush=True)
        for rows in ROWS:
            given = x[:rows].clone()
            try:
                took, other = (time_us([partial(one, given)] * 4, 5) for one in (call, dense))
            except Exception as failure:
                print(f"    M={rows}: not captured: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}", flush=True)
                continue
            lines.append(
                {"kind": kind, "name": name, "by": label, "rows": rows, "us": took, "dense_us": other, "same": not wrong}
            )
            print(f"    M={rows}: {took:.1f} us, dense {other:.1f} ({other / took:.2f}x)", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bf16,int8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    names = list(filter(None, given.shapes.split(",")))
    lines = [line for kind in given.kinds.split(",") for name in names for line in measure(name, kind)]
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
