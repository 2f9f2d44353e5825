"""Every GPU kernel held against its reference on the GPU at hand, and bit for bit against itself in
other batches."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.gpu.scenes import TILES, Scene, has_flash
from tidemill.kernels.cuda import attention, glu, kv_write, launch, norm, sampling, tuning
from tidemill.kernels.cuda.attention_lists import BLOCK, Lists
from tidemill.kernels.cuda.gemm import MANY, WARP_SPECIALIZED, gemm, library_agrees, matmul
from tidemill.kernels.glu import glu_reference
from tidemill.kernels.kv_cache import PLAIN, Angles, HeadWeights
from tidemill.kernels.norm import (
    add_layer_norm_reference,
    add_rms_norm_reference,
    post_norm_reference,
    qk_norm_reference,
)
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.runner.sampler import restrict_min_p, restrict_top_k, restrict_top_p, restrict_typical


def test_elementwise() -> None:
    for width in (4096, 1024, 576):
        x, residual = torch.randn(2, 300, width, device="cuda", dtype=torch.bfloat16).unbind()
        weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        mine, other = residual.clone(), residual.clone()
        out, expected = (
            norm.add_rms_norm(x, mine, weight, 1e-5),
            add_rms_norm_reference(x, other, weight, 1e-5),
        )
        assert torch.equal(mine, other)
        assert (out - expected).float().abs().max() <= 2**-7 * expected.float().abs().max()
        alone = norm.add_rms_norm(x[7:8].clone(), residual[7:8].clone(), weight, 1e-5)
        assert torch.equal(alone, out[7:8])
        check_norms(x, residual, weight)
    gate, up = torch.randn(2, 300, 3072, device="cuda", dtype=torch.bfloat16).unbind()
    paired, both = torch.stack([gate, up], 2).flatten(1), torch.cat([gate, up], 1).float()
    out, expected = glu.glu(paired, "silu"), glu_reference(both)
    assert (
        glu.glu(paired, "gelu_tanh").float() - glu_reference(both, "gelu_tanh")
    ).abs().max() < 0.1
    assert (out - expected).abs().max() <= 2**-7 * expected.abs().max()
    out, expected = (
        glu.activate(gate, "gelu_tanh").float(),
        F.gelu(gate.float(), approximate="tanh"),
    )
    assert (out - expected).abs().max() <= 2**-7 * expected.abs().max()


def check_norms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Those that few models have."""
    bias = torch.randn_like(weight)
    qkv = torch.cat([x, residual[:, :256], residual[:, :256]], 1)
    kinds: tuple[
        tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[Any, ...]], ...
    ] = (
        (norm.add_rms_norm, add_rms_norm_reference, (x, residual, weight, 1e-5, 0.22)),
        (norm.add_layer_norm, add_layer_norm_reference, (x, residual, weight, bias, 1e-5)),
        (norm.post_norm, post_norm_reference, (x, residual, weight, 1e-5)),
        (norm.qk_norm, qk_norm_reference, (qkv, weight, bias[:256], 1e-5)),
    )
    for ours, reference, given in kinds:
        exact = [one.float() if isinstance(one, torch.Tensor) else one for one in given]
        lone = [
            one[7:8].clone() if isinstance(one, torch.Tensor) and one.dim() == 2 else one
            for one in given
        ]
        alone, expected = ours(*lone).clone(), reference(*exact)
        out = ours(*(one.clone() if isinstance(one, torch.Tensor) else one for one in given))
        assert (out.float() - expected).abs().max() <= 2**-6 * expected.abs().max(), ours
        assert torch.equal(alone, out[7:8]), ours


