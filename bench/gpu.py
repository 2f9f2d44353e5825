"""Every GPU kernel on the GPU at hand, timed; then whole workloads beside vLLM's figures. What
checks them is `make test-gpu`.

    python -m bench.gpu --json out.json [--search] [--modes invariant,fast]

--search tries all tiles of the matmul for the shapes of these models and prints the fastest beside
cuBLAS.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import math
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import astuple
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import triton

from bench.gpu_workloads import MODELS, VLLM, VLLM_FP8, workloads
from tests.gpu.scenes import TILES, Scene, has_flash
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.link import EngineLink
from tidemill.engine.load import load_core
from tidemill.kernels.cuda.attention import attend
from tidemill.kernels.cuda.gemm import (
    CHOICES,
    LIBRARY,
    MANY,
    WARP_SPECIALIZED,
    Tile,
    choose_tile,
    gemm,
    keep_library_in_order,
    matmul,
)
from tidemill.kernels.cuda.launch import capturing
from tidemill.kernels.cuda.tuning import time_us
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

SHAPES = {
    "llama8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "qwen06b": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
    "qwen30b": {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "router": (128, 2048),
        "head": (151936, 2048),
    },
}


# ---- timed


def time_gemm(search: bool) -> list[dict[str, Any]]:
    """Our matmul and the library's, which may not split K. With `search`: of all tiles that may be
    good for so many rows."""
    keep_library_in_order()
    lines = []
    for model, shapes in SHAPES.items():
        for name, (num_out, num_in) in shapes.items():
            copies = max(2, -(-200 * 2**20 // (num_out * num_in * 2)))
            weights = [
                torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
                for _ in range(copies)
            ]
            act, is_head = "silu" if name == "gate_up" else "", name in ("head", "router")
            for num_rows in CHOICES:
                x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
                out = torch.empty(num_rows, num_out, device="cuda") if is_head else None
                seen = {}
                for tile in (
                    candidates(num_rows) if search else [choose_tile(num_rows, num_out, num_in)]
                ):
                    if tile is LIBRARY:
                        continue
                    try:
                        seen[tile] = time_us(
                            [partial(gemm, x, w, tile, act=act, out=out) for w in weights], 5
                        )
                    # too much shared memory for this tile
                    except triton.runtime.errors.OutOfResources:
                        continue
                if not is_head:
                    seen[LIBRARY] = time_us(
                        [partial(matmul, x, w, None, act, True, LIBRARY) for w in weights], 5
                    )
                best = min(seen, key=lambda tile: seen[tile])
                chosen = [] if best is LIBRARY else list(astuple(best))
                own = min(
                    (us for tile, us in seen.items() if tile is not LIBRARY), default=math.nan
                )
                line = {
                    "model": model,
                    "shape": f"{num_out}x{num_in}",
                    "name": name,
                    "rows": num_rows,
                    "tile": chosen,
                }
                lines.append(line | {"us": own, "library_us": seen.get(LIBRARY)})
                other = seen.get(LIBRARY, math.nan)
                what = f"{model} {name:8} M={num_rows:5}"
                print(
                    f"{what} own {own:8.1f} us, library {other:8.1f}  {chosen or 'library'}",
                    flush=True,
                )
            del weights
    return lines


def candidates(num_rows: int) -> list[Tile]:
    if num_rows > 256:
        return [Tile(128, 128, 64, 4, 4, 1), MANY, WARP_SPECIALIZED]
    small = max(16, 1 << (num_rows - 1).bit_length())
    return [tile for rows in {small, small // 2} & set(TILES) for tile in TILES[rows]]


def time_at_full_power(num_rows: int = 2048) -> list[dict[str, Any]]:
    """Linears of a prefill step of llama8b, each for half a second: bursts do not show how the
    power limit lowers the clock."""
    keep_library_in_order()
    lines = []
    for name, (num_out, num_in) in SHAPES["llama8b"].items():
        if name == "head":
            continue
        weights = [
            torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(4)
        ]
        x, act = (
            torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16),
            "silu" if name == "gate_up" else "",
        )
        for label, tile in (
            ("library", LIBRARY),
            ("many", MANY),
            ("warp-specialized", WARP_SPECIALIZED),
        ):
            calls = [partial(matmul, x, weight, None, act, True, tile) for weight in weights]
            num = int(5e5 / time_us(calls, 2) / len(calls))
            graph, begin, end = (
                torch.cuda.CUDAGraph(),
                *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
            )
            with capturing(graph):
                for call in calls:
                    call()
            for i in range(num + num // 2):  # the first third is not counted
                if i == num // 2:
                    begin.record()
                graph.replay()
            end.record()
            time.sleep(0.5)
            mhz, watts = clock_and_power()
            end.synchronize()
            us = begin.elapsed_time(end) * 1000 / num / len(calls)
            rate = 2 * num_rows * num_out * num_in / us / 1e6
            lines.append(
                {"name": name, "by": label, "us": us, "TFLOP/s": rate, "MHz": mhz, "W": watts}
            )
            print(
                f"{name:8} {label:8} at full power: {us:7.1f} us, {rate:.0f} TFLOP/s, {mhz} MHz, {watts} W",
                flush=True,
            )
    return lines


def clock_and_power() -> tuple[int, int]:
    """Of the first GPU's multiprocessors, now: MHz; and watts."""
    library, gpu, mhz, milliwatts = (
        ctypes.CDLL("libnvidia-ml.so.1"),
        ctypes.c_void_p(),
        ctypes.c_uint(),
        ctypes.c_uint(),
    )
    library.nvmlInit_v2()
    library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
    library.nvmlDeviceGetClockInfo(gpu, 1, ctypes.byref(mhz))
    library.nvmlDeviceGetPowerUsage(gpu, ctypes.byref(milliwatts))
    return mhz.value, milliwatts.value // 1000


