"""Matmuls of quantized weights on the GPU at hand: near float32, and the same bits at any number of
rows, in any tile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_quant import FORMATS, FP8, new_packed, new_scaled
from tests.gpu.engines import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import hopper_packed
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.cuda.norm import add_rms_norm
from tidemill.kernels.cuda.packed_gemm import (
    dequantize,
    gemm_chunked,
    gemm_packed,
    unpack_reference,
)
from tidemill.kernels.cuda.rounding import Scaled
from tidemill.kernels.cuda.scaled_gemm import (
    ScaledTile,
    gemm_scaled,
    quantize_blocks,
    quantize_rows,
)
from tidemill.types.sampling import SamplingParams


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 129, 192, 256, 300)


def check_invariance(
    name: str,
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    expected: torch.Tensor,
    bound: float,
) -> None:
    whole = call(x)
    wrong = [num for num in ROWS for at in (0, x.shape[0] - num)
             if not torch.equal(call(x[at : at + num].clone()), whole[at : at + num])]  # fmt: skip
    assert not wrong, f"{name}: other bits at rows {sorted(set(wrong))}"
    off = error(whole, expected)
    assert off < bound, f"{name}: error {off:.5f}"


def wide(one: Scaled) -> torch.Tensor:
    scales = one.scales.t().repeat_interleave(128, 1) if one.has_blocks else one.scales[:, None]
    return one.values_NK.float() * scales


@dataclass
class Check:
    name: str
    call: Callable[[torch.Tensor], torch.Tensor]
    num_in: int
    rounded: Callable[[torch.Tensor], torch.Tensor]  # activations as they are multiplied
    weight: torch.Tensor  # in float32
    bound: float


def new_checks() -> Iterable[Check]:
    for num_out, num_in in ((4096, 4096), (1024, 14336), (1000, 208)):
        for kind, dtype, blocks in (
            ("fp8", FP8, False),
            ("int8", torch.int8, False),
            ("fp8 blocks", FP8, True),
        ):
            if blocks and num_in % 128:
                continue
            weight = new_scaled(num_out, num_in, dtype, blocks)
            quantize = partial(
                quantize_blocks if blocks else quantize_rows, dtype=dtype, padded=num_in
            )
            for out in (torch.bfloat16, torch.float32):
                yield Check(
                    f"{kind} {num_out}x{num_in} {out}",
                    lambda x, q=quantize, w=weight, o=out: gemm_scaled(q(x), w, o),
                    num_in,
                    lambda x, q=quantize: wide(q(x)),
                    wide(weight),
                    0.01,
                )
    for name, how in FORMATS.items():
        for num_out, num_in in (
            ((1024, 4096), (4096, 14336)) if name in ("w4 g128", "w8 channel") else ((1024, 4096),)
        ):
            packed = new_packed(num_out, num_in, *how)
            exact, dense = unpack_reference(packed), dequantize(packed)
            yield Check(
                f"{name} {num_out}x{num_in}",
                lambda x, w=packed: gemm_packed(x, w),
                num_in,
                torch.Tensor.float,
                exact,
                0.005,
            )
            yield Check(
                f"  {name} as bfloat16",
                lambda x, d=dense, c=packed.chunk: gemm_chunked(x, d, c),
                num_in,
                torch.Tensor.float,
                exact,
                0.005,
            )


def test_matmuls() -> None:
    """Each kind near float32; the same bits at any number of rows; packed weights those of the
    bfloat16 that they stand for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    checks = list(new_checks())
    with compile_elsewhere(), compile_only():
        for one in checks:
            for rows in (16, 32, 64, 128, 256, 600):
                one.call(torch.empty(rows, one.num_in, device="cuda", dtype=torch.bfloat16))
    generator = torch.Generator("cuda")
    last = None
    for one in checks:
        generator.manual_seed(7)  # not that of the weights, whose rows would be like its rows
        x = torch.randn(600, one.num_in, device="cuda", dtype=torch.bfloat16, generator=generator)
        check_invariance(one.name, one.call, x, one.rounded(x) @ one.weight.t(), one.bound)
        out = one.call(x)
        if one.name.startswith("  "):  # of the same weight
            assert last is not None
            assert torch.equal(out, last), f"{one.name}: other bits than the packed weight's"
        last = out
    weight = new_scaled(4096, 4096)
    given = quantize_rows(torch.randn(2000, 4096, device="cuda", dtype=torch.bfloat16), FP8, 4096)
    for act in ("", "silu"):  # many rows are multiplied by roles
        ours, other = (
            gemm_scaled(given, weight, torch.bfloat16, tile, act=act)
            for tile in (None, ScaledTile(128, 128, 128, 3, 4))
        )
        assert torch.equal(ours, other), f"fp8, warp-specialized, {act}"