def test_gemm() -> None:
    torch.manual_seed(0)
    for num_out, num_in in ((4096, 4096), (1024, 3072), (1000, 1024), (512, 14336)):
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) / num_in**0.5
        x = torch.randn(2048, num_in, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(num_out, device="cuda", dtype=torch.bfloat16)
        whole = gemm(x, weight)
        exact = x.float() @ weight.float().t()
        assert (whole.float() - exact).abs().max() < 0.05
        gated = gemm(x, weight, bias_N=bias, act="silu")
        both = exact + bias.float()
        expected = glu_reference(torch.cat([both[:, ::2], both[:, 1::2]], 1))
        assert (gated.float() - expected).abs().max() < 2**-6 * expected.abs().max()
        for rows in (1, 2, 16, 17, 63, 64, 100, 128, 256, 1000, 2048):
            assert torch.equal(gemm(x[:rows].contiguous(), weight), whole[:rows]), (
                num_out,
                num_in,
                rows,
            )
            assert library_agrees(rows, num_out, num_in, x.device) or rows < 64, (
                num_out,
                num_in,
                rows,
            )
        for tile in itertools.chain.from_iterable(TILES.values()):
            part = x[:200].contiguous()
            assert torch.equal(gemm(part, weight, tile), whole[:200]), tile
            assert torch.equal(gemm(part, weight, tile, bias_N=bias, act="silu"), gated[:200]), tile


@pytest.mark.parametrize("num_in", [64, 170, 171, 512, 1400])
def test_the_librarys_matmul_is_taken_only_where_it_has_our_bits(num_in: int) -> None:
    torch.manual_seed(0)
    for num_out in (512, 1024):
        x = torch.randn(1024, num_in, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
        whole = gemm(x, weight)
        for rows in (16, 33, 64, 65, 100, 128, 200, 256, 512, 1024):
            if library_agrees(rows, num_out, num_in, x.device):
                assert torch.equal(F.linear(x[:rows].clone(), weight), whole[:rows]), (
                    num_out,
                    rows,
                )


def test_gemm_warp_specialized() -> None:
    """The kernel for many rows: the bits of the other one."""
    torch.manual_seed(0)
    for num_out, num_in in (
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (1008, 1024),
        (1040, 1032),
        (272, 72),
    ):
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) / num_in**0.5
        x = torch.randn(2048, num_in, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(num_out, device="cuda", dtype=torch.bfloat16)
        for act, added in (("", None), ("", bias), ("silu", None)):
            expected = gemm(x, weight, MANY, bias_N=added, act=act)
            for rows in (1, 128, 513, 600, 1000, 1537, 2048):
                out = gemm(x[:rows].contiguous(), weight, WARP_SPECIALIZED, bias_N=added, act=act)
                assert torch.equal(out, expected[:rows]), (num_out, num_in, rows, act)


def test_tuning(tmp_path: Path) -> None:
    """A shape that no table knows: searched once, kept for the next start, the same bits whatever
    is found."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
        for act, num_out, num_in in (
            ("", 5120, 2560),
            ("", 2560, 4096),
            ("silu", 19456, 2560),
            ("", 2560, 9728),
        ):
            weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(300, num_in, device="cuda", dtype=torch.bfloat16)
            before = [matmul(x[:rows].contiguous(), weight, None, act) for rows in (1, 40, 300)]
            tuning.find_tiles(weight, act, library=True)
            after = [matmul(x[:rows].contiguous(), weight, None, act) for rows in (1, 40, 300)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        kept = json.loads((tmp_path / "tidemill" / "tiles.json").read_text())
        assert list(kept[torch.cuda.get_device_name()]) == [
            "5120x2560",
            "2560x4096",
            "19456x2560",
            "2560x9728",
        ]


def test_attention() -> None:
    everything: dict[str, Any] = {"window": 600, "softcap": 5.0, "has_sinks": True}
    kinds: list[tuple[int, int, int, dict[str, Any]]] = [
        (32, 8, 128, {}), (32, 8, 128, {"scale": 1.0}), (16, 8, 128, {}), (9, 3, 64, {}), (64, 8, 64, everything),
        (8, 4, 256, {"window": 512, "softcap": 50.0}),
    ]  # fmt: skip
    for heads, kv_heads, dim, more in kinds:
        lengths = [1, 64, 65, 512, 513, 1301, 1700, 100, 630, 2070]
        scene = Scene(lengths, heads, kv_heads, dim, **more)
        whole = [scene.run([(row, 0, length)]) for row, length in enumerate(lengths)]
        for row, length in enumerate(lengths):
            off = (whole[row].float() - scene.expected(row, 0, length)).abs().max()
            assert off < (0.04 if "scale" in more else 0.02), (heads, row, float(off))
            cut = length // 3
            if cut > 1:
                parts = torch.cat(
                    [scene.run([(row, 0, cut)]), scene.run([(row, cut, length - cut)])]
                )
                assert torch.equal(parts, whole[row]), "in two chunks"
        together = scene.run([(row, 0, length) for row, length in enumerate(lengths)], extra=3)
        assert torch.equal(together, torch.cat(whole)), "all together"
        every = scene.run(
            [(row, at, 1) for row, length in enumerate(lengths) for at in range(length)], extra=7
        )
        assert torch.equal(every, torch.cat(whole)), "token by token"
        last, expected = (
            [(row, length - 1, 1) for row, length in enumerate(lengths)],
            torch.stack([out[-1] for out in whole]),
        )
        assert torch.equal(scene.run(last), expected), "last tokens"
        for is_alone in (False, True):
            assert torch.equal(
                torch.cat([scene.run([one], alone=is_alone) for one in last]), expected
            ), "one by one"
    lengths = [1100] * 40 + [700, 2000, 1500]
    plain: dict[str, Any] = {}
    for more in (plain, everything):
        scene = Scene(lengths, 32, 8, 128, family=(*range(40), 41), common=1024, **more)
        items = [(row, length - 1, 1) for row, length in enumerate(lengths)]
        work, _ = scene.prepare(items)
        assert len(work.members) == 2 * 41
        alone = torch.cat([scene.run([item]) for item in items])
        assert torch.equal(scene.run(items), alone), "a shared prefix"
        assert torch.equal(scene.run(items, extra=5), alone), "a shared prefix, few programs"


def test_early() -> None:
    """The kernel that enters keys lets attention in: nothing may be read too early. Layers in a
    graph, many times."""
    for lengths in ([385], [512], [65], [1400], [385, 64, 700, 1]):
        scene = Scene(lengths, 32, 8, 128, layers=8)
        work, lists = scene.prepare([(row, length - 1, 1) for row, length in enumerate(lengths)])
        lists.alone = len(lengths) == 1
        positions = torch.from_numpy(work.positions).cuda()
        page = scene.table[
            torch.arange(len(lengths), device="cuda"), positions.long() // BLOCK
        ].long()
        slots = page * BLOCK + positions % BLOCK
        angle = torch.randn(max(lengths), scene.dim // 2, device="cuda")
        source, qkv = scene.qkv[: len(lengths)].contiguous(), scene.qkv[: len(lengths)].clone()
        outs = [source.new_zeros(len(source), scene.heads * scene.dim) for _ in range(8)]
        step = partial(
            _attend_layers,
            scene,
            lists,
            positions,
            slots,
            Angles(angle.cos(), angle.sin()),
            source,
            qkv,
            outs,
        )
        graphs = []
        for few in (0, launch.FEW):
            with mock.patch.object(launch, "FEW", few):
                step()
                torch.cuda.synchronize()
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1]):
                    step()
        for seed in range(50):
            source.copy_(
                torch.randn(
                    source.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
                )
            )
            made = []
            for graph in graphs:
                graph.replay()
                made.append(torch.stack(outs))
            assert torch.equal(*made), (lengths, seed)


def _attend_layers(
    scene: Scene, lists: Lists, positions: torch.Tensor, slots: torch.Tensor, angles: Angles, source: torch.Tensor,
    qkv: torch.Tensor, outs: list[torch.Tensor],
) -> None:  # fmt: skip
    for layer, out in enumerate(outs):
        qkv.copy_(source)
        kv_write.enter_heads(qkv, scene.cache, layer, positions, slots, angles, scene.heads)
        attention.attend(qkv, scene.cache, layer, scene.table, lists, out, scene.spec, positions)


def test_flash() -> None:
    """Prompts by flash-attn-4: whole, in chunks, several in a step with single tokens between them."""
    if not has_flash():
        pytest.skip("flash-attn-4 is not there")
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (9, 3, 64)):
        lengths = [1301, 65, 2070, 513, 64]
        scene = Scene(lengths, heads, kv_heads, dim)
        items = [(0, 0, 1301), (1, 64, 1), (2, 1000, 1070), (3, 0, 513), (4, 0, 64)]
        out, first = scene.run(items, by_flash=True), 0
        for item in items:
            expected = scene.expected(*item)
            assert (out[first : first + item[2]].float() - expected).abs().max() < 0.02, (
                heads,
                item,
            )
            first += item[2]


def test_heads() -> None:
    heads, kv_heads, dim, page = 16, 8, 128, 16
    qkv = torch.randn(40, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(10, 3, 2, kv_heads, page, dim, device="cuda", dtype=torch.bfloat16)
    cos, sin = (t.cuda() for t in rope_tables(*rope_frequencies(dim, 1e6, None), 100))
    positions, slots = (
        torch.arange(40, dtype=torch.int32, device="cuda"),
        torch.randperm(160, device="cuda")[:40],
    )
    q_norm, k_norm = torch.randn(2, dim, device="cuda", dtype=torch.bfloat16).unbind()
    for learned in (None, HeadWeights(q_norm, k_norm, 1e-6)):
        given = qkv.view(40, -1, dim).clone()
        out = qkv.clone()
        kv_write.enter_heads(
            out, cache, 2, positions, slots, Angles(cos, sin), heads, learned or PLAIN
        )
        q, k, v = given.split([heads, kv_heads, kv_heads], 1)
        if learned:
            q, k = F.rms_norm(q, (dim,), q_norm, 1e-6), F.rms_norm(k, (dim,), k_norm, 1e-6)
        q, k = (apply_rope(x.float(), cos[:40], sin[:40]) for x in (q, k))
        assert (out.view(40, -1, dim)[:, :heads] - q).abs().max() < 0.05
        entered = cache[slots // page, 2, :, :, slots % page]
        assert (entered[:, 0] - k).abs().max() < 0.05
        assert torch.equal(entered[:, 1], v)


def test_sampling() -> None:
    """Restrictions as the CPU's sampler makes them; draws that follow the distribution, the same in
    any batch."""
    torch.manual_seed(0)
    logits = torch.randn(8, 128256, device="cuda") * 3
    for settings in (
        {}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.95, "log_min_p": math.log(0.01)}, {"typical_p": 0.8},
        {"top_k": 100000}, {"top_p": 0.99},
    ):  # fmt: skip
        kept = ~kept_logits(logits, 0.8, **settings)
        theirs = logits / 0.8
        restrict_top_k(theirs, [int(settings.get("top_k", 0))] * 8)
        restrict_top_p(theirs, [settings.get("top_p", 1.0)] * 8)
        restrict_min_p(theirs, [math.exp(settings.get("log_min_p", -math.inf))] * 8)
        restrict_typical(theirs, [settings.get("typical_p", 1.0)] * 8)
        assert (kept != theirs.isinf()).sum() <= 8, f"{settings}: more than a sum's last bits"
        assert torch.equal(~kept_logits(logits[3:4].contiguous(), 0.8, **settings), kept[3:4]), (
            f"{settings}: alone"
        )
    num, few = 20000, torch.randn(20, device="cuda")
    draws = torch.zeros(num, 3, dtype=torch.int32, device="cuda")
    draws[:, 0], draws[:, 1] = int(np.float32(1.0).view(np.int32)), torch.arange(num)
    tokens = torch.zeros(num, 8, dtype=torch.int32, device="cuda")
    rows, positions = (
        torch.arange(num, dtype=torch.int32, device="cuda"),
        torch.full((num,), 3, dtype=torch.int32, device="cuda"),
    )
    drawn = sampling.pick_tokens(
        few.expand(num, -1).contiguous(), rows, rows, positions, draws, tokens
    )
    seen = torch.bincount(drawn, minlength=20) / num
    assert (seen - few.softmax(-1)).abs().max() < 0.015
    assert torch.equal(tokens[:, 4], drawn)
    alone = sampling.pick_tokens(
        few[None].contiguous(), rows[77:78], rows, positions, draws, tokens
    )
    assert alone[0] == drawn[77]


def kept_logits(logits: torch.Tensor, temperature: float, **settings: float) -> torch.Tensor:
    """Those that restrictions leave, the same for all rows."""
    num = logits.shape[0]
    records = np.zeros(num, sampling.RECORD)
    records["row"] = records["source"] = np.arange(num)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("log_min_p", -math.inf), ("typical_p", 1.0)):
        records[name] = settings.get(name, off)
    draws = np.zeros((num, 3), np.int32)
    draws[:, 0] = np.float32(temperature).view(np.int32)
    work = sampling.Workspace.make(num, logits.shape[1], logits.device)
    words = torch.from_numpy(records.view(np.int32).reshape(num, -1)).cuda()
    sampling.find_limits(logits, logits, words, torch.from_numpy(draws).cuda(), work)
    return (logits >= work.limits[:, :1]) & (logits <= work.limits[:, 1:])
