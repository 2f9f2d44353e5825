"""The experts' kernels on the GPU at hand, at the shape of Qwen3-30B-A3B: timed beside what memory
and tensor cores allow, and searched for the fastest tiles.

    python -m bench.gpu_moe [--only overlap,time,router,stream,search] [--seconds 70]

Each part stands for itself: if one fails, its traceback is printed and the next one runs. The
search prints lines for tiles.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from typing import Any

# the kernels do not need it, only the package's front door does
if importlib.util.find_spec("msgspec") is None:
    package = types.ModuleType("tidemill")
    package.__path__ = [str(Path(__file__).parent.parent / "tidemill")]
    sys.modules["tidemill"] = package

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda import compile_server, launch, moe, moe_direct
from tidemill.kernels.cuda.gemm import Tile, gemm
from tidemill.kernels.cuda.tuning import time_us

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 48
# read by the best kernels; of the tensor cores at the power limit
BANDWIDTH, FLOPS = 4.25e12, 700e12
EXPERT_BYTES = 3 * HIDDEN * INNER * 2
Weights = tuple[torch.Tensor, torch.Tensor]

# Tiles to try by tokens: (rows, outs, ins, stages, warps, bulk, halves), of the first product and
# of the second.
_FEW_UP = [
    (16, 32, 256, 4, 4), (16, 32, 256, 3, 2), (16, 32, 512, 3, 4), (16, 64, 256, 3, 4), (16, 64, 128, 5, 4), (16, 32, 128, 8, 4),
    (16, 32, 256, 4, 4, 1), (16, 64, 256, 3, 4, 1), (16, 64, 128, 6, 4, 1),
]  # fmt: skip
_FEW_DOWN = [
    (16, 16, 256, 4, 8), (16, 16, 256, 4, 4), (16, 16, 256, 3, 8), (16, 16, 128, 4, 8), (16, 16, 128, 4, 4), (16, 16, 128, 3, 8),
    (16, 16, 128, 7, 8), (16, 16, 64, 6, 8), (16, 32, 128, 3, 8),
]  # fmt: skip
_SOME = [
    (16, 64, 128, 5, 4), (16, 64, 256, 3, 4), (16, 32, 256, 4, 4), (16, 128, 128, 4, 4), (16, 128, 64, 6, 4),
    (16, 64, 128, 5, 4, 1), (16, 128, 128, 4, 4, 1), (16, 64, 256, 3, 4, 1),
]  # fmt: skip
_MORE = [
    (16, 128, 128, 4, 4, 1), (32, 64, 128, 5, 4), (32, 128, 128, 4, 4), (32, 128, 64, 5, 4), (32, 64, 128, 5, 4, 1),
    (32, 128, 128, 4, 4, 1), (32, 128, 64, 6, 4, 1), (32, 256, 64, 4, 8, 1),
]  # fmt: skip
_MANY = [
    (128, 128, 64, 3, 4, 1), (128, 128, 64, 3, 8, 1), (128, 128, 64, 5, 8, 1), (128, 256, 64, 4, 8, 1), (128, 256, 64, 3, 8, 1),
    (128, 128, 64, 3, 4, 1, 1), (128, 128, 64, 3, 8, 1, 1), (128, 256, 64, 4, 8, 1, 1), (256, 128, 64, 4, 8, 1),
    (256, 128, 64, 4, 8, 1, 1),
]  # fmt: skip
_MEDIUM = [
    (64, 128, 64, 5, 4, 1),
    (64, 128, 128, 3, 4, 1),
    (64, 256, 64, 4, 4, 1),
    (64, 256, 64, 4, 8, 1),
]
CANDIDATES: dict[int, tuple[list[Any], list[Any]]] = {
    1: (_FEW_UP, _FEW_DOWN), 256: (_MORE + _MEDIUM, _MORE + _MEDIUM), 2048: (_MEDIUM + _MANY, _MEDIUM + _MANY),
    64: (_SOME, _SOME), 8192: (_MANY, _MANY), 16: (_SOME, _SOME), 4: (_FEW_UP, _FEW_DOWN), 128: (_SOME + _MORE, _SOME + _MORE),
    512: (_MORE[3:] + _MEDIUM, _MORE[3:] + _MEDIUM), 32: (_SOME, _SOME),
}  # fmt: skip


def new_weights(seed: int) -> Weights:
    generator = torch.Generator("cuda").manual_seed(seed)
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    return new(EXPERTS, 2 * INNER, HIDDEN).div_(HIDDEN**0.5), new(EXPERTS, HIDDEN, INNER).div_(
        INNER**0.5
    )


def new_tokens(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
    return x, torch.randn(num, EXPERTS, device="cuda", generator=generator)


@cache
def all_weights() -> list[Weights]:
    return [new_weights(seed) for seed in (0, 1)]


# ---- checked


def run(x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
    return moe.moe(x, logits, *weights, TOP_K, True, "silu")


# ---- timed


def inputs(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the calls of a graph: few tokens need other experts each time, so that none is in the
    cache."""
    return [new_tokens(num, seed) for seed in range(20 if num <= 64 else 4)]