def to_table(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """As tiles.json has it."""
    table: dict[str, dict[str, list[int]]] = {}
    for line in lines:
        table.setdefault(line["shape"], {})[str(line["rows"])] = line["tile"]
    return table


def time_attention() -> list[dict[str, Any]]:
    lines = []
    for label, batch, length, heads, kv_heads, common in (
        ("llama8b", 1, 384, 32, 8, 0),
        ("llama8b", 256, 384, 32, 8, 0),
        ("llama8b", 256, 1024, 32, 8, 0),
        ("llama8b", 8, 16384, 32, 8, 0),
        ("llama8b", 256, 4160, 32, 8, 4096),
        ("qwen06b", 256, 384, 16, 8, 0),
    ):
        scene = Scene(
            [length] * batch, heads, kv_heads, 128, tuple(range(batch)) if common else (), common
        )
        work, lists = scene.prepare([(i, length - 1, 1) for i in range(batch)])
        lists.alone = batch == 1
        out = torch.empty(batch, heads * 128, device="cuda", dtype=torch.bfloat16)
        given = scene.table, lists, out, scene.spec, torch.from_numpy(work.positions).cuda()
        us = time_us(
            [partial(attend, scene.qkv[:batch], scene.cache, layer, *given) for layer in (0, 1)]
        )
        rate = batch * length * kv_heads * 128 * 2 * 2 / us / 1e6
        lines.append(
            {
                "model": label,
                "batch": batch,
                "length": length,
                "common": common,
                "us": us,
                "TB/s": rate,
            }
        )
        print(
            f"decode attention {label} B={batch} L={length} common {common}: {us:.1f} us, {rate:.2f} TB/s",
            flush=True,
        )
    for label, batch, length, heads in (
        ("llama8b", 4, 4096, 32),
        ("llama8b", 1, 16384, 32),
        ("qwen06b", 4, 4096, 16),
    ):
        scene = Scene([length] * batch, heads, 8, 128)
        out = torch.empty(batch * length, heads * 128, device="cuda", dtype=torch.bfloat16)
        for by_flash in (False, True) if has_flash() else (False,):
            work, lists = scene.prepare([(i, 0, length) for i in range(batch)], by_flash=by_flash)
            positions = torch.from_numpy(work.positions).cuda()
            us = time_us(
                [
                    partial(
                        attend,
                        scene.qkv,
                        scene.cache,
                        0,
                        scene.table,
                        lists,
                        out,
                        scene.spec,
                        positions,
                    )
                ],
                3,
            )
            rate = batch * length * length / 2 * heads * 128 * 4 / us / 1e6
            lines.append(
                {
                    "model": label,
                    "prefill": length,
                    "batch": batch,
                    "flash": by_flash,
                    "us": us,
                    "TFLOP/s": rate,
                }
            )
            whose = "flash-attn-4" if by_flash else "ours"
            print(
                f"prefill attention {label} {batch}x{length}, {whose}: {us:.0f} us, {rate:.0f} TFLOP/s",
                flush=True,
            )
    return lines


def time_sampling(core: EngineCore, model: str) -> list[dict[str, Any]]:
    """What top-k with top-p adds to a decode step of so many sequences, in microseconds of the
    GPU's time."""
    lines = []
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9},
        {"typical_p": 0.9},
    )
    for num in (1, 64, min(256, core.config.max_requests)):
        spent = []
        for more in kinds:
            for i in range(num):
                params = SamplingParams(
                    temperature=0.8, seed=i, max_tokens=40, ignore_eos=True, **more
                )
                core.submit(Submit(f"s{i}", [(7 * i + j) % 1000 + 10 for j in range(64)], params))
            while len(core.scheduler.waiting) or any(
                request.num_output < 3 for request in core.scheduler.running
            ):
                core.step()
            spent.append(busy_us(core, 8))
            while core.has_work:
                core.step()
        added = [us - spent[0] for us in spent[1:]]
        lines.append(
            {
                "model": model,
                "batch": num,
                "plain_us": spent[0],
                "top_k_p_us": added[0],
                "top_p_us": added[1],
            }
        )
        print(
            f"{model} sampling, {num} sequences: a step {spent[0]:,.0f} us; top-k with top-p adds {added[0]:.0f}, "
            f"top-p {added[1]:.0f}, typical-p {added[2]:.0f}",
            flush=True,
        )
    return lines