def test_warp_specialized() -> None:
    """The bits of the other kernel, at every number of rows and in every tile."""
    checks = [
        (name, new_packed(num_out, num_in, *FORMATS[name]), act)
        for name, shapes in {
            "w4 g128": (
                (1024, 4096, ""),
                (4096, 14336, ""),
                (4096, 4096, "silu"),
                (9216, 2048, "silu"),
            ),
            "w4 g128 zeros": ((1024, 4096, ""),),
            "w4 g32 offsets (Q4_K)": ((1024, 4096, ""), (9216, 2048, "silu")),
            "w8 channel": ((1024, 4096, ""),),
            "ternary": ((1024, 4096, "gelu_tanh"),),
        }.items()
        for num_out, num_in, act in shapes
    ]
    rows_to_check = (33, 48, 64, 65, 100, 128, 192, 256, 300, 600)
    with compile_elsewhere(), compile_only():
        for _, weight, act in checks:
            x = torch.empty(600, weight.num_in, device="cuda", dtype=torch.bfloat16)
            for rows in (64, 256, 600):
                gemm_packed(x[:rows], weight, act=act)
                hopper_packed.gemm_warp_specialized(x[:rows], weight, act=act)
    for name, weight, act in checks:
        x = torch.randn(600, weight.num_in, device="cuda", dtype=torch.bfloat16)
        expected = gemm_packed(x, weight, act=act)
        off: dict[Any, float] = {
            rows: round(error(made, expected[:rows].float()), 5)
            for rows in rows_to_check
            if not torch.equal(
                made := hopper_packed.gemm_warp_specialized(x[:rows].clone(), weight, act=act),
                expected[:rows],
            )
        }
        for rows in () if act else rows_to_check:  # the norm behind it adds up
            made, given = (
                torch.ones(rows, weight.num_out, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            )
            learned = torch.ones(weight.num_out, device="cuda")
            one = add_rms_norm(
                hopper_packed.gemm_warp_specialized(x[:rows].clone(), weight, leave=True),
                made,
                learned,
                1e-5,
            )
            other = add_rms_norm(expected[:rows].contiguous(), given, learned, 1e-5)
            off |= (
                {}
                if torch.equal(made, given) and torch.equal(one, other)
                else {f"{rows} left": error(made, given.float())}
            )
        assert not off, f"{name} {weight.num_out}x{weight.num_in} {act}: other bits, {off}"


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_engine(scheme: str, tmp_path: Path) -> None:
    """Tokens and log probabilities of a small random Llama: alone, cached, among others and in
    chunks."""
    random_llama(tmp_path)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    def core(**options: Any) -> Any:
        given: dict[str, Any] = {
            "kv_memory_bytes": 2**28,
            "max_requests": 256,
            "quantization": scheme,
        } | options
        return load_core(EngineOptions(model=str(tmp_path), **given))

    x = {
        "x": (ids(700), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2))
    }
    others = {
        f"o{i}": (
            ids(1 + (i * 37) % 900),
            SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i),
        )
        for i in range(255)
    }
    whole = core()
    lone = ask(whole, x)["x"]
    assert ask(whole, x)["x"] == lone, "cached"
    assert ask(whole, others | x)["x"] == lone, "among 255 others"
    assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