def floor_us(num: int, given: list[tuple[torch.Tensor, torch.Tensor]], parts: int) -> float:
    """What memory or tensor cores take at least for so many of an expert's three matrices."""
    used = [logits.topk(TOP_K, 1).indices.unique().numel() for _, logits in given]
    moved = sum(used) / len(used) * EXPERT_BYTES * parts / 3
    return max(moved / BANDWIDTH, 2 * num * TOP_K * HIDDEN * INNER * parts / FLOPS) * 1e6


def stages(
    num: int, up: Tile, down: Tile, direct: bool
) -> dict[str, tuple[list[Callable[[], Any]], float]]:
    """The calls of each stage for `time_us`, and the least time they could take."""
    given = inputs(num)
    weights = [all_weights()[i % 2] for i in range(len(given))]
    both = list(zip(given, weights, strict=True))
    if direct:
        gated: list[Callable[[], Any]] = [
            partial(moe_direct.multiply_gated_directly, x, logits, w[0], up, TOP_K, False, "silu")
            for (x, logits), w in both
        ]
        middle = [call() for call in gated]
        return {
            "up": (gated, floor_us(num, given, 2)),
            "down": ([partial(moe_direct.multiply_directly, rows, logits, shares, w[1], down, TOP_K)
                      for (rows, shares), ((_, logits), w) in zip(middle, both, strict=True)], floor_us(num, given, 1)),
        }  # fmt: skip
    routings = [moe.route(logits, TOP_K, False, up.rows, down.rows) for _, logits in given]
    rows = [
        moe.multiply_gated(x, w[0], r, up, TOP_K, "silu")
        for ((x, _), w), r in zip(both, routings, strict=True)
    ]
    pairs = [
        moe.multiply(v, w[1], r, down, TOP_K)
        for v, w, r in zip(rows, weights, routings, strict=True)
    ]
    moved = num * TOP_K * HIDDEN * 2
    return {
        "route": ([partial(moe.route, logits, TOP_K, False, up.rows, down.rows) for _, logits in given], 0.0),
        "up": ([partial(moe.multiply_gated, x, w[0], r, up, TOP_K, "silu")
                for ((x, _), w), r in zip(both, routings, strict=True)], floor_us(num, given, 2)),
        "down": ([partial(moe.multiply, v, w[1], r, down, TOP_K) for v, w, r in zip(rows, weights, routings, strict=True)],
                 max(floor_us(num, given, 1), moved / BANDWIDTH * 1e6)),
        "combine": ([partial(moe.combine, p, r, TOP_K) for p, r in zip(pairs, routings, strict=True)],
                    moved * (1 + 1 / TOP_K) / BANDWIDTH * 1e6),
    }  # fmt: skip