def busy_us(core: EngineCore, num_steps: int) -> float:
    """Kernels' time in a step."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in events) / num_steps


def time_neighbours(core: EngineCore, model: str) -> dict[str, Any]:
    """How long 32 decoding sequences wait in the steps of a prompt of 3,000 tokens, without and
    with log probabilities of it."""
    longest = {}
    for wanted in (None, 20, None, 20):
        core.scheduler.kv.clear_prefixes()
        for i in range(32):
            core.submit(
                Submit(
                    f"n{i}",
                    [10 + i] * 64,
                    SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True),
                )
            )
        for _ in range(20):
            core.step()
        prompt = [(j * 7) % 1000 + 10 for j in range(3000)]
        core.submit(
            Submit(
                "long",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=wanted),
            )
        )
        waits, before = [], time.perf_counter()
        while core.has_work:
            core.step()
            waits.append(time.perf_counter() - before)
            before = time.perf_counter()
        longest[wanted] = max(waits) * 1000
    print(
        f"{model}: longest step beside a prompt of 3,000: {longest[None]:.1f} ms, with logprobs {longest[20]:.1f}",
        flush=True,
    )
    return {"model": model, "without_ms": longest[None], "with_ms": longest[20]}


# ---- where a decoding step's time goes


def timeline(core: EngineCore, model: str, mode: str, batch: int, length: int) -> dict[str, Any]:
    """Of one decoding step of `batch` requests with about `length` tokens each."""
    for i in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        core.submit(
            Submit(f"t{batch}.{i}", [(7 * i + j) % 1000 + 10 for j in range(length)], params)
        )
    while len(core.scheduler.waiting) or any(
        request.num_output < 3 for request in core.scheduler.running
    ):
        core.step()
    line = profile_steps(core, 8, f"{model} {mode}: a decoding step of {batch} x {length} tokens")
    while core.has_work:
        core.step()
    return line | {"model": model, "mode": mode, "batch": batch, "length": length}


def prompt_timeline(core: EngineCore, model: str, mode: str) -> dict[str, Any]:
    """Of one step of a prompt's tokens, as many as the budget allows: the average over prompts of
    4096."""
    core.scheduler.kv.clear_prefixes()
    for i in range(-(-7 * core.config.token_budget // 4096)):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        core.submit(Submit(f"p{i}", [(7 * i + j) % 1000 + 10 for j in range(4096)], params))
    core.step()
    line = profile_steps(
        core, 6, f"{model} {mode}: a step of {core.config.token_budget} prompt tokens"
    )
    while core.has_work:
        core.step()
    return line | {"model": model, "mode": mode, "prompt_tokens": core.config.token_budget}


def profile_steps(core: EngineCore, num_steps: int, label: str) -> dict[str, Any]:
    """Microseconds a step by kernel, matmuls by layer."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begin) / num_steps * 1e6
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    linears = (
        ("qkv", "out", "router") if core.model_config.experts else ("qkv", "out", "gate_up", "down")
    )
    spent, num_matmuls = defaultdict[str, float](float), 0
    for event in sorted(events, key=lambda event: event.time_range.start):
        name = event.name
        if name == "_look_up":  # a step begins
            num_matmuls = 0
        if name.startswith("_gemm") or "nvjet" in name or "gemm" in name.lower():
            is_head = num_matmuls == len(linears) * core.model_config.num_layers
            name = "matmul: " + ("head" if is_head else linears[num_matmuls % len(linears)])
            num_matmuls += 1
        spent[name] += event.time_range.elapsed_us() / num_steps
    busy = sum(spent.values())
    ranked = dict(sorted(spent.items(), key=lambda item: -item[1]))
    print(f"{label}: {wall:,.0f} us, kernels {busy:,.0f}", flush=True)
    for name, us in ranked.items():
        if us >= 2:
            print(f"  {us:9.1f} us {us / busy:6.1%}  {name[:60]}")
    return {"wall_us": wall, "kernels_us": ranked}


