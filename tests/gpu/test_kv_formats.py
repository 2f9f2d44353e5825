"""8-bit and 4-bit keys and values on the GPU at hand: kernels against their references, and the
same bits in any batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu.engines import ask, nothing_compiles, random_llama, without_graphs
from tests.gpu.scenes import ScaledScene, has_roles, prompts_by
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import kv_write, scaled_values
from tidemill.kernels.kv_cache import Angles, dequantize, quantize, views
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.types.kv_format import FORMATS
from tidemill.types.sampling import SamplingParams

NAMES = ("fp8", "int8", "int4")


def test_roles() -> None:
    """The kernel made for Hopper has the bits of the other one."""
    lengths = [1, 7, 63, 64, 65, 200, 513, 1300]
    for name in [name for name in NAMES if has_roles() and name != "int4"]:  # which has none
        scene = ScaledScene(name, lengths, 32, 8, 128, scale=1.0)  # scores far apart
        for items in (
            [(5, 0, 200)],
            [(row, 0, length) for row, length in enumerate(lengths)],
            [(7, 600, 700), (6, 10, 500)],
        ):
            out = {}
            for way, (roles, room) in {
                "copied": (True, 500),
                "some": (True, 21),
                "none": (True, 0),
                "other": (False, 0),
            }.items():
                scene.copies = (
                    scene.exact.new_full((room, 2, 8, 64, 128), torch.nan) if room else None
                )
                with prompts_by(roles):
                    out[way] = scene.run(items)
                torch.cuda.synchronize()
            for way, one in out.items():
                off = (one.float() - out["other"].float()).abs().max()
                assert torch.equal(one, out["other"]), (
                    f"{name} {items}, {way}: up to {float(off):.3g} apart"
                )


@triton.jit
def _unpack(
    words_ptr, scales_ptr, out_ptr, FP8: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scales = tl.load(scales_ptr + at).to(tl.float32)
    low, high = scaled_values.unpack(
        tl.load(words_ptr + at), scales * (1.329227995784916e36 if FP8 else 1.0), FP8, AHEAD
    )
    tl.store(out_ptr + 2 * at, low)
    tl.store(out_ptr + 2 * at + 1, high)


@triton.jit
def _unpack_four(words_ptr, scales_ptr, offsets_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scales, offsets = (
        tl.load(scales_ptr + at).to(tl.float32),
        tl.load(offsets_ptr + at).to(tl.float32),
    )
    parts = scaled_values.unpack_four(tl.load(words_ptr + at), scales, offsets, True)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * at + i, parts[i])


def test_unpack_four() -> None:
    """Every word of int4; code times scale plus offset is rounded once."""
    words = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    scales, offsets = (torch.randn(2, words.numel(), device="cuda") * 3).bfloat16().abs().unbind()
    out = torch.empty(words.numel(), 4, dtype=torch.bfloat16, device="cuda")
    _unpack_four[(words.numel() // 1024,)](words, scales, offsets, out, 1024)
    codes = torch.stack(
        [((words.int() >> shift) & 15 ^ 8) - 8 for shift in (0, 8, 4, 12)], 1
    ).double()
    expected = (codes * scales.double().unsqueeze(1) + offsets.double().unsqueeze(1)).bfloat16()
    assert torch.equal(out, expected)


def test_unpack() -> None:
    """Every pair of values, with scales large and small."""
    words = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).repeat(8)
    scales = torch.logspace(-8, 1.9, words.numel(), device="cuda").bfloat16()[
        torch.randperm(words.numel(), device="cuda")
    ]
    for name in [name for name in NAMES if name != "int4"]:
        out = torch.empty(2 * words.numel(), dtype=torch.bfloat16, device="cuda")
        _unpack[(words.numel() // 1024,)](words, scales, out, name == "fp8", True, 1024)
        kinds = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        values = words.view(torch.int8).view(kinds[name]).float()
        expected = (values * scales.float().repeat_interleave(2)).bfloat16()
        is_number = ~values.isnan()
        assert torch.equal(out[is_number], expected[is_number]), name


def test_store() -> None:
    heads, kv_heads, dim, page = 16, 8, 128, 64
    qkv = torch.randn(300, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    qkv *= torch.logspace(-6, 3, 300, device="cuda", dtype=torch.bfloat16).unsqueeze(1)
    cos, sin = (t.cuda() for t in rope_tables(*rope_frequencies(dim, 1e6, None), 300))
    positions, slots = (
        torch.arange(300, dtype=torch.int32, device="cuda"),
        torch.randperm(10 * page, device="cuda")[:300],
    )
    for name in NAMES:
        pool = torch.zeros(
            10,
            3 * 2 * kv_heads * page * FORMATS[name].head_bytes(dim),
            dtype=torch.uint8,
            device="cuda",
        )
        values, scales = views(pool, 3, kv_heads, page, dim, name)
        assert scales is not None
        kv_write.enter_heads(
            qkv.clone(), values, 2, positions, slots, Angles(cos, sin), heads, scales=scales
        )
        _, k, v = qkv.view(300, -1, dim).float().split([heads, kv_heads, kv_heads], 1)
        # On the CPU, which divides exactly.
        codes, expected = (
            one.cuda()
            for one in quantize(torch.stack([apply_rope(k, cos, sin), v], 1).cpu(), FORMATS[name])
        )
        at = slots // page, 2, slice(None), slice(None), slots % page
        written, found = values[at].view(torch.int8).int(), scales[at]
        if name == "int4":  # whose offsets are sums that may be rounded differently
            off = (
                dequantize(values[at], found, FORMATS[name])
                - dequantize(codes, expected, FORMATS[name])
            ).abs()
            assert (off <= 1.1 * expected[..., :1].float()).all(), "int4: more than a code apart"
            continue
        assert torch.equal(found[:, 1], expected[:, 1]), f"{name}: scales of values"
        apart = (written - codes.view(torch.int8).int())[:, 1].abs()
        # The kernel rounds once where the reference rounds twice: a value in the middle may have
        # either code.
        assert apart.max() <= 1, f"{name}: values"
        assert (apart > 0).float().mean() < 0.001, f"{name}: values"
        off = (
            dequantize(values[at], found, FORMATS[name])
            - dequantize(codes, expected, FORMATS[name])
        ).abs()
        # A key's last bits depend on how its rotation is rounded, and then its code may be the next
        # one.
        assert (off > 0).float().mean() < 0.01, f"{name}: keys"
        assert (off.amax(-1) <= 0.1 * k.abs().amax(-1).unsqueeze(1).clamp(min=1e-9)).all(), (
            f"{name}: keys far off"
        )


def test_attention() -> None:
    everything = {"window": 600, "softcap": 5.0, "has_sinks": True}
    lengths = [1, 64, 65, 513, 1301, 100, 2070]
    for name in NAMES:
        more_kind = (64, 8, 64, everything) if name == "fp8" else (8, 4, 256, {"window": 512})
        for heads, kv_heads, dim, more in ((32, 8, 128, {"scale": 1.0}), more_kind):
            scene = ScaledScene(name, lengths, heads, kv_heads, dim, **more)
            made = {}
            for roles in (
                (True, False) if has_roles() and dim == 128 and name != "int4" else (False,)
            ):
                with prompts_by(roles):
                    whole = [scene.run([(row, 0, length)]) for row, length in enumerate(lengths)]
                    label = (
                        f"{name} {heads}/{kv_heads} heads of {dim} {'by roles' if roles else ''}"
                    )
                    for row, length in enumerate(lengths):
                        off = (whole[row].float() - scene.expected(row, 0, length)).abs().max()
                        assert off < (0.04 if "scale" in more else 0.02), (label, row, float(off))
                    cut = [torch.cat([scene.run([(row, 0, n // 3)]), scene.run([(row, n // 3, n - n // 3)])])
                           for row, n in enumerate(lengths) if n >= 6]  # fmt: skip
                    assert torch.equal(
                        torch.cat(cut), torch.cat([one for one in whole if one.shape[0] >= 6])
                    ), f"{label}: chunks"
                    together = scene.run(
                        [(row, 0, length) for row, length in enumerate(lengths)], extra=3
                    )
                    assert torch.equal(together, torch.cat(whole)), f"{label}: all together"
                    made[roles] = torch.cat(whole)
            every = scene.run(
                [(row, at, 1) for row, length in enumerate(lengths) for at in range(length)],
                extra=7,
            )
            for roles, one in made.items():
                same = (every == one).all(1).float().mean()
                assert torch.equal(every, one), (
                    f"{name} {heads}/{kv_heads}: token by token, by roles {roles}: {float(same):.1%} equal"
                )
        lengths_of_family = [1100] * 40 + [700, 2000, 1500]
        scene = ScaledScene(
            name, lengths_of_family, 32, 8, 128, family=(*range(40), 41), common=1024
        )
        items = [(row, length - 1, 1) for row, length in enumerate(lengths_of_family)]
        assert len(scene.prepare(items)[0].members) == 2 * 41
        alone = torch.cat([scene.run([item]) for item in items])
        assert torch.equal(scene.run(items), alone), "a shared prefix"


@pytest.mark.parametrize("name", NAMES)
def test_engine(name: str, tmp_path: Path) -> None:
    """The same tokens and log probabilities in any batch, in each format; nothing compiles after
    the start."""
    folder = tmp_path
    random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    prompt = ids(700)
    others = {
        f"o{i}": (
            ids(1 + (i * 37) % 900),
            SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i),
        )
        for i in range(255)
    }
    family = {
        f"s{i}": (prompt[: 600 + i % 3] + ids(5), SamplingParams(temperature=0.0, max_tokens=30))
        for i in range(60)
    }

    def core(**options: Any) -> EngineCore:
        given: dict[str, Any] = {
            "kv_memory_bytes": 2**28,
            "max_requests": 256,
            "speculate": "off",
        } | options
        return load_core(EngineOptions(model=str(folder), kv_dtype=name, **given))

    x = {"x": (prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2))}
    y = {
        "x": (
            prompt,
            SamplingParams(
                temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=2, seed=3
            ),
        )
    }
    whole = core()
    with nothing_compiles():
        lone, drawn = ask(whole, x)["x"], ask(whole, y)["x"]
        assert ask(whole, x)["x"] == lone, "cached"
        whole.scheduler.kv.clear_prefixes()
        assert ask(whole, others | x)["x"] == lone, "among 255 others"
        assert ask(whole, family | y)["x"] == drawn, "among 60 that begin like it"
    assert ask(without_graphs(whole), x)["x"] == lone, "without graphs"
    assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
    tight = core(kv_memory_bytes=2**22, max_context=1024, max_requests=64)
    assert ask(tight, dict(list(others.items())[:40]) | x)["x"] == lone, "preempted"
