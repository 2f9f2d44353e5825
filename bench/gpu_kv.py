"""8-bit and 4-bit keys and values on the GPU at hand: right, the same bits in any company, and what they save.

    python -m bench.gpu_kv [--json out.json] [--parts roles,checks,kernels,retrieval,workloads,engine] [--turns 2]
                           [--formats fp8,int8,int4]

roles: the prompt kernel made for Hopper; if it fails, the other parts run without it. checks: kernels against their references,
and against themselves in other batches. kernels: decode attention at several settings and prompts, beside bfloat16. retrieval: a
planted key among 16,384, and what quantization does to its query's result. engine: an engine's tokens alone, cached, among
others, in chunks, preempted, without graphs. workloads: llama8b with random weights in three formats, in turns.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from bench.gpu_checks import Scene
from bench.gpu_engine_checks import ask, nothing_compiles, random_llama, without_graphs
from bench.gpu_workloads import MODELS, Request, workloads
from tidemill.config import EngineOptions, resolve
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of, load_core
from tidemill.kernels import machine
from tidemill.kernels.cuda import attention, attention_lists, elementwise, hopper_fp8, scaled_values
from tidemill.kernels.cuda.tuning import time_us
from tidemill.kernels.kv_cache import Angles, dequantize, quantize, views
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.kv_format import FORMATS
from tidemill.runner import cuda_runner
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit

NAMES: tuple[str, ...] = ("fp8", "int8")  # --formats
RATE = 4.25e12  # bytes a second that an H200 reads
LINES: list[dict[str, Any]] = []


def say(**line: Any) -> None:
    LINES.append(line)
    print(
        "  " + ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items()),
        flush=True,
    )


class ScaledScene(Scene):
    """The same cache in another format; `exact` is what its values stand for, rounded as the kernels round it."""

    def __init__(self, name: str, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.to_format(name)

    def to_format(self, name: str) -> None:
        num_pages, layers, _, kv_heads, page, dim = self.cache.shape
        kind = FORMATS[name]
        pool = torch.empty(num_pages, layers * 2 * kv_heads * page * kind.head_bytes(dim), dtype=torch.uint8, device="cuda")
        values, scales = views(pool, layers, kv_heads, page, dim, name)
        assert scales is not None
        self.exact = torch.empty_like(self.cache)
        for first in range(0, num_pages, 512):  # float32 on the way
            some = slice(first, first + 512)
            values[some], scales[some] = quantize(self.cache[some], kind)
            self.exact[some] = dequantize(values[some], scales[some], kind)
        self.cache, self.scales = values, scales
        if has_roles() and name != "int4":
            self.copies = self.exact.new_empty(num_pages, 2, kv_heads, page, dim)

    def expected(self, row: int, start: int, count: int) -> torch.Tensor:
        with mock.patch.object(self, "cache", self.exact):
            return super().expected(row, start, count)


@contextmanager
def prompts_by(roles: bool) -> Iterator[None]:
    """By the kernel made for Hopper, or by the other one."""
    if roles:
        yield
    else:
        with mock.patch.object(attention_lists, "by_roles", return_value=False):
            yield


def has_roles() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


# ---- checks


def check_roles() -> None:
    """The kernel made for Hopper has the bits of the other one."""
    lengths = [1, 7, 63, 64, 65, 200, 513, 1300]
    for name in [name for name in NAMES if has_roles() and name != "int4"]:  # which has none
        scene = ScaledScene(name, lengths, 32, 8, 128, scale=1.0)  # scores far apart
        for items in ([(5, 0, 200)], [(row, 0, length) for row, length in enumerate(lengths)], [(7, 600, 700), (6, 10, 500)]):
            out = {}
            for way, (roles, room) in {"copied": (True, 500), "some": (True, 21), "none": (True, 0), "other": (False, 0)}.items():
                scene.copies = scene.exact.new_full((room, 2, 8, 64, 128), torch.nan) if room else None
                with prompts_by(roles):
                    out[way] = scene.run(items)
                torch.cuda.synchronize()
            for way, one in out.items():
                off = (one.float() - out["other"].float()).abs().max()
                assert torch.equal(one, out["other"]), f"{name} {items}, {way}: up to {float(off):.3g} apart"
        print(f"  roles {name}: the same bits", flush=True)


@triton.jit
def _unpack(words_ptr, scales_ptr, out_ptr, FP8: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scales = tl.load(scales_ptr + at).to(tl.float32)
    low, high = scaled_values.unpack(tl.load(words_ptr + at), scales * (1.329227995784916e36 if FP8 else 1.0), FP8, AHEAD)
    tl.store(out_ptr + 2 * at, low)
    tl.store(out_ptr + 2 * at + 1, high)


@triton.jit
def _unpack_four(words_ptr, scales_ptr, offsets_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scales, offsets = tl.load(scales_ptr + at).to(tl.float32), tl.load(offsets_ptr + at).to(tl.float32)
    parts = scaled_values.unpack_four(tl.load(words_ptr + at), scales, offsets, True)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * at + i, parts[i])


def check_unpack_four() -> None:
    """Every word of int4; code times scale plus offset is rounded once."""
    words = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    scales, offsets = (torch.randn(2, words.numel(), device="cuda") * 3).bfloat16().abs().unbind()
    out = torch.empty(words.numel(), 4, dtype=torch.bfloat16, device="cuda")
    _unpack_four[(words.numel() // 1024,)](words, scales, offsets, out, 1024)
    codes = torch.stack([((words.int() >> shift) & 15 ^ 8) - 8 for shift in (0, 8, 4, 12)], 1).double()
    expected = (codes * scales.double().unsqueeze(1) + offsets.double().unsqueeze(1)).bfloat16()
    assert torch.equal(out, expected)
    print("  unpack int4: every value, bit for bit", flush=True)


def check_unpack() -> None:
    """Every pair of values, with scales large and small."""
    if "int4" in NAMES:
        check_unpack_four()
    words = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).repeat(8)
    scales = torch.logspace(-8, 1.9, words.numel(), device="cuda").bfloat16()[torch.randperm(words.numel(), device="cuda")]
    for name in [name for name in NAMES if name != "int4"]:
        out = torch.empty(2 * words.numel(), dtype=torch.bfloat16, device="cuda")
        _unpack[(words.numel() // 1024,)](words, scales, out, name == "fp8", True, 1024)
        kinds = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        values = words.view(torch.int8).view(kinds[name]).float()
        expected = (values * scales.float().repeat_interleave(2)).bfloat16()
        is_number = ~values.isnan()
        assert torch.equal(out[is_number], expected[is_number]), name
    print("  unpack: every value, bit for bit", flush=True)


def check_store() -> None:
    heads, kv_heads, dim, page = 16, 8, 128, 64
    qkv = torch.randn(300, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    qkv *= torch.logspace(-6, 3, 300, device="cuda", dtype=torch.bfloat16).unsqueeze(1)
    cos, sin = (t.cuda() for t in rope_tables(*rope_frequencies(dim, 1e6, None), 300))
    positions, slots = torch.arange(300, dtype=torch.int32, device="cuda"), torch.randperm(10 * page, device="cuda")[:300]
    for name in NAMES:
        pool = torch.zeros(10, 3 * 2 * kv_heads * page * FORMATS[name].head_bytes(dim), dtype=torch.uint8, device="cuda")
        values, scales = views(pool, 3, kv_heads, page, dim, name)
        assert scales is not None
        elementwise.enter_heads(qkv.clone(), values, 2, positions, slots, Angles(cos, sin), heads, scales=scales)
        _, k, v = qkv.view(300, -1, dim).float().split([heads, kv_heads, kv_heads], 1)
        # On the CPU, which divides exactly.
        codes, expected = (one.cuda() for one in quantize(torch.stack([apply_rope(k, cos, sin), v], 1).cpu(), FORMATS[name]))
        at = slots // page, 2, slice(None), slice(None), slots % page
        written, found = values[at].view(torch.int8).int(), scales[at]
        if name == "int4":  # whose offsets are sums that may be rounded differently
            off = (dequantize(values[at], found, FORMATS[name]) - dequantize(codes, expected, FORMATS[name])).abs()
            assert (off <= 1.1 * expected[..., :1].float()).all(), "int4: more than a code apart"
            continue
        assert torch.equal(found[:, 1], expected[:, 1]), f"{name}: scales of values"
        apart = (written - codes.view(torch.int8).int())[:, 1].abs()
        # The kernel rounds once where the reference rounds twice: a value in the middle may have either code.
        assert apart.max() <= 1, f"{name}: values"
        assert (apart > 0).float().mean() < 0.001, f"{name}: values"
        off = (dequantize(values[at], found, FORMATS[name]) - dequantize(codes, expected, FORMATS[name])).abs()
        # A key's last bits depend on how its rotation is rounded, and then its code may be the next one.
        assert (off > 0).float().mean() < 0.01, f"{name}: keys"
        assert (off.amax(-1) <= 0.1 * k.abs().amax(-1).unsqueeze(1).clamp(min=1e-9)).all(), f"{name}: keys far off"
    print("  store: codes and scales of the reference", flush=True)


def check_attention() -> None:
    everything = {"window": 600, "softcap": 5.0, "has_sinks": True}
    lengths = [1, 64, 65, 513, 1301, 100, 2070]
    for name in NAMES:
        more_kind = (64, 8, 64, everything) if name == "fp8" else (8, 4, 256, {"window": 512})
        for heads, kv_heads, dim, more in ((32, 8, 128, {"scale": 1.0}), more_kind):
            scene = ScaledScene(name, lengths, heads, kv_heads, dim, **more)
            made = {}
            for roles in (True, False) if has_roles() and dim == 128 and name != "int4" else (False,):
                with prompts_by(roles):
                    whole = [scene.run([(row, 0, length)]) for row, length in enumerate(lengths)]
                    label = f"{name} {heads}/{kv_heads} heads of {dim} {'by roles' if roles else ''}"
                    for row, length in enumerate(lengths):
                        off = (whole[row].float() - scene.expected(row, 0, length)).abs().max()
                        assert off < (0.04 if "scale" in more else 0.02), (label, row, float(off))
                    cut = [torch.cat([scene.run([(row, 0, n // 3)]), scene.run([(row, n // 3, n - n // 3)])])
                           for row, n in enumerate(lengths) if n >= 6]  # fmt: skip
                    assert torch.equal(torch.cat(cut), torch.cat([one for one in whole if one.shape[0] >= 6])), f"{label}: chunks"
                    together = scene.run([(row, 0, length) for row, length in enumerate(lengths)], extra=3)
                    assert torch.equal(together, torch.cat(whole)), f"{label}: all together"
                    made[roles] = torch.cat(whole)
            every = scene.run([(row, at, 1) for row, length in enumerate(lengths) for at in range(length)], extra=7)
            for roles, one in made.items():
                same = (every == one).all(1).float().mean()
                assert torch.equal(every, one), (
                    f"{name} {heads}/{kv_heads}: token by token, by roles {roles}: {float(same):.1%} equal"
                )
            print(f"  attention {name}, {heads}/{kv_heads} heads of {dim} {more or ''}: the same bits", flush=True)
        lengths_of_family = [1100] * 40 + [700, 2000, 1500]
        scene = ScaledScene(name, lengths_of_family, 32, 8, 128, family=(*range(40), 41), common=1024)
        items = [(row, length - 1, 1) for row, length in enumerate(lengths_of_family)]
        assert len(scene.prepare(items)[0].members) == 2 * 41
        alone = torch.cat([scene.run([item]) for item in items])
        assert torch.equal(scene.run(items), alone), "a shared prefix"
        print(f"  attention {name}, a shared prefix: the same bits", flush=True)


# ---- kernels, timed


def time_decode() -> None:
    for batch, length in ((256, 384), (8, 16384), (1, 384), (1, 4096)):
        items = [(i, length - 1, 1) for i in range(batch)]
        num_values = batch * length * 8 * 128 * 2
        out = torch.empty(batch, 32 * 128, device="cuda", dtype=torch.bfloat16)

        def timed(scene: Scene, items: Any = items, out: torch.Tensor = out, batch: int = batch) -> float:
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
        say(kernel="decode", batch=batch, length=length, format="bfloat16", us=plain, TBs=num_values * 2 / plain / 1e6)
        scene.cache, scene.scales = quantized
        for ring in (True, False) if has_roles() else (False,):  # the kernel made for Hopper, or the other one
            with mock.patch.object(hopper_fp8, "FEW", 0 if ring else 10**9):
                us = timed(scene)
            rate = num_values * (1 + 2 / 128) / us / 1e6
            say(kernel="decode", batch=batch, length=length, format="fp8", ring=ring, us=us, TBs=rate, gain=plain / us)
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

        def timed(scene: Scene, batch: int = batch, length: int = length, out: torch.Tensor = out) -> float:
            work, lists = scene.prepare([(i, 0, length) for i in range(batch)])
            positions = torch.from_numpy(work.positions.copy()).cuda()
            given = scene.qkv, scene.cache, 0, scene.table, lists, out, scene.spec, positions
            return time_us([partial(attention.attend, *given, scales=scene.scales)], 3)

        plain = timed(Scene([length] * batch, 32, 8, 128))
        say(kernel="prompts", batch=batch, length=length, format="bfloat16", us=plain, TFLOPs=flops / plain / 1e6)
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
        slots = torch.randperm(num, device="cuda") * 64 if num == 256 else torch.arange(num, device="cuda")
        for name in ("bfloat16", *NAMES):
            kind = FORMATS[name]
            pages = torch.zeros(num, 2 * 2 * 8 * 64 * kind.head_bytes(128), dtype=torch.uint8, device="cuda")
            cache, scales = views(pages, 2, 8, 64, 128, name)
            if scales is None:
                cache = pages.view(torch.bfloat16).view(num, 2, 2, 8, 64, 128)
            call = partial(elementwise.enter_heads, qkv, cache, 1, positions, slots, Angles(cos, sin), 32, scales=scales)
            say(kernel="store", tokens=num, format=name, us=time_us([call]))


# ---- retrieval


def check_retrieval() -> None:
    """Eight requests of 16,384 tokens; for each KV head a key like its first query is planted somewhere, with a value that has
    one large dimension. Retrieved: that dimension is the result's largest. `strength`: of the planted key; at 1 it has about
    three times the weight of all others together."""
    length, batch, heads, kv_heads, dim = 16384, 8, 32, 8, 128
    for strength in (0.6, 0.8, 1.0, 1.2):
        scene = Scene([length] * batch, heads, kv_heads, dim)
        torch.manual_seed(5)
        last = torch.tensor([scene.first[row] + length - 1 for row in range(batch)], device="cuda")
        queries = scene.qkv[last].view(batch, -1, dim)[:, : heads : heads // kv_heads]  # the first of each group
        where, large = (
            torch.randint(0, length, (batch, kv_heads), device="cuda"),
            torch.randint(0, dim, (batch, kv_heads), device="cuda"),
        )
        for row in range(batch):
            for head in range(kv_heads):
                page, offset = int(scene.pages[row, int(where[row, head]) // 64]), int(where[row, head]) % 64
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


def check_engine() -> None:
    """As bench.gpu_engine_checks.check_engine, in each format."""
    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    prompt, seen = ids(700), {}
    others = {
        f"o{i}": (ids(1 + (i * 37) % 900), SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i))
        for i in range(255)
    }
    family = {f"s{i}": (prompt[: 600 + i % 3] + ids(5), SamplingParams(temperature=0.0, max_tokens=30)) for i in range(60)}
    for name in (*NAMES, "bfloat16"):

        def core(name: str = name, **options: Any) -> EngineCore:
            given: dict[str, Any] = {"kv_memory_bytes": 2**28, "max_requests": 256, "speculate": "off"} | options
            return load_core(EngineOptions(model=str(folder), kv_dtype=name, **given))

        x = {"x": (prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2))}
        y = {"x": (prompt, SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=2, seed=3))}
        whole = core()
        with nothing_compiles():
            lone, drawn = ask(whole, x)["x"], ask(whole, y)["x"]
            seen[name] = lone
            assert ask(whole, x)["x"] == lone, "cached"
            if name == "bfloat16":
                continue
            whole.scheduler.kv.clear_prefixes()
            assert ask(whole, others | x)["x"] == lone, "among 255 others"
            assert ask(whole, family | y)["x"] == drawn, "among 60 that begin like it"
        assert ask(without_graphs(whole), x)["x"] == lone, "without graphs"
        assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
        tight = core(kv_memory_bytes=2**22, max_context=1024, max_requests=64)
        assert ask(tight, dict(list(others.items())[:40]) | x)["x"] == lone, "preempted"
        print(f"  engine {name}: the same tokens and logprobs in any company; nothing compiled", flush=True)
    for name in NAMES:
        same = sum(a == b for a, b in zip(seen[name][0], seen["bfloat16"][0], strict=True))
        say(engine=name, tokens_as_bfloat16=same, of=len(seen["bfloat16"][0]))


def run_workload(core: EngineCore, requests: list[Request]) -> tuple[float, float]:
    """Seconds in all; and milliseconds of a step from when every request decodes."""
    core.scheduler.kv.clear_prefixes()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        core.submit(Submit(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)))
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
        print(f"  {model} {name}: ready in {time.perf_counter() - begin:.1f} s; {num_tokens:,} tokens in 24 GiB", flush=True)
    return made


def check_logits(engines: dict[str, EngineCore], vocab: int) -> None:
    """Of the token after prompts of 2,048 and 16,384 random tokens: KL divergence from bfloat16, and whether the likeliest is the
    same. Random weights attend almost evenly and have nearly equal logits; `check_retrieval` is about peaks."""
    draw = random.Random(3)
    for length in (2048, 16384):
        kl, same, num = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0), 4
        for _ in range(num):
            prompt = [draw.randrange(10, vocab) for _ in range(length)]
            logprobs = {}
            for name, core in engines.items():
                core.scheduler.kv.clear_prefixes()
                ask(core, {"x": (prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))})
                logprobs[name] = core.runner._logits[0].clone().log_softmax(-1)  # type: ignore[attr-defined]
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
    "roles": (120, [check_roles]),
    "checks": (200, [check_unpack, check_store, check_attention]),
    "kernels": (200, [time_store, time_decode, time_prompts]),
    "retrieval": (90, [check_retrieval]),
    "workloads": (240, [time_workloads]),
    "engine": (200, [check_engine]),
}


def without_roles() -> None:
    """8-bit prompts go through the kernel for all GPUs."""
    of_plain = attention_lists.by_roles

    def by_roles(specs: Any, has_scales: bool = False) -> bool:
        return not has_scales and of_plain(specs)

    attention_lists.by_roles = by_roles  # type: ignore[assignment]
    cuda_runner.by_roles = by_roles  # type: ignore[attr-defined, assignment]


def run_part(label: str, turns: int, roles: bool) -> None:
    if not roles:
        without_roles()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in PARTS[label][1]:
        guarded(f"{label}: {part.__name__}", partial(part, turns) if part is time_workloads else part)


def spawn(label: str, turns: int, roles: bool) -> list[dict[str, Any]]:
    found = Path(tempfile.mkdtemp()) / "lines.json"
    command = [sys.executable, "-m", "bench.gpu_kv", "--part", label, "--json", str(found), "--turns", str(turns)]
    command += ["--formats", ",".join(NAMES)]
    begin = time.perf_counter()
    try:
        code = subprocess.run(
            [*command, *([] if roles else ["--without-roles"])], timeout=PARTS[label][0], check=False
        ).returncode
        end = f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        end = "took too long"
    lines = json.loads(found.read_text()) if found.exists() else []
    print(f"{label}: {time.perf_counter() - begin:.0f} s {end}", flush=True)
    return lines + ([{"failed": label, "why": end}] if end else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help="in this process")
    parser.add_argument("--without-roles", action="store_true")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--formats", default="fp8,int8,int4")
    given = parser.parse_args()
    globals()["NAMES"] = tuple(given.formats.split(","))
    roles = not given.without_roles
    if given.part:
        run_part(given.part, given.turns, roles)
        Path(given.json or os.devnull).write_text(json.dumps(LINES, indent=1))
        return
    lines = []
    for label in given.parts.split(","):
        made = spawn(label, given.turns, roles)
        if label == "roles" and any("failed" in line for line in made):
            roles = False
            print("8-bit prompts: not by roles", flush=True)
        lines += made
    print("\nSummary")
    for line in lines:
        if any(key in line for key in ("workload", "strength", "failed", "logits", "kernel", "engine")):
            print("  " + json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}))
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
