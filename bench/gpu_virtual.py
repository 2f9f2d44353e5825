"""`--kv-layout virtual` on the GPU at hand, beside paging.

    python -m bench.gpu_virtual [--only driver,strides,times] [--json out.json]

driver: microseconds of each call. strides: the contiguous kernel over rows of [token][layer] and of
[layer][token]. times: tokens a second beside paging at batches of 1, 8 and 64, and physical memory
beside live tokens. Each part stands for itself: if one fails, its traceback is printed and the next
one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import MODELS
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda.contiguous import Sequences, flash, flash_reference
from tidemill.kernels.cuda.virtual_memory import CudaMemory
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.runner.cuda_slots import Launched
from tidemill.runner.virtual_cuda import VirtualCudaLayout
from tidemill.sched.plan import StepPlan
from tidemill.types.events import Preempted
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

GRANULE = 2 * 2**20
LAYERS, HEADS, KV_HEADS, DIM = 32, 32, 8, 128
Line = dict[str, Any]


def show(**line: Any) -> Line:
    print(json.dumps(line), flush=True)
    return line


# ---- the driver's calls


def time_driver(num: int = 256) -> Line:
    driver = CudaMemory(GRANULE).driver
    address, took = driver.reserve(num * GRANULE), dict[str, float]()

    def each(name: str, do: Callable[[int], object]) -> list[Any]:
        begin = time.perf_counter()
        made = [do(i) for i in range(num)]
        took[name] = round((time.perf_counter() - begin) / num * 1e6, 1)
        return made

    before = torch.cuda.mem_get_info()[0]
    handles = each("create", lambda i: driver.create(GRANULE))
    held = before - torch.cuda.mem_get_info()[0]
    each("map", lambda i: driver.map(address + i * GRANULE, GRANULE, handles[i]))
    each("allow", lambda i: driver.allow(address + i * GRANULE, GRANULE))
    each("unmap", lambda i: driver.unmap(address + i * GRANULE, GRANULE))
    each("map again", lambda i: driver.map(address + i * GRANULE, GRANULE, handles[i]))
    begin = time.perf_counter()
    driver.allow(address, num * GRANULE)
    took["allow, all at once"] = round((time.perf_counter() - begin) / num * 1e6, 1)
    each("unmap again", lambda i: driver.unmap(address + i * GRANULE, GRANULE))
    each("release", lambda i: driver.release(handles[i]))
    driver.free(address, num * GRANULE)
    return show(part="driver", us_a_granule=took, granules=num, device_bytes_held=held)


# ---- which layout of a row the kernel reads well


def time_strides() -> list[Line]:
    lines = []
    for batch, context, num_new in ((1, 4096, 1), (8, 4096, 1), (64, 2048, 1), (1, 4096, 2048)):
        for name in ("[row][token][layer]", "[row][layer][token]"):
            lines.append(_time_stride(name, batch, context, num_new))
            torch.cuda.empty_cache()
    return lines


def _time_stride(name: str, batch: int, context: int, num_new: int) -> Line:
    if name == "[row][token][layer]":
        cache = torch.zeros(
            batch * context, LAYERS, 2, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"
        )
        layers = [cache[:, i].unbind(1) for i in range(LAYERS)]
    else:
        cache = torch.zeros(
            LAYERS, 2, batch * context, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"
        )
        layers = [cache[i].unbind(0) for i in range(LAYERS)]
    cache.view(-1)[: 2**28].normal_()
    group = HEADS // KV_HEADS
    firsts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * context
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    if num_new == 1:
        q = torch.randn(batch * group, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        queries, most, causal = (
            torch.arange(batch + 1, dtype=torch.int32, device="cuda") * group,
            group,
            False,
        )
    else:
        q = torch.randn(batch * num_new, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        queries, most, causal = (
            torch.arange(batch + 1, dtype=torch.int32, device="cuda") * num_new,
            num_new,
            True,
        )
    sequences = Sequences(queries, firsts, lens, most)

    def run() -> None:
        for keys, values in layers:
            flash(q, keys, values, sequences, context, DIM**-0.5, causal)

    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / LAYERS * 1e3)
    us = min(times)
    gb_s = batch * context * 2 * KV_HEADS * DIM * 2 / us / 1e3
    apart = 0.0
    if batch == 1:
        keys, values = layers[0]
        out = flash(q, keys, values, sequences, context, DIM**-0.5, causal)
        few = slice(-group if num_new == 1 else -64, None)
        end_only = Sequences(
            torch.tensor([0, q[few].shape[0]]), torch.tensor([0, 0]), lens, q[few].shape[0]
        )
        apart = (
            (
                out[few].float()
                - flash_reference(q[few].float(), keys, values, end_only, DIM**-0.5, causal)
            )
            .abs()
            .max()
            .item()
        )
        assert apart < 0.02, apart
    return show(
        part="strides",
        layout=name,
        batch=batch,
        context=context,
        queries=num_new,
        us=round(us, 1),
        gb_s=round(gb_s),
        apart=apart,
    )


# ---- engines


def engine(shape: Line, **options: Any) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(0)
    given: Line = {
        "load_format": "dummy",
        "max_context": 8192,
        "max_requests": 64,
        "speculate": "off",
        "max_waiting": 10**6,
    } | options
    begin = time.perf_counter()
    core = load_core(EngineOptions(model=str(folder), **given))
    print(
        f"{core.config.kv_layout}: ready in {time.perf_counter() - begin:.1f} s; {core.config.reasons['page_size']}",
        flush=True,
    )
    return core


def runner_of(core: EngineCore) -> CudaRunner:
    assert isinstance(core.runner, CudaRunner)
    return core.runner


def memory_of(runner: CudaRunner) -> CudaMemory:
    assert isinstance(runner.kv_layout, VirtualCudaLayout)
    return runner.kv_layout.memory


def ids(num: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 120_000) for _ in range(num)]


def run(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]) -> Line:
    """By request: tokens and log probabilities; and seconds to the first token of all, and of
    decoding."""
    answers: dict[str, list[Any]] = {name: [] for name in requests}
    torch.cuda.synchronize()
    start, first, num_preempted = time.perf_counter(), 0.0, 0
    for name, (prompt, params) in requests.items():
        core.submit(Submit(name, prompt, params))
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        num_preempted += sum(isinstance(event, Preempted) for event in output.events)
        for delta in output.deltas:
            logprobs = [entry.logprob for entry in delta.logprobs or []]
            answers[delta.request_id] += list(
                zip(delta.token_ids, logprobs or [0.0] * len(delta.token_ids), strict=True)
            )
        if not first and all(answers.values()):
            first, num_before = time.perf_counter(), sum(map(len, answers.values()))
    end = time.perf_counter()
    num = sum(map(len, answers.values()))
    rate = (num - num_before) / max(end - first, 1e-9)
    return {
        "answers": answers,
        "preempted": num_preempted,
        "prefill_s": first - start,
        "decode_tok_s": rate,
    }


def free() -> None:
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def time_engines() -> list[Line]:
    options: Line = {"prefix_caching": False, "kv_memory_bytes": 24 * 2**30}
    cores = {
        layout: engine(MODELS["llama8b"], kv_layout=layout, **options)
        for layout in ("paged", "virtual")
    }
    lines, token_bytes = [], LAYERS * 2 * KV_HEADS * DIM * 2
    for batch, num_prompt, num_out in ((1, 512, 256), (8, 512, 256), (64, 512, 128), (8, 6000, 64)):
        requests = {
            str(i): (
                ids(num_prompt + 7 * i, i),
                SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=0.0),
            )
            for i in range(batch)
        }
        best: dict[str, Line] = {}
        for turn in range(3):
            for layout, core in cores.items():
                made = run(core, requests)
                if turn and (
                    layout not in best or made["decode_tok_s"] > best[layout]["decode_tok_s"]
                ):
                    best[layout] = made
        line = {
            f"{layout}_{what}": round(best[layout][what], 3)
            for layout in cores
            for what in ("decode_tok_s", "prefill_s")
        }
        ratio = best["virtual"]["decode_tok_s"] / best["paged"]["decode_tok_s"]
        same = sum(
            x[0] == y[0]
            for name in requests
            for x, y in zip(
                best["virtual"]["answers"][name], best["paged"]["answers"][name], strict=True
            )
        )
        part = {"part": "times", "batch": batch, "prompt": num_prompt, "out": num_out}
        lines.append(
            show(**part, **line, decode_ratio=round(ratio, 3), same_tokens=same, of=batch * num_out)
        )
    lines.append(watch_memory(cores["virtual"], token_bytes))
    return lines


def watch_memory(core: EngineCore, token_bytes: int) -> Line:
    """Physical memory beside the tokens of running requests, at every launch, of requests that come
    and go."""
    runner = runner_of(core)
    memory, launch, over, most = memory_of(runner), runner.launch, list[float](), 0
    requests = {
        str(i): (
            ids(50 + 61 * i % 900, i),
            SamplingParams(max_tokens=20 + 13 * i % 100, ignore_eos=True, temperature=0.0),
        )
        for i in range(150)
    }

    def watched(plan: StepPlan) -> Launched:
        nonlocal most
        launched, running = launch(plan), core.scheduler.running
        # A prompt has pages for all its tokens from the start. The null page is nobody's.
        live = (
            sum(max(request.num_computed, request.num_known) for request in running) * token_bytes
        )
        over.append(((memory.used_bytes - live) / GRANULE - 1) / max(1, len(running)))
        most = max(most, memory.physical_bytes)
        return launched

    before = torch.cuda.mem_get_info()[0] + memory.physical_bytes
    runner.launch = watched  # type: ignore[method-assign]
    try:
        run(core, requests)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    memory.settle()
    return show(
        part="memory", most_granules_over_live=round(max(over), 2), mean=round(sum(over) / len(over), 2), steps=len(over),
        most_physical_bytes=most, left_bytes=memory.physical_bytes, device_bytes_held=before - torch.cuda.mem_get_info()[0],
        ahead=memory.num_ahead, in_time=memory.num_in_time, waited=memory.num_waited,
    )  # fmt: skip


PARTS: dict[str, Callable[[], list[Line]]] = {
    "driver": lambda: [time_driver()],
    "strides": time_strides,
    "times": time_engines,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json")
    given = parser.parse_args()
    lines: list[Line] = []
    for name in given.only.split(","):
        begin = time.perf_counter()
        try:
            lines += PARTS[name]()
        except Exception:
            traceback.print_exc()
            lines.append({"part": name, "failed": traceback.format_exc()})
        free()
        print(f"-- {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
