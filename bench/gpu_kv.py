"""8-bit and 4-bit keys and values on the GPU at hand: what they save.

    python -m bench.gpu_kv [--json out.json] [--parts kernels,retrieval,workloads] [--turns 2]
    [--formats fp8,int8,int4]

kernels: decode attention at several settings and prompts, beside bfloat16. retrieval: a planted key
among 16,384, and what quantization does to its query's result. workloads: llama8b with random
weights in three formats, in turns.

Each part is a process with a time limit: one that fails or hangs says so, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from bench.gpu_workloads import MODELS, Request, workloads
from tests.gpu.engines import ask
from tests.gpu.scenes import ScaledScene, Scene, has_roles, prompts_by
from tidemill.config import EngineOptions, resolve
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of, load_core
from tidemill.kernels import machine
from tidemill.kernels.cuda import attention, hopper_fp8, kv_write
from tidemill.kernels.cuda.tuning import time_us
from tidemill.kernels.kv_cache import Angles, views
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.types.kv_format import FORMATS
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

NAMES: tuple[str, ...] = ("fp8", "int8")  # --formats
RATE = 4.25e12  # bytes a second that an H200 reads
LINES: list[dict[str, Any]] = []


def say(**line: Any) -> None:
    LINES.append(line)
    print(
        "  "
        + ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
        ),
        flush=True,
    )


# ---- checks


# ---- kernels, timed


def time_decode() -> None:
    for batch, length in ((256, 384), (8, 16384), (1, 384), (1, 4096)):
        items = [(i, length - 1, 1) for i in range(batch)]
        num_values = batch * length * 8 * 128 * 2
        out = torch.empty(batch, 32 * 128, device="cuda", dtype=torch.bfloat16)

        def timed(
            scene: Scene, items: Any = items, out: torch.Tensor = out, batch: int = batch
        ) -> float:
            work, lists = scene.prepare(items)
            positions = torch.from_numpy(work.positions).cuda()
            calls = [
                partial(attention.attend, scene.qkv[:batch], scene.cache, layer, scene.table, lists, out, scene.spec, positions,
                        scales=scene.scales)
                for layer in (0, 1)
            ]  # fmt: skip
            return time_us(calls, 10)

        scene = ScaledScene("fp8", [length] * batch, 32, 8, 128)
        quantized = scene.cache, scene.scales
        scene.cache, scene.scales = scene.exact, None  # type: ignore[assignment]
        plain = timed(scene)
        say(
            kernel="decode",
            batch=batch,
            length=length,
            format="bfloat16",
            us=plain,
            TBs=num_values * 2 / plain / 1e6,
        )
        scene.cache, scene.scales = quantized
        # the kernel made for Hopper, or the other one
        for ring in (True, False) if has_roles() else (False,):
            with mock.patch.object(hopper_fp8, "FEW", 0 if ring else 10**9):
                us = timed(scene)
            rate = num_values * (1 + 2 / 128) / us / 1e6
            say(
                kernel="decode",
                batch=batch,
                length=length,
                format="fp8",
                ring=ring,
                us=us,
                TBs=rate,
                gain=plain / us,
            )
        del scene, quantized
        for name in [name for name in NAMES if name != "fp8"]:
            scene = ScaledScene(name, [length] * batch, 32, 8, 128)
            us = timed(scene)
            say(kernel="decode", batch=batch, length=length, format=name, us=us, gain=plain / us)
            del scene
        torch.cuda.empty_cache()


def time_prompts() -> None:
    for batch, length in ((4, 4096), (1, 16384)):
        out = torch.empty(batch * length, 32 * 128, device="cuda", dtype=torch.bfloat16)
        flops = batch * length * length / 2 * 32 * 128 * 4

        def timed(
            scene: Scene, batch: int = batch, length: int = length, out: torch.Tensor = out
        ) -> float:
            work, lists = scene.prepare([(i, 0, length) for i in range(batch)])
            positions = torch.from_numpy(work.positions.copy()).cuda()
            given = scene.qkv, scene.cache, 0, scene.table, lists, out, scene.spec, positions
            return time_us([partial(attention.attend, *given, scales=scene.scales)], 3)

        plain = timed(Scene([length] * batch, 32, 8, 128))
        say(
            kernel="prompts",
            batch=batch,
            length=length,
            format="bfloat16",
            us=plain,
            TFLOPs=flops / plain / 1e6,
        )
        for name in NAMES:
            scene = ScaledScene(name, [length] * batch, 32, 8, 128)
            for way in ("copied", "by roles", "other") if name != "int4" else ("other",):
                scene.copies = scene.copies if way == "copied" else None
                with prompts_by(way != "other"):
                    us = timed(scene)
                say(
                    kernel="prompts", batch=batch, length=length, format=name, way=way, us=us, TFLOPs=flops / us / 1e6,
                    gain=plain / us,
                )  # fmt: skip


def time_store() -> None:
    """Rotation and entry into the cache, of one decode step of 256 and one of 2,048 prompt tokens."""
    cos, sin = (t.cuda() for t in rope_tables(*rope_frequencies(128, 1e6, None), 4096))
    for num in (256, 2048):
        qkv = torch.randn(num, 48 * 128, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(num, dtype=torch.int32, device="cuda")
        slots = (
            torch.randperm(num, device="cuda") * 64
            if num == 256
            else torch.arange(num, device="cuda")
        )
        for name in ("bfloat16", *NAMES):
            kind = FORMATS[name]
            pages = torch.zeros(
                num, 2 * 2 * 8 * 64 * kind.head_bytes(128), dtype=torch.uint8, device="cuda"
            )
            cache, scales = views(pages, 2, 8, 64, 128, name)
            if scales is None:
                cache = pages.view(torch.bfloat16).view(num, 2, 2, 8, 64, 128)
            call = partial(
                kv_write.enter_heads,
                qkv,
                cache,
                1,
                positions,
                slots,
                Angles(cos, sin),
                32,
                scales=scales,
            )
            say(kernel="store", tokens=num, format=name, us=time_us([call]))


# ---- retrieval


def check_retrieval() -> None:
    """Eight requests of 16,384 tokens; for each KV head a key like its first query is planted
    somewhere, with a value that has one large dimension. Retrieved: that dimension is the result's
    largest. `strength`: of the planted key; at 1 it has about three times the weight of all others
    together."""
    length, batch, heads, kv_heads, dim = 16384, 8, 32, 8, 128
    for strength in (0.6, 0.8, 1.0, 1.2):
        scene = Scene([length] * batch, heads, kv_heads, dim)
        torch.manual_seed(5)
        last = torch.tensor([scene.first[row] + length - 1 for row in range(batch)], device="cuda")
        # the first of each group
        queries = scene.qkv[last].view(batch, -1, dim)[:, : heads : heads // kv_heads]
        where, large = (
            torch.randint(0, length, (batch, kv_heads), device="cuda"),
            torch.randint(0, dim, (batch, kv_heads), device="cuda"),
        )
        for row in range(batch):
            for head in range(kv_heads):
                page, offset = (
                    int(scene.pages[row, int(where[row, head]) // 64]),
                    int(where[row, head]) % 64,
                )
                scene.cache[page, 1, 0, head, offset] = queries[row, head] * strength
                scene.cache[page, 1, 1, head, offset] = torch.randn(dim, device="cuda") * 0.5
                scene.cache[page, 1, 1, head, offset, large[row, head]] = 6.0
        items, results = [(row, length - 1, 1) for row in range(batch)], {}
        plain = scene.cache
        for name in ("bfloat16", *NAMES):
            scene.cache, scene.scales = plain, None
            if name != "bfloat16":
                ScaledScene.to_format(scene, name)  # type: ignore[arg-type]
            results[name] = scene.run(items).view(batch, heads, dim).float()
        first = results["bfloat16"][:, : heads : heads // kv_heads]
        line: dict[str, Any] = {
            "strength": strength,
            "retrieved in bfloat16": int((first.argmax(-1) == large).sum()),
            "of": batch * kv_heads,
        }
        for name in NAMES:
            other = results[name][:, : heads : heads // kv_heads]
            line[f"in {name}"] = int((other.argmax(-1) == large).sum())
            line[f"same argmax {name}"] = int((other.argmax(-1) == first.argmax(-1)).sum())
            off = (results[name] - results["bfloat16"]).norm() / results["bfloat16"].norm()
            line[f"error {name}"] = float(off)
        say(**line)


# ---- engines


def run_workload(core: EngineCore, requests: list[Request]) -> tuple[float, float]:
    """Seconds in all; and milliseconds of a step from when every request decodes."""
    core.scheduler.kv.clear_prefixes()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        core.submit(
            Submit(
                str(i), prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            )
        )
    began, decoding, num_steps = set[str](), 0.0, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed
        num_steps += decoding > 0
        began |= {delta.request_id for delta in output.deltas}
        if not decoding and len(began) == len(requests):
            decoding = time.perf_counter()
    end = time.perf_counter()
    return end - begin, (end - decoding) / max(num_steps, 1) * 1000


def load_engines(model: str) -> dict[str, EngineCore]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    made: dict[str, EngineCore] = {}
    for name in ("bfloat16", *NAMES):
        begin = time.perf_counter()
        options = EngineOptions(
            model=str(folder), load_format="dummy", max_context=17408, kv_memory_bytes=24 * 2**30, kv_dtype=name, speculate="off",
            max_waiting=10**6,
        )  # fmt: skip
        first = made.get("bfloat16")
        if first is None:
            made[name] = load_core(options)
        else:  # the same weights
            shape = first.model_config
            made[name] = core_of(first.runner.model, resolve(options, shape, machine.detect()))  # type: ignore[attr-defined]
        num_tokens = made[name].config.num_pages * 64
        print(
            f"  {model} {name}: ready in {time.perf_counter() - begin:.1f} s; {num_tokens:,} tokens in 24 GiB",
            flush=True,
        )
    return made


def check_logits(engines: dict[str, EngineCore], vocab: int) -> None:
    """Of the token after prompts of 2,048 and 16,384 random tokens: KL divergence from bfloat16,
    and whether the likeliest is the same. Random weights attend almost evenly and have nearly equal
    logits; `check_retrieval` is about peaks."""
    draw = random.Random(3)
    for length in (2048, 16384):
        kl, same, num = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0), 4
        for _ in range(num):
            prompt = [draw.randrange(10, vocab) for _ in range(length)]
            logprobs = {}
            for name, core in engines.items():
                core.scheduler.kv.clear_prefixes()
                ask(
                    core,
                    {"x": (prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))},
                )
                logprobs[name] = core.runner.slots.buffers.logits[0].clone().log_softmax(-1)  # type: ignore[attr-defined]
            plain = logprobs["bfloat16"]
            for name in NAMES:
                kl[name] += float((plain.exp() * (plain - logprobs[name])).sum()) / num
                same[name] += int(plain.argmax() == logprobs[name].argmax())
        for name in NAMES:
            say(logits=name, prompt=length, mean_kl=kl[name], same_top_token=same[name], of=num)


def time_workloads(turns: int) -> None:
    model = "llama8b"
    engines = load_engines(model)
    shape = MODELS[model]
    work = workloads(int(str(shape["vocab_size"])))
    weights = 15.0e9
    guarded("logits", lambda: check_logits(engines, int(str(shape["vocab_size"]))))
    for label in ("latency_b1", "decode_b256", "long_ctx_b8"):
        requests = work[label]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(turns):
            for name, core in engines.items():
                times[name].append(run_workload(core, requests))
        plain = [min(one) for one in zip(*times["bfloat16"], strict=True)]
        context = sum(len(prompt) + out / 2 for prompt, out in requests)
        for name in engines:
            seconds, step = (min(one) for one in zip(*times[name], strict=True))
            kv = context * 2 * 8 * 32 * FORMATS[name].head_bytes(128)
            floor = (weights + kv) / RATE * 1000
            say(
                workload=label, format=name, seconds=seconds, gain=plain[0] / seconds, decode_step_ms=step,
                decode_gain=plain[1] / step, floor_ms=floor, spread=max(one for one, _ in times[name]) / seconds,
            )  # fmt: skip


def guarded(label: str, part: Callable[[], None]) -> None:
    print(f"{label}:", flush=True)
    begin = time.perf_counter()
    try:
        part()
        print(f"{label}: done in {time.perf_counter() - begin:.0f} s", flush=True)
    except Exception:
        traceback.print_exc()
        LINES.append({"failed": label, "why": traceback.format_exc()[-2000:]})
        print(f"{label}: FAILED after {time.perf_counter() - begin:.0f} s", flush=True)
    gc.collect()
    torch.cuda.empty_cache()


PARTS: dict[str, tuple[int, list[Callable[..., None]]]] = {  # seconds it may take, and what it does
    "kernels": (200, [time_store, time_decode, time_prompts]),
    "retrieval": (90, [check_retrieval]),
    "workloads": (240, [time_workloads]),
}


def run_part(label: str, turns: int) -> None:
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in PARTS[label][1]:
        guarded(
            f"{label}: {part.__name__}", partial(part, turns) if part is time_workloads else part
        )


def spawn(label: str, turns: int) -> list[dict[str, Any]]:
    found = Path(tempfile.mkdtemp()) / "lines.json"
    command = [
        sys.executable,
        "-m",
        "bench.gpu_kv",
        "--part",
        label,
        "--json",
        str(found),
        "--turns",
        str(turns),
    ]
    command += ["--formats", ",".join(NAMES)]
    begin = time.perf_counter()
    try:
        code = subprocess.run(command, timeout=PARTS[label][0], check=False).returncode
        end = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        end = "took too long"
    lines = json.loads(found.read_text()) if found.exists() else []
    print(f"{label}: {time.perf_counter() - begin:.0f} s {end}", flush=True)
    return lines + ([{"failed": label, "why": end}] if end else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help="in this process")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--formats", default="fp8,int8,int4")
    given = parser.parse_args()
    globals()["NAMES"] = tuple(given.formats.split(","))
    if given.part:
        run_part(given.part, given.turns)
        Path(given.json or os.devnull).write_text(json.dumps(LINES, indent=1))
        return
    lines = []
    for label in given.parts.split(","):
        lines += spawn(label, given.turns)
    print("\nSummary")
    for line in lines:
        if any(
            key in line for key in ("workload", "strength", "failed", "logits", "kernel", "engine")
        ):
            print(
                "  "
                + json.dumps(
                    {
                        key: round(value, 4) if isinstance(value, float) else value
                        for key, value in line.items()
                    }
                )
            )
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