def chosen(num: int) -> tuple[Tile, Tile]:
    return (
        moe.choose_tile(num, TOP_K, EXPERTS, 2 * INNER, HIDDEN),
        moe.choose_tile(
            num, TOP_K, EXPERTS, HIDDEN, INNER, adds=moe_direct.is_direct(num, TOP_K, EXPERTS)
        ),
    )


def time_all() -> None:
    router = torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    print(
        "microseconds of a layer, from a graph of calls that touch other experts; in brackets the least possible",
        flush=True,
    )
    for num in (1, 2, 4, 8, 16, 37, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        up, down = chosen(num)
        for direct in (True, False) if num <= moe_direct.MOST_DIRECT else (False,):
            line = []
            tiles = (up, down) if direct or num > moe_direct.MOST_DIRECT else chosen(16)
            for name, (calls, least) in stages(num, *tiles, direct).items():
                line.append(f"{name} {time_us(calls, 5):.1f} ({least:.1f})")
            print(f"time T={num}{' direct' if direct else ''}: {', '.join(line)}", flush=True)
        given = inputs(num)
        calls = [
            partial(run, x, logits, all_weights()[i % 2]) for i, (x, logits) in enumerate(given)
        ]
        took, least = time_us(calls, 5), floor_us(num, given, 3)
        logits = torch.empty(num, EXPERTS, device="cuda")
        routing = time_us([partial(gemm, x, router, out=logits) for x, _ in given], 5)
        rate = 6 * num * TOP_K * HIDDEN * INNER / took / 1e6
        print(f"time T={num}: all {took:.1f} ({least:.1f}), {took * LAYERS / 1000:.3f} ms for {LAYERS} layers, "
              f"{rate:.0f} TFLOP/s; router's matmul {routing:.1f}", flush=True)  # fmt: skip


def time_overlap() -> None:
    """A whole layer with and without what runs ahead: the router's matmul, then the experts, as a
    step has them. Equal bits."""
    router = torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layer(x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return run(x, gemm(x, router, out=torch.empty(len(x), EXPERTS, device="cuda")), weights)

    usual, level = moe.FETCHED, launch.EARLY["AHEAD"]
    for num in (1, 2, 4, 64, 128, 256, 512):
        calls = [partial(layer, x, all_weights()[i % 2]) for i, (x, _) in enumerate(inputs(num))]
        expected = None
        few = num <= moe_direct.MOST_DIRECT
        for lets_in, fetched in (
            ((1, 0), (level, 0)) if few else [(level, n << 20) for n in (0, 8, 16, 24, 32)]
        ):
            launch.EARLY["AHEAD"], moe.FETCHED = lets_in, fetched
            out = calls[0]()
            expected = out if expected is None else expected
            note = "" if torch.equal(out, expected) else "   <<< OTHER BITS"
            what = f"let in {lets_in == 2}" if few else f"fetched {fetched >> 20} MiB"
            print(
                f"overlap T={num} {what}: {time_us(calls, 5):.2f} us with the router{note}",
                flush=True,
            )
    launch.EARLY["AHEAD"], moe.FETCHED = level, usual


def time_router() -> None:
    """The router's matmul of one token: tiles whose programs are few or many."""
    routers = [
        torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(200)
    ]
    for num in (1, 256):
        x, out = (
            torch.randn(num, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.empty(num, EXPERTS, device="cuda"),
        )
        for tile in (
            (16, 16, 512, 4, 2),
            (16, 16, 512, 5, 4),
            (16, 16, 1024, 3, 4),
            (16, 16, 256, 8, 4),
            (16, 32, 256, 5, 4),
        ):
            took = time_us(
                [partial(gemm, x, router, Tile(*tile), out=out) for router in routers], 3
            )
            print(f"router T={num} {tile}: {took:.2f} us", flush=True)


@triton.jit
def _stream(
    weight, out_ptr, num_steps, OUTS: tl.constexpr, INS: tl.constexpr, IN_ONE_PIECE: tl.constexpr
):
    tile, x = tl.program_id(0), tl.full((16, INS), 1.0, tl.bfloat16)
    acc = tl.zeros((16, OUTS), tl.float32)
    for k in range(num_steps):
        if IN_ONE_PIECE:
            values = weight.load([(tile * num_steps + k) * OUTS, 0])
        else:
            values = weight.load([tile * OUTS, k * INS])
        acc = tl.dot(x, values.T, acc)
    tl.store(
        out_ptr + tile * OUTS + tl.arange(0, OUTS)[None, :] + tl.arange(0, 16)[:, None] * 0, acc
    )


def time_stream() -> None:
    """How fast memory gives the weights of each product, tile by tile as a matmul takes them, or as
    if each tile were one piece of memory: nothing else is read."""
    for weights in (
        [w[0].flatten(0, 1) for w in all_weights()],
        [w[1].flatten(0, 1) for w in all_weights()],
    ):
        (num_out, num_in), out = weights[0].shape, torch.empty(len(weights[0]), device="cuda")
        for outs, ins, stages in (
            (128, 128, 3),
            (128, 128, 4),
            (64, 128, 4),
            (64, 256, 3),
            (256, 64, 4),
        ):
            took = []
            for in_one in (False, True):
                given = [
                    TensorDescriptor.from_tensor(w.view(-1, ins) if in_one else w, [outs, ins])
                    for w in weights
                ]
                run_one = _stream[(num_out // outs,)]
                options = {
                    "OUTS": outs,
                    "INS": ins,
                    "IN_ONE_PIECE": in_one,
                    "num_stages": stages,
                    "num_warps": 4,
                }
                took.append(
                    time_us([partial(run_one, w, out, num_in // ins, **options) for w in given], 4)
                )
            rates = [f"{num_out * num_in * 2 / us / 1e6:.2f} TB/s" for us in took]
            print(
                f"stream {num_out}x{num_in}, {outs} x {ins}, {stages} stages: {rates[0]}; in one piece {rates[1]}",
                flush=True,
            )


# ---- searched


def search(until: float, tokens: list[int]) -> None:
    """The fastest tile of each product by tokens. Any must give the same bits: one that does not is
    named and left out."""
    found: dict[str, dict[str, list[int]]] = {
        f"{EXPERTS}x{2 * INNER}x{HIDDEN}": {},
        f"{EXPERTS}x{HIDDEN}x{INNER}": {},
    }
    for num in tokens:
        candidates, direct = CANDIDATES[num], moe_direct.is_direct(num, TOP_K, EXPERTS)
        for place, stage in enumerate(("up", "down")):
            seen: dict[Tile, float] = {}
            expected = None
            for numbers in candidates[place]:
                if time.monotonic() > until:
                    break
                tile, usual = Tile(*numbers), chosen(num)
                up, down = (tile, usual[1]) if stage == "up" else (usual[0], tile)
                try:
                    calls, least = stages(num, up, down, direct)[stage]
                    out = calls[0]()
                    out = out[0] if isinstance(out, tuple) else out
                    expected = out if expected is None else expected
                    same = torch.equal(out, expected)
                    took = time_us(calls, 3)
                    note = "" if same else "   <<< OTHER BITS"
                    print(
                        f"search T={num} {stage} {numbers}: {took:.1f} us ({least:.1f}){note}",
                        flush=True,
                    )
                    if same:
                        seen[tile] = took
                except Exception as error:
                    print(
                        f"search T={num} {stage} {numbers}: {type(error).__name__}: {str(error)[:200]}",
                        flush=True,
                    )
            if seen:
                best = min(seen, key=lambda tile: seen[tile])
                list(found.values())[place][str(num)] = list(astuple(best))
                print(
                    f"best T={num} {stage}: {list(astuple(best))} {seen[best]:.1f} us", flush=True
                )
        torch.cuda.empty_cache()
    for shape, by_rows in found.items():
        ordered = {rows: by_rows[rows] for rows in sorted(by_rows, key=int)}
        print(f'  "{shape}": {json.dumps(ordered)},', flush=True)


# ---- compiled ahead


def _jobs(tokens: list[int]) -> list[tuple[str, tuple[int, ...], int]]:
    made: dict[tuple[str, tuple[int, ...], int], None] = {}
    for num in tokens:
        for place, stage in enumerate(("up", "down")):
            kind = 1 if num <= moe_direct.MOST_DIRECT else 16 if num <= launch.FEW else 32
            for tile in (*CANDIDATES[num][place], tuple(astuple(chosen(num)[place]))):
                made[stage, tile + (0,) * (7 - len(tile)), kind] = None
    return list(made)


def compile_share(number: int, of: int, tokens: list[int]) -> None:
    """Every `of`-th kernel of the search, run once on a few tokens, as launches differ by their
    number (`launch.how`): it is in Triton's cache then."""
    fix_keys()
    weights = torch.zeros(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    pair: Weights = (
        weights,
        torch.zeros(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16),
    )
    every_x, every_logits = new_tokens(32, 0)
    every_row, shares = (
        torch.zeros(32 * TOP_K, INNER, device="cuda", dtype=torch.bfloat16),
        torch.zeros(TOP_K, device="cuda"),
    )
    for stage, numbers, num in _jobs(tokens)[number::of]:
        tile, x, logits, rows = (
            Tile(*numbers),
            every_x[:num],
            every_logits[:num],
            every_row[: num * TOP_K],
        )
        try:
            if num == 1 and stage == "up":
                moe_direct.multiply_gated_directly(x, logits, pair[0], tile, TOP_K, False, "silu")
            elif num == 1:
                moe_direct.multiply_directly(rows, logits, shares, pair[1], tile, TOP_K)
            else:
                routing = moe.route(logits, TOP_K, False, tile.rows, tile.rows)
                if stage == "up":
                    moe.multiply_gated(x, pair[0], routing, tile, TOP_K, "silu")
                else:
                    moe.multiply(rows, pair[1], routing, tile, TOP_K)
            torch.cuda.synchronize()
        except Exception as error:
            print(
                f"compile {stage} {numbers}: {type(error).__name__}: {str(error)[:300]}", flush=True
            )


def fix_keys() -> None:
    """Triton's cache keys depend on the order in which a process computes them."""
    compile_server._fix_keys()


def compile_all(seconds: float, tokens: list[int]) -> None:
    num = max(1, min(14, (os.cpu_count() or 2) - 1))
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "bench.gpu_moe",
        "--tokens",
        ",".join(map(str, tokens)),
        "--compile",
    ]
    workers = [subprocess.Popen([*command, f"{i},{num}"]) for i in range(num)]
    for worker in workers:
        try:
            worker.wait(max(1.0, begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(
        f"compiled {len(_jobs(tokens))} kernels with {num} processes in {time.monotonic() - begin:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="overlap,time,router,stream,search", help="parts, separated by commas"
    )
    parser.add_argument("--seconds", type=float, default=70, help="how long the search may take")
    parser.add_argument(
        "--tokens", default=",".join(map(str, CANDIDATES)), help="for how many tokens it searches"
    )
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [int(num) for num in options.tokens.split(",")]
    if options.compile:
        number, of = map(int, options.compile.split(","))
        compile_share(number, of, tokens)
        return
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}",
        flush=True,
    )
    parts: dict[str, Callable[[], None]] = {
        "overlap": time_overlap, "time": time_all, "router": time_router,
        "search": lambda: search(time.monotonic() + options.seconds, tokens),
        "stream": time_stream,
    }  # fmt: skip
    wanted = options.only.split(",")
    try:
        fix_keys()
        if "search" in wanted:
            compile_all(150, tokens)
    except Exception:
        traceback.print_exc()
    for name in wanted:
        begin = time.monotonic()
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
