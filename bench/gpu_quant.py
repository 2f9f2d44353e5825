"""Matmuls of quantized weights on the GPU at hand, at the shapes of an 8B Llama, timed beside
bfloat16 and what memory and tensor cores allow.

    python -m bench.gpu_quant [--only bf16,fp8,single,packed,many,roles] [--seconds 200]

Each part stands for itself: if one fails, its traceback is printed and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton

from tidemill.kernels.cuda import gemm, hopper_packed
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.cuda.packed_gemm import (
    Packed,
    PackedTile,
    dequantize,
    gemm_chunked,
    gemm_packed,
    pack,
)
from tidemill.kernels.cuda.rounding import LARGEST, Scaled
from tidemill.kernels.cuda.scaled_gemm import (
    ScaledTile,
    gemm_scaled,
    quantize_blocks,
    quantize_rows,
)
from tidemill.kernels.cuda.tuning import time_us

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
BANDWIDTH = 4.25e12  # bytes a second, measured
FLOPS = {"bf16": 808e12, "fp8": 1600e12}  # of dense products, about
UNCACHED = 200 * 2**20
FP8 = torch.float8_e4m3fn
RESULT: dict[str, Any] = {"best": {}, "times": []}


# ---- weights


def new_scaled(num_out: int, num_in: int, dtype: torch.dtype = FP8, blocks: bool = False) -> Scaled:
    weight = torch.randn(num_out, num_in, device="cuda") / num_in**0.5
    largest = LARGEST[dtype]
    if blocks:
        tops = weight.unflatten(1, (-1, 128)).abs().amax(2)
        values = weight / (tops / largest).repeat_interleave(128, 1)
        return Scaled(values.to(dtype), (tops / largest).t().contiguous())
    scales = weight.abs().amax(1) / largest
    values = weight / scales[:, None]
    return Scaled((values if dtype.is_floating_point else values.round()).to(dtype), scales)


FORMATS: dict[str, tuple[Any, ...]] = {
    "w4 g128": (4, "middle", 128),
    "w4 g128 zeros": (4, "zeros", 128),
    "w4 g128 planes of 32": (4, "zeros", 128, 32),
    "w4 g128 in one chunk": (4, "zeros", 128, 64, 1 << 20),
    "w4 g32 offsets (Q4_K)": (4, "offsets", 32),
    "w8 channel": (8, "zeros", 0),
    "w8 g32 (Q8_0)": (8, "zeros", 32),
    "nf4 g64": (4, "nf4", 64),
    "e2m1 g32 (mxfp4)": (4, "e2m1", 32),
    "ternary": (2, "zeros", 0),
}


def new_packed(
    num_out: int, num_in: int, bits: int, kind: str, group: int, plane: int = 0, chunk: int = 0
) -> Packed:
    low, high = (-127, 128) if bits == 8 else (0, 3) if bits == 2 else (0, 16)
    codes = torch.randint(low, high, (num_out, num_in), device="cuda", dtype=torch.int8)
    groups = num_in // (group or num_in)
    scales = (
        (torch.rand(num_out, groups, device="cuda") + 0.5) / num_in**0.5 / (64 if bits == 8 else 4)
    )
    if kind == "offsets":
        others = -7.5 * scales
    elif kind == "middle":
        kind, others = "zeros", torch.full_like(scales, 8.0)
    else:
        others = (
            torch.full_like(scales, 1.0)
            if bits == 2
            else torch.randint(6, 10, scales.shape, device="cuda").float()
        )
    return pack(
        codes, bits, kind, scales, None if bits == 8 and kind == "zeros" else others, plane, chunk
    )


def copies(make: Callable[[], Any], num_bytes: float) -> list[Any]:
    first = make()
    return [first, *(_clone(first) for _ in range(max(1, math.ceil(UNCACHED / num_bytes) - 1)))]


def _clone(weight: Any) -> Any:
    if isinstance(weight, Scaled):
        return Scaled(weight.values_NK.clone(), weight.scales.clone())
    if isinstance(weight, Packed):
        kept = weight.bits, weight.kind, weight.plane, weight.group, weight.num_in, weight.chunk
        return Packed(*kept, weight.words_NW.clone(), weight.scales_GN.clone())
    return weight.clone()


def act_of(name: str) -> str:
    return "silu" if name == "gate_up" else ""


# ---- tiles to try, by rows

SCALED: dict[int, list[tuple[int, ...]]] = {
    16: [
        (16, 64, 128, 8, 4, 1), (16, 64, 256, 4, 4, 1), (16, 64, 256, 6, 4, 1), (16, 64, 512, 3, 4, 1), (16, 128, 128, 6, 4, 1),
        (16, 128, 256, 4, 4, 1), (16, 128, 256, 4, 8, 1), (64, 16, 256, 5, 4), (64, 32, 128, 8, 4), (64, 32, 256, 5, 4),
        (64, 32, 512, 3, 4), (64, 64, 256, 5, 4),
    ],
    64: [
        (64, 32, 256, 5, 4), (64, 64, 128, 8, 4), (64, 64, 256, 5, 4), (64, 128, 128, 6, 4), (64, 128, 256, 3, 4),
        (64, 256, 128, 4, 8),
        (64, 64, 256, 5, 4, 1), (64, 128, 128, 6, 4, 1), (64, 128, 256, 3, 8, 1),
    ],
    128: [
        (128, 64, 128, 6, 4), (128, 64, 256, 4, 4), (128, 128, 128, 5, 4), (128, 128, 128, 6, 8), (128, 256, 128, 4, 8),
        (128, 64, 128, 6, 4, 1), (128, 128, 128, 6, 8, 1), (64, 128, 128, 6, 4), (64, 64, 128, 8, 4),
    ],
    256: [
        (128, 64, 128, 6, 4), (128, 128, 128, 5, 4), (128, 128, 128, 6, 8), (128, 256, 128, 4, 8), (256, 64, 128, 5, 8),
        (256, 128, 128, 4, 8), (64, 128, 128, 6, 4), (128, 256, 128, 3, 8), (256, 64, 128, 5, 8, 1), (256, 128, 128, 4, 8, 1),
    ],
    2048: [
        (128, 256, 128, 4, 8), (256, 128, 128, 4, 8), (128, 256, 128, 3, 8), (256, 128, 128, 3, 8), (128, 128, 128, 3, 4),
        (128, 128, 128, 5, 8), (128, 256, 64, 5, 8), (256, 128, 128, 4, 8, 1),
    ],
}  # fmt: skip
PACKED: dict[int, list[tuple[int, ...]]] = {
    1: [
        (8, 32, 3, 2, 0, 1), (8, 32, 4, 2, 0, 1), (8, 32, 6, 2, 0, 1), (8, 64, 4, 4, 0, 1), (8, 64, 3, 4, 0, 1),
        (8, 16, 4, 1, 0, 1), (8, 16, 6, 1, 0, 1), (8, 128, 3, 8, 0, 1), (16, 64, 3, 2, 0, 1), (16, 64, 4, 4, 0, 1),
    ],
    16: [
        (16, 32, 3, 2, 0, 1), (16, 32, 5, 2, 0, 1), (16, 64, 3, 2, 0, 1), (16, 64, 3, 4, 0, 1), (16, 64, 5, 4, 0, 1),
        (16, 16, 5, 1, 0, 1), (16, 128, 4, 4, 0, 1),
    ],
    64: [
        (64, 64, 3, 4, 0, 1), (64, 32, 3, 2, 0, 1), (64, 128, 3, 8, 0, 1), (64, 64, 3, 4, 1, 1), (64, 64, 2, 4, 1, 1),
        (64, 128, 2, 8, 1, 1), (32, 64, 3, 4, 0, 1),
    ],
    256: [
        (128, 128, 2, 8, 1), (256, 128, 3, 8, 1), (128, 64, 3, 4, 1), (128, 64, 2, 4, 1), (128, 128, 2, 8, 1, 0, 1),
        (128, 128, 3, 8, 1, 0, 1), (128, 256, 2, 8, 1, 0, 1), (128, 64, 2, 4, 1, 0, 1), (64, 128, 2, 4, 1, 0, 1),
        (128, 128, 2, 8, 1, 1), (128, 64, 2, 4, 1, 1),
    ],
}  # fmt: skip
FEW: dict[int, list[tuple[int, ...]]] = {
    1: [(8, 32, 4, 2, 0, 1), (8, 64, 3, 4, 0, 1)],
    256: [(128, 128, 2, 8, 1), (128, 128, 2, 8, 1, 0, 1)],
}
CHUNKED = [
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 2, 8),
    (256, 128, 64, 3, 16),
    (128, 256, 64, 3, 16),
]


def nearest(table: dict[int, list[tuple[int, ...]]], rows: int) -> list[tuple[int, ...]]:
    return table[min((size for size in table if size >= rows), default=max(table))]


# ---- checked


# ---- timed


@dataclass
class Case:
    kind: str
    name: str
    rows: int
    tile: tuple[int, ...]
    weights: list[Any]
    call: Callable[[Any], Any]  # of a weight
    floor: float


def time_cases(cases: list[Case], until: float) -> None:
    """And whether all tiles have the same bits."""
    seen: dict[tuple[int, ...], float] = {}
    expected = None
    for case in cases:
        if time.monotonic() > until:
            print("no time left", flush=True)
            break
        try:
            out = case.call(case.weights[0])
            expected = out if expected is None else expected
            note = "" if torch.equal(out, expected) else "   <<< OTHER BITS"
            took = time_us([partial(case.call, weight) for weight in case.weights], 3)
            print(
                f"  {case.kind} {case.name} M={case.rows} {case.tile}: {took:.1f} us ({case.floor:.1f}){note}",
                flush=True,
            )
            seen[case.tile] = took
        except Exception as failure:
            print(
                f"  {case.kind} {case.name} M={case.rows} {case.tile}: {type(failure).__name__}: {str(failure)[:120]}",
                flush=True,
            )
    if seen:
        best = min(seen, key=lambda tile: seen[tile])
        note_best(cases[0], best, seen[best])


def note_best(case: Case, tile: tuple[int, ...], took: float) -> None:
    RESULT["times"].append(
        {
            "kind": case.kind,
            "name": case.name,
            "rows": case.rows,
            "tile": tile,
            "us": took,
            "floor": case.floor,
        }
    )
    RESULT["best"].setdefault(case.kind, {}).setdefault(case.name, {})[case.rows] = tile


def floor_us(num_bytes: float, rows: int, num_out: int, num_in: int, unit: str) -> float:
    return (
        max(
            (num_bytes + rows * (num_in + num_out) * 2) / BANDWIDTH,
            2 * rows * num_out * num_in / FLOPS[unit],
        )
        * 1e6
    )


def scaled_cases(kind: str, rows_to_try: Iterable[int], names: Iterable[str]) -> list[list[Case]]:
    made = []
    dtype, blocks = torch.int8 if kind == "int8" else FP8, kind == "fp8 blocks"
    for name in names:
        num_out, num_in = SHAPES[name]
        weights = weights_of(kind, name)
        for rows in rows_to_try:
            x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
            given = (quantize_blocks if blocks else quantize_rows)(x, dtype, num_in)
            tiles = [one for one in nearest(SCALED, rows) if not blocks or one[2] == 128]
            floor = floor_us(num_out * num_in, rows, num_out, num_in, "fp8")
            made.append([
                Case(kind, name, rows, tile, weights,
                     lambda w, t=tile, g=given, n=name: gemm_scaled(g, w, torch.bfloat16, ScaledTile(*t), act=act_of(n)), floor)
                for tile in tiles
            ])  # fmt: skip
            if kind == "fp8" and rows > 512:  # as served: by roles
                served = lambda w, g=given, n=name: gemm_scaled(g, w, torch.bfloat16, act=act_of(n))  # noqa: E731
                made[-1].append(Case(kind, name, rows, (), weights, served, floor))
    return made


@cache
def weights_of(kind: str, name: str) -> list[Any]:
    num_out, num_in = SHAPES[name]
    if kind in FORMATS:
        bits = FORMATS[kind][0]
        return copies(
            lambda: new_packed(num_out, num_in, *FORMATS[kind]), num_out * num_in * bits / 8
        )
    if kind == "bf16":
        return copies(
            lambda: torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16),
            num_out * num_in * 2,
        )
    return copies(
        lambda: new_scaled(
            num_out, num_in, torch.int8 if kind == "int8" else FP8, kind == "fp8 blocks"
        ),
        num_out * num_in,
    )


def packed_cases(
    kind: str,
    rows_to_try: Iterable[int],
    names: Iterable[str],
    tiles: dict[int, list[tuple[int, ...]]] = PACKED,
) -> list[list[Case]]:
    made = []
    for name in names:
        num_out, num_in = SHAPES[name]
        weights = weights_of(kind, name)
        for rows in rows_to_try:
            x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
            floor = floor_us(weights[0].num_bytes, rows, num_out, num_in, "bf16")
            made.append([
                Case(kind, name, rows, tile, weights,
                     lambda w, t=tile, x=x, n=name: gemm_packed(x, w, PackedTile(*t), act=act_of(n)), floor)
                for tile in nearest(tiles, rows)
            ])  # fmt: skip
    return made


def compile_cases(cases: list[list[Case]]) -> None:
    begin = time.monotonic()
    done: set[Any] = set()
    with compile_elsewhere(), compile_only():
        for group in cases:
            for case in group:
                key = (
                    case.kind,
                    case.name if case.kind.endswith("roles") else act_of(case.name),
                    case.tile,
                )
                if key not in done:
                    done.add(key)
                    try:
                        case.call(case.weights[0])
                    except Exception as failure:
                        print(
                            f"compile {key}: {type(failure).__name__}: {str(failure)[:200]}",
                            flush=True,
                        )
    print(f"compiled {len(done)} kernels in {time.monotonic() - begin:.1f} s", flush=True)


def time_bf16(rows_to_try: Iterable[int]) -> None:
    """What there is today, for the ratio."""
    for name in SHAPES:
        for rows in rows_to_try:
            x = torch.randn(rows, SHAPES[name][1], device="cuda", dtype=torch.bfloat16)
            took = time_us(
                [partial(gemm.matmul, x, w, None, act_of(name)) for w in weights_of("bf16", name)],
                3,
            )
            floor = floor_us(math.prod(SHAPES[name]) * 2, rows, *SHAPES[name], "bf16")
            print(f"  bf16 {name} M={rows}: {took:.1f} us ({floor:.1f})", flush=True)
            RESULT["times"].append(
                {"kind": "bf16", "name": name, "rows": rows, "tile": (), "us": took, "floor": floor}
            )
    weights_of.cache_clear()


def time_quantizers() -> None:
    for rows in (1, 256, 2048):
        for width in (4096, 14336):
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            by_row = time_us([partial(quantize_rows, x, FP8, width)] * 20, 5)
            by_block = time_us([partial(quantize_blocks, x, FP8, width)] * 20, 5)
            print(
                f"  quantize {rows} x {width}: {by_row:.2f} us a row's scale, {by_block:.2f} us blocks",
                flush=True,
            )


def time_library() -> None:
    """torch's fp8 matmul with a scale for each row and column: its time, and whether it has our
    bits."""
    for name, (_, num_in) in SHAPES.items():
        weights = weights_of("fp8", name)
        for rows in (16, 256, 2048):
            given = quantize_rows(
                torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16), FP8, num_in
            )
            for fast in (True, False):

                def call(w: Scaled, fast: bool = fast, given: Scaled = given) -> torch.Tensor:
                    return torch._scaled_mm(given.values_NK, w.values_NK.t(), given.scales[:, None], w.scales[None, :],
                                            out_dtype=torch.bfloat16, use_fast_accum=fast)  # fmt: skip

                same = torch.equal(call(weights[0]), gemm_scaled(given, weights[0], torch.bfloat16))
                took = time_us([partial(call, w) for w in weights], 3)
                print(
                    f"  torch._scaled_mm {name} M={rows} fast {fast}: {took:.1f} us; our bits: {same}",
                    flush=True,
                )


def run_cases(cases: list[list[Case]], until: float) -> None:
    compile_cases(cases)
    for group in cases:
        time_cases(group, until)


def time_fp8(until: float) -> None:
    run_cases(scaled_cases("fp8", (1, 16, 64, 128, 256, 2048), SHAPES), until)
    time_quantizers()
    time_library()


CHUNKS = {4096: (4096, 2048, 1024, 512), 14336: (7168, 3584, 2048, 1024)}


def time_packed(until: float) -> None:
    """Chunks first: which are best decides what sums are."""
    cases = []
    for kind, how in {
        "w4 g128": (4, "zeros", 128),
        "w4 g32 offsets (Q4_K)": (4, "offsets", 32),
    }.items():
        for name, (_, num_in) in SHAPES.items():
            for place, chunk in enumerate(CHUNKS[num_in][: 4 if kind == "w4 g128" else 3]):
                label = f"{kind} chunks of {chunk}"
                FORMATS[label] = (*how, 64, chunk)
                rows = (
                    (1,)
                    if kind != "w4 g128" or place == 3
                    else (1, 16, 64, 256)
                    if place % 2 == 0
                    else (1, 16)
                )
                cases += packed_cases(label, rows, (name,))
    run_cases(cases, until)
    for name, (num_out, num_in) in SHAPES.items():
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(2048, num_in, device="cuda", dtype=torch.bfloat16)
        for chunk in CHUNKS[num_in]:
            for tile in CHUNKED:
                try:
                    took = time_us(
                        [partial(gemm_chunked, x, weight, chunk, tile=tile, act=act_of(name))] * 3,
                        3,
                    )
                    print(
                        f"  chunked bf16 {name} M=2048 chunks of {chunk} {tile}: {took:.1f} us",
                        flush=True,
                    )
                except Exception as failure:
                    print(
                        f"  chunked bf16 {name} {chunk} {tile}: {type(failure).__name__} {str(failure)[:80]}",
                        flush=True,
                    )


SINGLE: dict[str, list[tuple[int, ...]]] = {
    "gate_up": [
        (16, 64, 5, 2), (8, 64, 5, 2), (8, 64, 8, 2), (8, 64, 5, 4), (8, 32, 6, 1), (8, 32, 8, 2), (8, 32, 5, 2), (8, 128, 4, 4),
        (8, 128, 5, 8), (8, 16, 8, 1), (16, 32, 6, 1),
    ],
    "": [
        (8, 64, 3, 4, 0, 1), (8, 64, 4, 2, 0, 1), (8, 64, 6, 2, 0, 1), (8, 32, 6, 1, 0, 1), (8, 32, 4, 2, 0, 1),
        (8, 64, 6, 4, 0, 1), (8, 16, 8, 1, 0, 1),
    ],
}  # fmt: skip


def time_single(until: float) -> None:
    """One row, by the bytes of the weight."""
    cases = [
        one
        for kind in ("w4 g128", "w4 g32 offsets (Q4_K)")
        for name in SHAPES
        for one in packed_cases(kind, (1,), (name,), {1: SINGLE.get(name, SINGLE[""])})
    ]
    run_cases(cases, until)


def time_many(until: float) -> None:
    """Dequantized into a buffer first; and formats that only one shape is tried with."""
    cases = [
        one
        for kind in FORMATS
        for one in packed_cases(kind, (1, 256), ("gate_up",), FEW)
        if "w4" not in kind
    ]
    cases += [
        one
        for kind in ("fp8 blocks", "int8")
        for one in scaled_cases(kind, (1, 256, 2048), ("gate_up",))
    ]
    run_cases(cases, until)
    for name, shape in SHAPES.items():
        weights, buffer = (
            weights_of("w4 g128", name),
            torch.empty(shape, device="cuda", dtype=torch.bfloat16),
        )
        took = time_us([partial(dequantize, w, out=buffer) for w in weights], 3)
        print(
            f"  dequantize w4 g128 {name}: {took:.1f} us ({math.prod(shape) * 2.5 / BANDWIDTH * 1e6:.1f})",
            flush=True,
        )


ROLES: dict[int, list[tuple[int, ...]]] = {
    64: [(64, 64, 8, 4), (64, 128, 8, 4), (64, 128, 8, 4, 1)],
    128: [(128, 64, 6, 4), (128, 128, 6, 4, 1), (128, 128, 3, 2, 1), (128, 64, 6, 4, 1)],
    256: [
        (128, 64, 6, 4),
        (128, 128, 6, 3),
        (256, 64, 3, 4),
        (256, 128, 3, 2, 1),
        (256, 128, 4, 4, 1),
        (128, 128, 6, 4, 1),
    ],
    2048: [(128, 128, 6, 3), (256, 64, 3, 4), (256, 128, 3, 2)],
}
ROLES_32: dict[int, list[tuple[int, ...]]] = {  # planes of 32: buffers are half as large
    64: [(64, 128, 8, 4), (64, 128, 12, 6), (64, 64, 12, 6)],
    128: [(128, 128, 8, 4), (128, 128, 8, 6), (128, 128, 8, 4, 1)],
    256: [
        (128, 128, 8, 4),
        (256, 128, 6, 4),
        (256, 128, 8, 3),
        (256, 128, 6, 4, 1),
        (256, 128, 8, 6, 1),
    ],
    2048: [(128, 128, 8, 4), (256, 128, 6, 4)],
}


def time_roles(until: float) -> None:
    """Beside the kernel without them."""
    cases = []
    for kind, rows_to_try in (("w4 g128", (64, 128, 256)), ("w4 g32 offsets (Q4_K)", (128, 256))):
        for name in SHAPES:
            cases += [roles_cases(kind, name, rows) for rows in rows_to_try]
    run_cases(cases, until)


def roles_cases(kind: str, name: str, rows: int) -> list[Case]:
    """And the kernel without them, in its best tile."""
    num_out, num_in = SHAPES[name]
    weights = weights_of(kind, name)
    x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
    floor = floor_us(weights[0].num_bytes, rows, num_out, num_in, "bf16")
    made = [
        Case(f"{kind} by roles", name, rows, tile, weights,
             lambda w, t=tile: hopper_packed.gemm_warp_specialized(x, w, hopper_packed.HopperTile(*t), act=act_of(name)), floor)
        for tile in nearest(ROLES_32 if weights[0].plane == 32 else ROLES, rows)
    ]  # fmt: skip
    if rows <= 512:
        made.append(
            Case(
                kind, name, rows, (), weights, lambda w: gemm_packed(x, w, act=act_of(name)), floor
            )
        )
    return made


def summary() -> None:
    times = {(one["kind"], one["name"], one["rows"]): one for one in RESULT["times"]}
    print("\nmicroseconds, best tile (floor); last: all linears of 32 layers, ms")
    for kind in dict.fromkeys(one["kind"] for one in RESULT["times"]):
        for rows in sorted({one["rows"] for one in RESULT["times"] if one["kind"] == kind}):
            line = [times.get((kind, name, rows)) for name in SHAPES]
            cells = [
                "-" if one is None else f"{one['us']:.1f} ({one['floor']:.1f}) {list(one['tile'])}"
                for one in line
            ]
            whole = (
                f"{sum(one['us'] for one in line if one is not None) * LAYERS / 1000:.2f}"
                if None not in line
                else "-"
            )
            print(f"{kind:24} M={rows:5} | {' | '.join(cells)} | {whole}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="bf16,fp8,single,packed,roles,many")
    parser.add_argument("--json")
    parser.add_argument(
        "--seconds", type=float, default=200, help="after which nothing new is timed"
    )
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}",
        flush=True,
    )
    until = time.monotonic() + options.seconds
    parts: dict[str, Callable[[], None]] = {
        "bf16": lambda: time_bf16((1, 16, 64, 128, 256, 2048)), "fp8": lambda: time_fp8(until),
        "single": lambda: time_single(until), "packed": lambda: time_packed(until), "many": lambda: time_many(until),
        "roles": lambda: time_roles(until),
    }  # fmt: skip
    for name in options.only.split(","):
        begin = time.monotonic()
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    summary()
    if options.json:
        Path(options.json).write_text(json.dumps(RESULT, indent=1, default=astuple))


if __name__ == "__main__":
    main()