# ---- whole workloads, beside vLLM's figures


def run_workload(core: Any, requests: list[Any]) -> tuple[float, float, float]:
    """Seconds in all, to the first token, and between the first and the last."""
    core.scheduler.kv.clear_prefixes()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        core.submit(
            Submit(
                str(i), prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            )
        )
    first, counts = 0.0, [0] * len(requests)
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            first = first or time.perf_counter() - begin
            counts[int(delta.request_id)] += len(delta.token_ids)
    elapsed = time.perf_counter() - begin
    assert counts == [length for _, length in requests]
    return elapsed, first, elapsed - first


def time_starts(model: str) -> list[dict[str, Any]]:
    """Of an engine process whose kernels were never compiled, and of the next one: seconds until it
    loads, and from there until it is ready."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    lines = []
    for name in ("fresh", "warm"):
        times: list[float] = []

        async def start(times: list[float] = times) -> None:
            link = EngineLink()
            options = EngineOptions(model=str(folder), load_format="dummy", max_context=34816)
            await link.start(options, lambda _: times.append(time.perf_counter()))
            times.append(time.perf_counter())
            await link.close()

        begin = time.perf_counter()
        asyncio.run(start())
        imported, ready = times[0] - begin, times[-1] - times[0]
        lines.append({"model": model, "start": name, "imported_s": imported, "ready_s": ready})
        print(
            f"{model} {name} start: loading after {imported:.1f} s, ready after another {ready:.1f} s",
            flush=True,
        )
    del os.environ["TRITON_CACHE_DIR"]
    return lines


def time_workloads(
    model: str,
    mode: str,
    only: str | None,
    token_budget: int | None,
    quantization: str = "auto",
    details: bool = True,
    speculate: str = "auto",
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Workloads and timelines. `mode`: invariant or fast."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    begin = time.perf_counter()
    core = load_core(
        EngineOptions(
            model=str(folder), load_format="dummy", max_context=34816, max_waiting=10**6, fast_math=mode == "fast",
            token_budget=token_budget, quantization=quantization, speculate=speculate,
        )
    )  # fmt: skip
    mode = mode if quantization == "auto" else f"{mode} {quantization}"
    started = time.perf_counter() - begin
    print(
        f"{model} {mode}: ready in {started:.1f} s; {core.config.num_kv_tokens:,} KV tokens; "
        f"flash-attn-4: {cast(CudaRunner, core.runner).flash.why}",
        flush=True,
    )
    run_workload(core, [([5] * 600, 8)] * 4)
    if details:
        time_sampling(core, model)
        time_neighbours(core, model)
    timelines = [timeline(core, model, mode, batch, 384) for batch in (1, 256)] + [
        prompt_timeline(core, model, mode)
    ]
    lines = [{"model": model, "mode": mode, "workload": "start", "s": started}]
    for name, requests in workloads(min(MODELS[model]["vocab_size"], 120_000)).items():
        if only and name not in only.split(","):
            continue
        elapsed, first, rest = run_workload(core, requests)
        num_out, num_in = (
            sum(length for _, length in requests),
            sum(len(prompt) for prompt, _ in requests),
        )
        mine = rest / (requests[0][1] - 1) * 1000 if name == "latency_b1" else elapsed
        theirs = VLLM_FP8 if quantization == "fp8" and model == "llama8b" else VLLM[model]
        ratio = theirs[name] / mine if name in theirs else math.nan
        line = {
            "model": model,
            "mode": mode,
            "workload": name,
            "s": elapsed,
            "first_s": first,
            "ratio": ratio,
        }
        lines.append(line)
        what = (
            f"TPOT {mine:.2f} ms"
            if name == "latency_b1"
            else f"{num_out / elapsed:,.0f} out tok/s, {num_in / elapsed:,.0f} in"
        )
        print(
            f"{model} {mode} {name:14} {elapsed:7.2f} s  {what}  first {first * 1000:.1f} ms  {line['ratio']:.2f} x vLLM",
            flush=True,
        )
    return lines, timelines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--models", default="llama8b,qwen06b", help="whose workloads to run")
    parser.add_argument("--workloads", help="only these, separated by commas")
    parser.add_argument(
        "--token-budget", type=int, help="tokens of a step, instead of the engine's own choice"
    )
    parser.add_argument(
        "--quantization",
        default="auto",
        help="of weights: auto, fp8, int8, int4; several separated by commas",
    )
    parser.add_argument(
        "--speculate", default="auto", help="off: what random weights repeat is not guessed"
    )
    parser.add_argument(
        "--skip-details", action="store_true", help="do not time sampling and log probabilities"
    )
    parser.add_argument(
        "--skip-starts", action="store_true", help="do not time how long engines take to start"
    )
    parser.add_argument(
        "--modes", default="invariant", help="invariant, fast, or both, separated by a comma"
    )
    parser.add_argument("--skip-kernels", action="store_true", help="do not time them one by one")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "workloads": [],
        "timelines": [],
    }
    if not arguments.skip_kernels:
        result |= {
            "attention": time_attention(),
            "at_full_power": time_at_full_power(),
            "gemm": time_gemm(arguments.search),
        }
        result["tiles"] = to_table(result["gemm"])
    models = list(filter(None, arguments.models.split(",")))
    result["starts"] = (
        [] if arguments.skip_starts else [line for model in models for line in time_starts(model)]
    )
    for model in models:
        for mode, quantization in product(
            arguments.modes.split(","), arguments.quantization.split(",")
        ):
            given = (
                arguments.workloads,
                arguments.token_budget,
                quantization,
                not arguments.skip_details,
                arguments.speculate,
            )
            lines, timelines = time_workloads(model, mode, *given)
            result["workloads"] += lines
            result["timelines"] += timelines
            gc.unfreeze()
            gc.collect()  # the engine before
            torch.cuda.empty_cache()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
