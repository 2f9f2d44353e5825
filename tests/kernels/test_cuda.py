"""The GPU kernels without a GPU: interpreted against their references, and compiled for Hopper.

The interpreter's bfloat16 arithmetic is wrong, so everything is float32 here; tests/gpu checks them
in bfloat16 on a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.helpers import LONG_S
from tidemill.kernels import masks
from tidemill.kernels.attention import attention_reference
from tidemill.kernels.cuda import (
    attention,
    attention_lists,
    flash,
    gemm,
    glu,
    hopper_gemm,
    kv_write,
    launch,
    look_up,
    norm,
    records,
    sampling,
    tuning,
)
from tidemill.kernels.glu import ACTIVATIONS, activate_reference, glu_reference
from tidemill.kernels.kv_cache import PLAIN, Angles, HeadWeights
from tidemill.kernels.noise import exponential_noise, noise_keys
from tidemill.kernels.norm import (
    add_layer_norm_reference,
    add_rms_norm_reference,
    post_norm_reference,
    qk_norm_reference,
)
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.runner import cuda_work
from tidemill.runner.cuda_graphs import one_of_each_kind, sizes
from tidemill.types.model_config import AttentionSpec


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("with_x", [False, True])
def test_norm(width, with_x):
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    mine, other = residual.clone(), residual.clone()
    given = x if with_x else None
    norms = norm.add_rms_norm, add_rms_norm_reference
    out, expected = (
        op(given, one, weight, 1e-5) for op, one in zip(norms, (mine, other), strict=True)
    )
    assert torch.equal(mine, other)
    assert_close(out, expected, atol=1e-5, rtol=1e-5)
    mine, other = residual.clone(), residual.clone()
    out, expected = (
        op(given, one, weight, 1e-5, 0.3) for op, one in zip(norms, (mine, other), strict=True)
    )
    assert_close(mine, other, atol=1e-6, rtol=1e-6)
    assert_close(out, expected, atol=1e-5, rtol=1e-5)
    mine, other, bias = residual.clone(), residual.clone(), torch.randn(width)
    out = norm.add_layer_norm(given, mine, weight, bias, 1e-5)
    assert_close(
        out, add_layer_norm_reference(given, other, weight, bias, 1e-5), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(mine, other)


@pytest.mark.parametrize("width", [64, 100])
def test_norms_after(width):
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    assert_close(
        norm.post_norm(x, residual, weight, 1e-5), post_norm_reference(x, residual, weight, 1e-5)
    )
    qkv, k_weight = torch.randn(5, width + 2 * 24), torch.randn(24)
    expected = qk_norm_reference(qkv, weight, k_weight, 1e-5)
    assert_close(norm.qk_norm(qkv, weight, k_weight, 1e-5), expected)


def paired(gate_up):
    """All gates before all ups to gate and up in turn."""
    return torch.stack(gate_up.chunk(2), 1).flatten(0, 1)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_glu(act):
    gate_up = torch.randn(3, 2 * 1500)
    out = glu.glu(paired(gate_up.t()).t().contiguous(), act)
    assert_close(out, glu_reference(gate_up, act), atol=1e-5, rtol=1e-5)
    if act != "swiglu_clamped":
        assert_close(
            glu.activate(gate_up, act), activate_reference(gate_up, act), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("act", sorted(ACTIVATIONS.keys() - {"swiglu_clamped"}))
def test_every_activation(act):
    x = torch.randn(3, 1100) * 4
    assert_close(glu.activate(x, act), activate_reference(x, act), atol=1e-5, rtol=1e-5)


def test_look_up():
    tokens, pages = (
        torch.randint(0, 99, (4, 50), dtype=torch.int32),
        torch.randint(0, 99, (4, 26), dtype=torch.int32),
    )
    rows, positions = (
        torch.randint(0, 4, (300,), dtype=torch.int32),
        torch.randint(0, 50, (300,), dtype=torch.int32),
    )
    ids, slots = look_up.look_up(rows, positions, tokens, list(pages.split(13, 1)), 4)
    assert torch.equal(ids, tokens[rows, positions])
    for group in range(2):
        assert torch.equal(
            slots[group], pages[rows, 13 * group + positions // 4].long() * 4 + positions % 4
        )


@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_enter_the_cache(has_norm):
    heads, kv_heads, dim, page, layer = 4, 2, 16, 4, 1
    qkv, cache = (
        torch.randn(6, (heads + 2 * kv_heads) * dim),
        torch.zeros(4, 3, 2, kv_heads, page, dim),
    )
    cos, sin = rope_tables(*rope_frequencies(dim, 1e4, None), 40)
    positions, slots = torch.tensor([30, 1, 2, 0, 7, 8]), torch.tensor([5, 0, 15, 9, 4, 11])
    q_weight, k_weight = torch.randn(2, dim)
    q, k, v = qkv.view(6, -1, dim).clone().split([heads, kv_heads, kv_heads], 1)
    if has_norm:
        q = torch.nn.functional.rms_norm(q, (dim,), q_weight, 1e-6)
        k = torch.nn.functional.rms_norm(k, (dim,), k_weight, 1e-6)
    q, k = (
        apply_rope(q, cos[positions], sin[positions]),
        apply_rope(k, cos[positions], sin[positions]),
    )
    weights = HeadWeights(q_weight, k_weight, 1e-6) if has_norm else PLAIN
    kv_write.enter_heads(qkv, cache, layer, positions, slots, Angles(cos, sin), heads, weights)
    assert_close(qkv.view(6, -1, dim)[:, :heads], q, atol=1e-5, rtol=1e-5)
    entered = cache[slots // page, layer, :, :, slots % page]
    assert_close(entered[:, 0], k, atol=1e-5, rtol=1e-5)
    assert torch.equal(entered[:, 1], v)
    assert cache.count_nonzero() == 6 * 2 * kv_heads * dim


@pytest.mark.parametrize("rotated", [0, 8, 12])
def test_heads_are_rotated_in_part(rotated):
    heads, kv_heads, dim, page = 4, 2, 16, 4
    qkv, cache = (
        torch.randn(3, (heads + 2 * kv_heads) * dim),
        torch.zeros(4, 1, 2, kv_heads, page, dim),
    )
    positions, slots = torch.tensor([30, 1, 2]), torch.tensor([5, 0, 15])
    angles = Angles(*rope_tables(*rope_frequencies(rotated, 1e4, None), 40)) if rotated else None
    expected = qkv.view(3, -1, dim)[:, : heads + kv_heads].clone()
    if angles:
        expected = apply_rope(expected, angles.cos[positions], angles.sin[positions])
    kv_write.enter_heads(qkv, cache, 0, positions, slots, angles, heads)
    assert_close(qkv.view(3, -1, dim)[:, :heads], expected[:, :heads], atol=1e-5, rtol=1e-5)
    assert_close(
        cache[slots // page, 0, 0, :, slots % page], expected[:, heads:], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "tile",
    [
        gemm.Tile(16, 32, 32, 2, 4),
        gemm.Tile(32, 16, 64, 2, 4),
        gemm.Tile(32, 32, 32, 2, 4, bulk=1),
        gemm.WARP_SPECIALIZED,
    ],
)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 40, 64), (50, 72, 96), (33, 16, 104)])
def test_gemm(tile, rows, outs, ins):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, ins), torch.randn(outs, ins)
    assert_close(gemm.gemm(x, weight, tile), x @ weight.t(), atol=1e-4, rtol=1e-5)
    bias, out = torch.randn(outs), torch.empty(rows, outs)
    assert gemm.gemm(x, weight, tile, bias_N=bias, out=out) is out
    assert_close(out, x @ weight.t() + bias, atol=1e-4, rtol=1e-5)
    gated = gemm.gemm(x, paired(weight), tile, bias_N=paired(bias), act="silu")
    assert_close(gated, glu_reference(x @ weight.t() + bias), atol=1e-4, rtol=1e-5)


def test_the_warp_specialized_kernel_takes_what_it_can(monkeypatch):
    """And the one for many rows the rest, whatever the tile says."""
    launched = []
    monkeypatch.setattr(hopper_gemm, "is_hopper", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    for module in (hopper_gemm, gemm):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *given, **more: launched.append(kernel)
        )
    x, weight, bias = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((600, 64), (272, 64), (272,))
    )
    for more in ({}, {"act": "silu"}, {"bias_N": bias}):
        gemm.gemm(x, weight, gemm.WARP_SPECIALIZED, **more)
    assert launched == [hopper_gemm._gemm_warp_specialized] * 3
    launched.clear()
    for more in ({"act": "gelu_tanh"}, {"out": torch.zeros(600, 272)}):
        gemm.gemm(x, weight, gemm.WARP_SPECIALIZED, **more)
    gemm.gemm(x.float(), weight.float(), gemm.WARP_SPECIALIZED)
    gemm.gemm(x[:, :60].contiguous(), weight[:, :60].contiguous(), gemm.WARP_SPECIALIZED)
    gemm.gemm(x, weight[:8].contiguous(), gemm.WARP_SPECIALIZED, act="silu")
    assert launched == [gemm._gemm_bulk] * 3 + [gemm._gemm] * 2


def test_every_measured_tile_is_one():
    known = json.loads((gemm.Path(gemm.__file__).with_name("tiles.json")).read_text())
    for shapes in known.values():
        for by_rows in shapes.values():
            for tile in filter(None, by_rows.values()):
                made = gemm.Tile(*tile)
                assert min(made.rows, made.outs, made.ins) >= 16
                assert made.bulk < 2 or made == gemm.WARP_SPECIALIZED


def test_tiles_that_were_searched_for_are_kept(tmp_path, monkeypatch):
    """The search itself needs a GPU (bench/gpu.py); what it found is there at the next start, and a
    broken file is begun anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(gemm, "_measured", lambda known={}: known)
    searched, weight = [], torch.zeros(48, 32)

    def search(weight, act, library):
        searched.append(weight.shape)
        return {1: gemm.Tile(16, 32, 64, 3, 2), 64: gemm.LIBRARY}

    monkeypatch.setattr(tuning, "_search", search)
    (tmp_path / "tidemill").mkdir()
    (tmp_path / "tidemill" / "tiles.json").write_text('{"some GPU": {"48x')
    tuning.find_tiles(weight, "", True)
    assert gemm.choose_tile(1, 48, 32) == gemm.Tile(16, 32, 64, 3, 2)
    assert gemm.choose_tile(2, 48, 32) is gemm.LIBRARY
    tuning.find_tiles(weight, "", True)
    gemm._measured().clear()
    tuning.find_tiles(weight, "", True)
    assert len(searched) == 1
    assert gemm.choose_tile(64, 48, 32) is gemm.LIBRARY
    assert [path.name for path in (tmp_path / "tidemill").iterdir()] == ["tiles.json"]
    gemm.choose_tile.cache_clear()


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (attention, attention_lists, cuda_work):
        monkeypatch.setattr(module, "SPLIT", 32)
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(cuda_work, "_PER_SPLIT", 2)


LONGEST = 192  # positions


class Scene:
    """Requests (tokens before, new tokens) over a paged cache, with poison where nobody wrote.
    Those of a family have the same pages of the first 64 positions."""

    def __init__(self, requests, heads, kv_heads, family=(), **spec):
        torch.manual_seed(0)
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=16, rotation=None, **{"scale": 0.25} | spec
        )  # fmt: skip
        self.sinks = torch.randn(heads) if self.spec.has_sinks else None
        learned = torch.randn(heads, 2 * LONGEST - 1) if self.spec.has_distance_bias else None
        self.bias = masks.by_distance(self.spec, learned, LONGEST)
        dim, page, self.layer, self.heads = 16, 16, 1, heads
        self.requests, self.scales = requests, None
        self.cache = torch.full((100, 2, 2, kv_heads, page, dim), 1e30)
        self.table = torch.zeros(len(requests), LONGEST // page, dtype=torch.int32)
        qkv, expected, used, common = [], [], 1, torch.randn(2, 64, kv_heads, dim)
        for row, (before, new) in enumerate(requests):
            num = -(-(before + new) // page)
            self.table[row, :num] = torch.arange(used, used + num)
            used += num
            q, k, v = torch.randn(new, heads, dim), *torch.randn(2, before + new, kv_heads, dim)
            if row in family:
                k[:64], v[:64] = common
                if row != family[0]:
                    self.table[row, :4] = self.table[family[0], :4]
            positions = torch.arange(before + new)
            pages, offsets = self.table[row].long()[positions // page], positions % page
            (
                self.cache[pages, self.layer, 0, :, offsets],
                self.cache[pages, self.layer, 1, :, offsets],
            ) = k, v
            qkv.append(torch.cat([q, torch.full((new, 2 * kv_heads, dim), 1e30)], 1).flatten(1))
            expected.append(
                attention_reference(
                    q, k, v, positions[before:], self.spec, self.sinks, learned
                ).flatten(1)
            )
        self.qkv, self.expected = torch.cat(qkv), torch.cat(expected)

    def attend(self, work, size, programs, by_flash=False, paths=None):
        """All tokens of the step by the three kernels, their words as the runner writes them."""
        kv_heads = self.cache.shape[3]
        words = np.full(4096, 10**6, np.int32)
        begin = work.write(words, size, 0, programs)
        assert words[begin : begin + work.last.size].tolist() == work.last.tolist()
        words = torch.from_numpy(words)
        out = torch.full((self.qkv.shape[0], self.heads * 16), float("nan"))
        partial = torch.full(
            (work.rows.size * (work.positions.max() // attention_lists.SPLIT + 1), self.heads, 18),
            float("nan"),
        )
        done = torch.zeros(self.qkv.shape[0], kv_heads, dtype=torch.int32)
        singles = words[records.HEADER + 2 * cuda_work.padded(size) :]
        prompts = flash.Prompts.of(words, self.table) if by_flash else None
        ends = torch.tensor([before + new for before, new in self.requests], dtype=torch.int32)
        lists = attention_lists.Lists(
            words, singles, *programs, partial, done, prompts, ends=ends, paths=paths
        )
        positions = torch.from_numpy(work.positions.copy())  # as the words have them: side by side
        attention.attend(
            self.qkv, self.cache, self.layer, self.table, lists, out, self.spec, positions, self.sinks, self.bias, self.scales
        )  # fmt: skip
        assert not done.any()
        return out

    def work(self, members_per_tile=16, tile=None):
        items = np.array([(row, *request) for row, request in enumerate(self.requests)], np.int32)
        samples = np.ones(len(self.requests), bool)
        group = self.heads // self.cache.shape[3]
        tile = tile or attention_lists.prompt_rows(group, by_roles=False) // group
        return cuda_work.make_work(items, samples, [self.table.numpy()], members_per_tile, tile)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
def test_attention(heads, kv_heads, small_blocks):
    """One token in one split and in several, prompts over splits; more entries than programs and
    fewer."""
    scene = Scene([(0, 1), (31, 1), (32, 1), (80, 1), (0, 9), (40, 40), (180, 1)], heads, kv_heads)
    work = scene.work()
    assert work.singles.shape[0] == 1 + 1 + 2 + 3 + 6
    assert work.prompts[:, 1].sum() == 49
    assert not work.shared.size
    assert work.rows.tolist() == [0, 1, 2, 3] + [4] * 9 + [5] * 40 + [6]
    assert work.positions.tolist() == [0, 31, 32, 80, *range(9), *range(40, 80), 180]
    for programs in ((2, 1, 1), (20, 1, 9)):
        assert_close(scene.attend(work, 60, programs), scene.expected, atol=1e-4, rtol=1e-5)


KINDS = {
    "window": {"window": 21},
    "window of a block": {"window": 16},
    "softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "ALiBi": {"has_alibi": True},
    "scores far apart": {"scale": 4.0},  # what weights are relative to moves often
    "all at once": {
        "window": 40,
        "softcap": 3.0,
        "scale": 0.4,
        "has_sinks": True,
        "has_alibi": True,
    },
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param("ALiBi", marks=pytest.mark.slow), *(kind for kind in KINDS if kind != "ALiBi")],
)
def test_a_layer_computes_what_its_spec_says(kind, small_blocks):
    """Of tokens alone, in several splits, of prompts, and of a split in common; alone they have the
    same bits."""
    requests = [(0, 1), (70, 1), (64, 1), (90, 1), (0, 9), (40, 40), (180, 1)]
    scene = Scene(requests, 4, 2, family=(1, 2, 3), **KINDS[kind])
    work = scene.work()
    assert work.shared.size
    out = scene.attend(work, 60, (20, 2, 9))
    assert_close(out, scene.expected, atol=1e-4, rtol=1e-5)
    for i in (1, 3):
        item = np.array([(i, *requests[i])], np.int32)
        alone = cuda_work.make_work(item, np.ones(1, bool), [scene.table.numpy()], 16, 32)
        alone.singles[:, 0] = i
        assert torch.equal(scene.attend(alone, 1, (2, 0, 0))[i], out[i])


def test_pages_that_a_window_gave_back_are_not_read(small_blocks):
    """Their places have the null page, in which anything may stand: of sequences without a common
    prefix, which have splits of null pages in common, and of one with a prefix that is ahead of the
    other, which still sees more of it."""
    requests = [(100, 1), (70, 1), (180, 1), (150, 1), (64, 20)]
    scene = Scene(requests, 4, 2, family=(0, 1), window=40)
    scene.cache[0] = float("nan")
    for row, (before, _) in enumerate(requests):
        scene.table[row, : max(0, before - 40 + 1) // 16] = 0
    work = scene.work()
    assert sorted(work.shared[:, records.SHARED_SPLIT.value]) == [0, 1, 1, 2]
    out = scene.attend(work, 24, (20, 2, 9))
    assert_close(out, scene.expected, atol=1e-4, rtol=1e-5)
    for i in range(4):
        alone = cuda_work.make_work(
            np.array([(i, *requests[i])], np.int32), np.ones(1, bool), [scene.table.numpy()], 16, 32
        )
        alone.singles[:, 0] = i
        assert torch.equal(scene.attend(alone, 1, (2, 0, 0))[i], out[i])


@pytest.mark.parametrize("has_bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_prompts_that_see_both_ways(has_bias, small_blocks):
    """As an encoder's: whole, each token sees all of its own text, in any company with the same
    bits."""
    requests = [(0, 5), (0, 70), (0, 16), (0, 33), (0, 1)]
    scene = Scene(requests, 3, 3, is_bidirectional=True, has_distance_bias=has_bias)
    tiles = cuda_work.prompts(*texts(requests, range(len(requests))), 64)
    work = cuda_work.Work(
        *tokens_of(requests), *[np.zeros((0, 4), np.int32)] * 3, tiles, np.zeros(0, np.int32)
    )
    out = scene.attend(work, 128, (0, 0, 3))
    assert_close(out, scene.expected, atol=1e-4, rtol=1e-5)
    for some in ([1], [4, 3]):
        work.prompts = cuda_work.prompts(*texts(requests, some), 64)
        again = scene.attend(work, 128, (0, 0, 1))
        chosen = np.isin(work.rows, some)
        assert torch.equal(again[chosen], out[chosen])
        assert again[~chosen].isnan().all()


def texts(requests, some):
    """Rows, starts, counts and first tokens of some of them."""
    counts = np.array([new for _, new in requests], np.int32)
    which = np.array(list(some), np.int32)
    return which, np.zeros_like(which), counts[which], (np.cumsum(counts) - counts)[which]


def tokens_of(requests):
    counts = [new for _, new in requests]
    return np.repeat(np.arange(len(counts)), counts), np.concatenate(
        [np.arange(count) for count in counts]
    )


def flash_reference(
    q, k, v, *, cu_seqlens_q, seqused_q, seqused_k, max_seqlen_q, page_table, causal, tile_mn, out
):
    """What flash-attn-4 does, by its documentation; it needs a GPU itself."""
    assert causal
    assert tile_mn[1] == k.shape[1]  # a tile is a page
    assert page_table.stride(1) == q.stride(2) == k.stride(3) == 1
    assert (
        cu_seqlens_q.dtype == seqused_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    )
    assert (
        cu_seqlens_q.shape[0] - 1 == seqused_q.shape[0] == seqused_k.shape[0] == page_table.shape[0]
    )
    for first, num, num_keys, pages in zip(
        cu_seqlens_q, seqused_q, seqused_k, page_table, strict=False
    ):
        assert num <= max_seqlen_q
        positions = torch.arange(num_keys)
        keys, values = (x[pages[positions // k.shape[1]], positions % k.shape[1]] for x in (k, v))
        new = slice(first, first + num)
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rotation=None)
        out[new] = attention_reference(q[new], keys, values, positions[num_keys - num :], spec)


def test_prompts_are_handed_to_flash_attention(small_blocks, monkeypatch):
    """Whole requests, the longest first; single tokens between them stay ours."""
    monkeypatch.setattr(flash, "forward", lambda: flash_reference)
    scene = Scene([(0, 1), (0, 9), (80, 1), (40, 40)], 4, 2)
    work = scene.work(tile=flash.WHOLE)
    assert work.prompts[:, 1].tolist() == [40, 9]
    assert_close(
        scene.attend(work, 60, (20, 1, flash.MOST_PROMPTS), by_flash=True),
        scene.expected,
        atol=1e-4,
        rtol=1e-5,
    )


@pytest.mark.parametrize("members_per_tile", [2, 16])
def test_attention_to_a_shared_beginning(members_per_tile, small_blocks):
    """Three requests with the same first pages and one without: a split in common is one tile's
    work; the bits are the same."""
    scene = Scene([(70, 1), (64, 1), (90, 1), (64, 1)], 4, 2, family=(0, 2, 3))
    work = scene.work(members_per_tile)
    assert work.members.shape[0] == 3 * 2
    assert work.shared[:, 1].sum() == 3 * 2
    assert work.shared.shape[0] == (4 if members_per_tile == 2 else 2)
    assert work.singles.shape[0] == 1 + 3 + 1 + 1
    out = scene.attend(work, 4, (3, 2, 0))
    assert_close(out, scene.expected, atol=1e-4, rtol=1e-5)
    for i in range(4):
        alone = cuda_work.make_work(
            np.array([(i, scene.requests[i][0], 1)], np.int32),
            np.ones(1, bool),
            [scene.table.numpy()],
            members_per_tile,
            32,
        )
        assert not alone.shared.size
        alone.singles[:, 0] = i
        assert torch.equal(scene.attend(alone, 1, (2, 0, 0))[i], out[i])


@pytest.mark.parametrize("kind", [{}, {"window": 21, "softcap": 2.0, "has_sinks": True}])
def test_a_token_and_the_drafts_after_it(kind, small_blocks):
    """Within a split, and over its end; what they have in common is read once, and they have the
    bits that they have alone."""
    requests = [(70, 5), (28, 8), (0, 1), (63, 2), (90, 10)]
    scene = Scene(requests, 4, 2, **kind)
    items = np.array(
        [(row, before + i, 1) for row, (before, new) in enumerate(requests) for i in range(new)],
        np.int32,
    )
    works = [
        cuda_work.make_work(
            items, np.ones(len(items), bool), [scene.table.numpy()], 16, 32, at_once
        )
        for at_once in (1, 3, 8)
    ]
    nums = [work.singles[:, 7].tolist() for work in works]
    # of 63 and 64, the latter has a whole split to itself
    assert sorted(nums[2]) == [1, 1, 1, 1, 4, 4, 4, 5, 6]
    assert (max(nums[0]), max(nums[1])) == (1, 3)
    outs = [scene.attend(work, 32, (7, 2, 0)) for work in works]
    assert_close(outs[0], scene.expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize(
    "kind",
    [pytest.param({}, marks=pytest.mark.slow), {"window": 21, "softcap": 2.0, "has_sinks": True}],
    ids=["plain", "all"],
)
def test_drafts_that_are_trees(kind, small_blocks):
    """Their ancestors lie among other drafts, over the end of a split; bits are those of a sequence
    in its order."""
    scene = Scene([(28, 6), (70, 1)], 4, 2, **kind)
    items = np.array([(0, 28 + i, 1) for i in range(6)] + [(1, 70, 1)], np.int32)
    in_order = cuda_work.make_work(items, np.ones(7, bool), [scene.table.numpy()], 16, 32)
    expected = scene.attend(in_order, 16, (3, 2, 0))
    places = [28, 30, 33, 29, 31, 32]  # of positions 28 on
    pages, offsets = scene.table[0].long(), torch.arange(28, 34)
    was = scene.cache[pages[offsets // 16], 1, :, :, offsets % 16].clone()
    to = torch.tensor(places)
    scene.cache[pages[to // 16], 1, :, :, to % 16] = was
    paths = torch.full((7, 8), 2**30, dtype=torch.int32)
    for i in range(6):
        paths[i, : i + 2] = torch.tensor([28, *places[: i + 1]])
    bases = np.array([28] * 6 + [2**30])
    work = cuda_work.make_work(items, np.ones(7, bool), [scene.table.numpy()], 16, 32, 1, bases)
    assert in_order.shared.size
    assert not work.shared.size  # the split in which the tree begins is another for each
    assert torch.equal(scene.attend(work, 16, (3, 2, 0), paths=paths), expected)


def test_a_draw_is_a_function_of_seed_and_position():
    """The likeliest where the temperature is 0; elsewhere the token that the CPU's noise draws."""
    torch.manual_seed(0)
    logits = torch.randn(4, 9000)
    state = torch.zeros(3, 20, dtype=torch.int32)
    seeds, temperatures = (7, 0, -5), (0.7, 0.0, 1.5)
    draws = torch.zeros(3, 3, dtype=torch.int32)
    for row, (seed, temperature) in enumerate(zip(seeds, temperatures, strict=True)):
        draws[row, 0] = int(np.float32(temperature).view(np.int32))
        draws[row, 1:] = torch.from_numpy(np.array([seed], np.int64).view(np.int32))
    index, rows, positions = (
        torch.tensor(x, dtype=torch.int32)
        for x in ([3, 1, 0, 4], [0, 1, 9, 2, 2], [3, 10, 9, 0, 5])
    )
    tokens = sampling.pick_tokens(logits, index, rows, positions, draws, state)
    for s, i in enumerate(index.tolist()):
        row, position, scores = int(rows[i]), int(positions[i]), logits[s]
        if temperatures[row]:
            key = noise_keys(torch.tensor([seeds[row]]), torch.tensor([position + 1]))
            scores = scores / temperatures[row] - exponential_noise(key, 9000)[0].log()
        assert tokens[s] == scores.argmax()
        assert state[row, position + 1] == tokens[s]
    logits[0], logits[1, 5:] = float("nan"), float("nan")
    tokens = sampling.pick_tokens(logits, index, rows, positions, draws, state)
    assert tokens[:2].tolist() == [-1, -1]
    assert min(tokens[2:]) >= 0
    assert state.min() >= 0


def test_sizes_of_graphs_are_multiples():
    assert sizes(256, ((4, 1), (64, 8), (256, 16))) == [
        1,
        2,
        3,
        4,
        *range(8, 65, 8),
        *range(80, 257, 16),
    ]
    assert sizes(100, ((4, 1), (64, 8), (256, 16)))[-2:] == [96, 100]
    assert sizes(3, ((4, 1), (64, 8))) == [1, 2, 3]


def test_a_few_sizes_use_every_kernel():
    """Tiles are chosen by the next larger number of rows in the table, or by the rule; both change
    at the same numbers."""
    every = range(1, 3000)
    few = one_of_each_kind(every)
    assert launch.FEW in gemm.CHOICES
    assert len(few) <= 15
    for shape in [(7, 9), (6144, 4096), (128256, 4096)]:  # by the rule
        assert {gemm.own_tile(rows, shape[0]) for rows in few} == {
            gemm.own_tile(rows, shape[0]) for rows in every
        }
    known = json.loads(Path(gemm.__file__).with_name("tiles.json").read_text())
    assert {
        int(rows) for shapes in known.values() for by_rows in shapes.values() for rows in by_rows
    } <= set(gemm.CHOICES)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tidemill.kernels.cuda import (collectives, gemm, glu, kv_write, look_up, logprobs, lora, norm, outliers, packed_gemm,
                                   paged_attention, policy_attention, pooling, sampling, scaled_gemm, scan)

def build(kernel, types, warps=4, stages=3, **constants):
    constants |= {"AHEAD": 2}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    signature |= {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.metadata.shared <= 227 * 2**10, (kernel.__name__, made.metadata.shared)  # what an H200 has
    print(kernel.__name__)

B, F, I, L = "*bf16", "*fp32", "*i32", "*i64"
types = dict(x_ptr=B, added_ptr=B, residual_ptr=B, weight_ptr=F, bias_ptr=F, out_ptr=B, qkv_ptr=B, q_ptr=F, k_ptr=F, eps="fp32",
             factor="fp32", codes_ptr="*i8", scales_ptr=F)
build(norm._add_rms_norm, types, CHUNKS=1, ADDS=True, CODES=448, PLAIN=False, BLOCK=4096)
build(norm._add_rms_norm, types | dict(x_ptr=F), CHUNKS=4, ADDS=False, CODES=0, PLAIN=True, BLOCK=4096)
build(norm._post_norm, types, BLOCK=4096)
build(norm._qk_norm, types, BLOCK=4096)
build(norm._add_layer_norm, types, HAS_X=True, BLOCK=1024)
for act in ("silu", "gelu", "relu", "relu2", "gelu_tanh"):
    build(glu._activate, dict(x_ptr=B, out_ptr=B), ACT=act, BLOCK=1024)
build(glu._glu, dict(gate_up_ptr=B, out_ptr=B), ACT="silu", BLOCK=1024)
types = dict(rows_ptr=I, positions_ptr=I, tokens_ptr=I, pages_ptr=I, ids_ptr=I, slots_ptr=L)
build(look_up._look_up, types, PAGE=64, HAS_PAGES=True, BLOCK=256)
build(pooling._pool, dict(hidden_ptr=B, spans_ptr=I, out_ptr="*fp64"), 2, TOKENS=16, COLUMNS=64)
types = dict(qkv_ptr=B, added_ptr=B, cache_ptr=B, scales_ptr="*i16", positions_ptr=I, slots_ptr=L, cos_ptr=F, sin_ptr=F,
             q_norm_ptr=F, k_norm_ptr=F, layer_offset="i64", page_stride="i64", layer_scales="i64", page_scales="i64", eps="fp32")
how = dict(NUM_HEADS=32, NUM_KV_HEADS=8, DIM=128, ROTATED=96, PAGE=64, ADDS=True, QK_NORM=True, HEADS=16)
build(kv_write._enter_heads, types, LARGEST=0, **how)
build(kv_write._enter_heads, types | dict(cache_ptr="*i8"), LARGEST=448, **how)
build(kv_write._enter_heads, types | dict(cache_ptr="*i8"), LARGEST=7, **how | dict(ROTATED=128))
how |= dict(ROTATED=128, PAGE=1, ADDS=False, QK_NORM=False)  # the virtual layout
build(kv_write._enter_heads, types | dict(slots_ptr=I), LARGEST=0, **how)
types = dict(x_ptr=B, w_ptr=B, bias_ptr=B, out_ptr=B, x_desc="tensordesc<bf16[128, 64]>", w_desc="tensordesc<bf16[128, 64]>",
             out_desc="tensordesc<bf16[128, 64]>")
how = dict(GROUP=8, HAS_BIAS=True, ACT="gelu_tanh")
build(gemm._gemm, types, ROWS=16, OUTS=64, INS=128, EVEN=True, **how)
build(gemm._gemm_bulk, types, ROWS=128, OUTS=128, INS=64, BULK_OUT=True, **how)
for kind, rows, outs, swap in (("fp8e4nv", 16, 64, 1), ("i8", 128, 128, 0)):
    types = dict(x_desc=f"tensordesc<{kind}[{rows}, 128]>", w_desc=f"tensordesc<{kind}[{outs}, 128]>", x_scales_ptr=F,
                 w_scales_ptr=F, bias_ptr=B, out_ptr=B)
    shape = dict(ROWS=rows, OUTS=outs, INS=128, GROUP=8, SWAP=swap, BLOCKS=swap, INT=kind == "i8", HAS_BIAS=True, ACT="silu")
    build(scaled_gemm._gemm_scaled, types, **shape)
types = dict(x_ptr=B, out_ptr="*i8", scales_ptr=F, static_ptr=F)
build(scaled_gemm._quantize_rows, types, LARGEST=448, STATIC=False, BLOCK=4096)
build(scaled_gemm._quantize_blocks, types, LARGEST=127, BLOCKS=16, SIZE=128)
types = dict(x_desc="tensordesc<bf16[16, 32]>", x_ptr=B, words_ptr="*i16", scales_ptr=I, bias_ptr=B, out_ptr=B, ids_ptr=I,
             partial_ptr=F, done_ptr=I)
how = dict(PLANE=32, SIZE=32)
for bits, kind in packed_gemm._TEXTS:
    build(packed_gemm._dequantize, types, BITS=bits, KIND=kind, HAS_IDS=True, OUTS=32, **how)
build(packed_gemm._gemm_packed, types, BITS=4, KIND="table", ROWS=16, OUTS=64, CHUNKS=1, BLOCKS=4, SPLIT=False, SECOND=False,
      BULK=True, EVEN=True, GROUP=8, HAS_BIAS=False, ACT="", PLANE=32, SIZE=1 << 30)
many = types | dict(x_desc="tensordesc<bf16[128, 64]>", out_ptr=F)
build(packed_gemm._gemm_packed, many, 8, 2, BITS=4, KIND="table", ROWS=128, OUTS=128, CHUNKS=1, BLOCKS=4, SPLIT=False,
      SECOND=False, BULK=True, EVEN=True, GROUP=8, HAS_BIAS=False, ACT="", PLANE=64, SIZE=1 << 30)
for split in (False, True):
    build(packed_gemm._gemm_packed, types, BITS=4, KIND="offsets", ROWS=16, OUTS=64, CHUNKS=4, BLOCKS=4, SPLIT=split,
          SECOND=not split, BULK=True, EVEN=True, GROUP=8, HAS_BIAS=True, ACT="silu", **how)
own = dict(x_ptr=B, w_ptr="*i8", codes_ptr="*i8", scales_ptr=F, kept_ptr=B, threshold="fp32", sums_ptr=F, bias_ptr=B, out_ptr=B,
           columns_ptr=I, values_ptr=F)
build(outliers._split_rows, own, LARGEST=127, BLOCK=4096)
build(outliers._add_outliers, own, ROWS=64, OUTS=64, INS=64, GROUP=8, HAS_BIAS=True, ACT="silu")
build(outliers._add_sparse, own, OUTS=256, HAS_BIAS=True)
types |= dict(x_desc="tensordesc<bf16[128, 64]>", w_desc="tensordesc<bf16[128, 64]>")
build(packed_gemm._gemm_chunked, types, 8, ROWS=128, OUTS=128, INS=64, CHUNKS=4, CHUNK=1024, GROUP=8, HAS_BIAS=False, ACT="")
types = dict(x_ptr=B, down_ptr=B, up_ptr=B, blocks_ptr=I, scales_ptr=F, order_ptr=I, tiles_ptr=I, columns_ptr=I, low_ptr=B,
             done_ptr=I, partial_ptr=F, y_ptr=B, out_ptr=B)
how = dict(RANKS=16, MAX_RANK=64)
for rows in (16, 64):
    build(lora._shrink, types, 4, 4, ROWS=rows, PARTS=3, COLUMNS=64, STRETCH=512, STRETCHES=8, INS=128, **how)
    build(lora._expand, types, 4, ROWS=rows, PARTS=3, OUTS=128, UNIT=8, ONTO=False, **how)
    behind = types | dict(behind_ptr=B, behind_blocks_ptr=I, behind_scales_ptr=F, partial_ptr=F)
    gated = dict(ROWS=rows, PARTS=2, RUN=256, OUTS=32, ACT="silu", **how)
    build(lora._expand_gated, types | behind, 4, BEHIND=0, WIDTH=1, **gated)
    build(lora._expand_gated, types | behind, 4, BEHIND=16, WIDTH=16, **gated)
shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, DIM=128, SPLIT=512, BLOCK=64)
types = dict(qkv_ptr=B, cache_desc="tensordesc<bf16[64, 128]>", cache_ptr=B, table_ptr=I, out_ptr=B, partial_ptr=F, done_ptr=I,
             lists_ptr=I, singles_ptr=I, sinks_ptr=F, bias_ptr=F, paths_ptr=I, ends_ptr=I, positions_ptr=I, scale="fp32",
             factor="fp32", softcap="fp32")
for some in map(bool, sys.argv[1:]):
    kind = dict(WINDOW=some, SOFTCAP=some, BIAS=some)
    build(paged_attention._attend_single, types, 2, **shape, **kind, SINKS=some, TREES=False, ROWS=16, TOGETHER=4)
    build(paged_attention._attend_single, types, 2, **shape, **kind, SINKS=some, TREES=True, ROWS=16, TOGETHER=4)
    build(paged_attention._attend_shared, types, **shape, **kind, WORD=0, ROWS=64)
    build(paged_attention._attend_prompts, types, **shape, **kind, SINKS=some, BOTH_WAYS=False, WORD=2, ROWS=64)
how = {name: shape[name] for name in ("NUM_HEADS", "NUM_KV_HEADS", "DIM")}
slots = types | dict(weights_ptr=F, tiles_ptr=I, segments_ptr=I, sums_ptr=L, summary_ptr=B, bounds_ptr=F, queries_ptr=I)
build(policy_attention._weigh_slots, slots, ROWS=16, BLOCK=64, **how)
build(policy_attention._add_to_slots, slots, ROWS=16, BLOCK=64, ONE=2.0**32, **how)
build(policy_attention._bound_pages, slots, PAGES=16, **how)
kind = dict(WINDOW=False, SOFTCAP=False, BIAS=True)
build(paged_attention._attend_prompts, types, **shape, **kind, SINKS=False, BOTH_WAYS=True, WORD=2, ROWS=64)
types = dict(projected_ptr=B, mixed_ptr=B, steps_ptr=B, bc_ptr=B, weight_ptr=F, bias_ptr=F, decay_ptr=F, skip_ptr=F,
             step_bias_ptr=F, norm_ptr=F, values_ptr=F, pool_ptr=F, tables_ptr=I, pieces_ptr=I, words_ptr=I, rows_ptr=I,
             positions_ptr=I, x_ptr=B, gate_ptr=B, out_ptr=B, scale="fp32", eps="fp32")
build(scan._convolve, types, INTERVAL=256, KERNEL=4, TAPS=4, HAS_BIAS=True, BLOCK=1024)
for kind in (0, 1, 2):
    shape = dict(WORD=3, INTERVAL=256, KERNEL=4, KEPT=4, KEEPS=32, DIM=128, SIZE=128, GROUPS=16, ROWS=128, COLUMNS=16)
    build(scan._scan, types | dict(out_ptr=F if kind else B), 1, KIND=kind, HAS_SKIP=kind < 2, GATED=kind == 0, **shape)
build(scan._norm_heads, types, GATE_FIRST=True, BLOCK=128)
build(scan._gate, types, BLOCK=1024)
types = dict(logits_ptr=F, index_ptr=I, rows_ptr=I, positions_ptr=I, draws_ptr=I, best_ptr=F, best_at_ptr=I, tokens_ptr=I,
             out_ptr=I, adjusted_ptr=F, records_ptr=I, limits_ptr=F, stats_ptr=F, above_ptr=F,
             brackets_ptr=F, kept_ptr=F, sizes_ptr=I)
build(sampling._pick, types, STRETCH=4096, AGAIN=True, LIMITED=True)
build(sampling._settle, types, 1, BLOCK=64, AGAIN=True)
build(sampling._survey, types, 8, STRETCH=8192)
build(sampling._narrow, types, 8, ROUND=1, STRETCH=8192, STRETCHES=32, LANES=1024)
build(sampling._collect, types, 8, ROUND=2, STRETCH=8192, STRETCHES=32, LANES=1024)
build(sampling._finish, types, 16, STRETCH=8192, STRETCHES=32, TILE=2048)
types |= dict(tops_ptr=F, ids_ptr=I, chosen_ptr=F, norms_ptr=F)
build(logprobs._summarize, types, 8, STRETCH=8192, BLOCK=128)
build(logprobs._normalize, types, 1, STRETCHES=32)

types = dict(x_ptr=B, out_ptr=B, table_ptr=L, turns_ptr=L, live_ptr=L, starts_ptr=I)
how = dict(RANK=1, SIZE=2, BLOCK=8192, PROGRAMS=128, PIECE=16384)
build(collectives._all_reduce, types, 8, **how)
build(collectives._all_gather, types, 8, **how)
build(collectives._add_parts, dict(parts_ptr=B, out_ptr=B), SIZE=2, BLOCK=1024)

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from tidemill.kernels.cuda import (hopper_attention, hopper_fp8, hopper_packed, hopper_gemm, hopper_single, page_copies,
                                   scaled_attention)

def build_gluon(kernel, types, constants, num_warps=4, maxnreg=168):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "maxnreg": maxnreg})
    print(kernel.__name__)

shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, DIM=128, SPLIT=512, BLOCK=64)
layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
types = dict(qkv_ptr=B, cache_desc=f"tensordesc<bf16[64, 128],{layout!r}>", table_ptr=I, out_ptr=B, lists_ptr=I, scale="fp32")
build_gluon(hopper_attention._attend_prompts_warp_specialized, types, shape | dict(WORD=2, BUFFERS=3))
types |= dict(cache_ptr=B, partial_ptr=F, done_ptr=I, singles_ptr=I)
build_gluon(hopper_single._attend_single_at_once, types, shape | dict(TOGETHER=8), 8, 224)
layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.int16)
types |= dict(copies_desc=types["cache_desc"], qkv_ptr=I, cache_desc=f"tensordesc<i16[64, 64],{layout!r}>", scales_ptr=B)
build_gluon(hopper_attention._attend_prompts_scaled_warp_specialized, types | dict(out_ptr=I),
            shape | dict(WORD=2, BUFFERS=3, FP8=True))
for ring in hopper_fp8.RINGS:
    layout = gl.NVMMASharedLayout.get_default_for([64 // ring.parts, 64], gl.int16)
    types |= dict(cache_desc=f"tensordesc<i16[{64 // ring.parts}, 64],{layout!r}>", scales_ptr=I)
    how = dict(PARTS=ring.parts, BUFFERS=ring.buffers, TOGETHER=4, EARLY=True)
    build_gluon(hopper_fp8._attend_single_fp8, types, shape | how, 1, ring.registers)
x_layout, w_layout = (gl.NVMMASharedLayout.get_default_for([256, 32], kind) for kind in (gl.bfloat16, gl.int16))
types = dict(x_desc=f"tensordesc<bf16[256, 32],{x_layout!r}>", words_desc=f"tensordesc<i16[128, 32],{w_layout!r}>", scales_ptr=I,
             bias_ptr=B, out_ptr=B)
how = dict(ROWS=256, OUTS=128, PLANE=32, BITS=4, SIZE=32, CHUNKS=1, BLOCKS=32, BUFFERS=6, WORD_BUFFERS=4)
types |= dict(partial_ptr=F)
build_gluon(hopper_packed._gemm_packed_warp_specialized, types, how | dict(KIND="offsets", SPLIT=False, HAS_BIAS=True, ACT=True))
how |= dict(CHUNKS=4, BLOCKS=8)
build_gluon(hopper_packed._gemm_packed_warp_specialized, types, how | dict(KIND="small", SPLIT=True, HAS_BIAS=True, ACT=False))
for kind, name, ins in ((gl.bfloat16, "bf16", 64), (gl.float8e4nv, "fp8e4nv", 128)):
    layouts = [gl.NVMMASharedLayout.get_default_for([64, width], of) for width, of in ((ins, kind), (64, gl.bfloat16))]
    own = dict(x_desc=f"tensordesc<{name}[128, {ins}],{layouts[0]!r}>", w_desc=f"tensordesc<{name}[256, {ins}],{layouts[0]!r}>",
               out_desc=f"tensordesc<bf16[64, 64],{layouts[1]!r}>", x_scales_ptr=F, w_scales_ptr=F, bias_ptr=B)
    how = dict(ROWS=128, OUTS=256, INS=ins, BUFFERS=3, GROUP=16, SCALED=ins == 128, HAS_BIAS=True, ACT=ins == 64)
    build_gluon(hopper_gemm._gemm_warp_specialized, own, how)
build(hopper_packed._add_chunks, types, CHUNKS=4, ROWS=16, OUTS=128, HAS_BIAS=True, ACT="silu")
types = dict(qkv_ptr=B, values_ptr="*i16", scales_ptr=I, table_ptr=I, out_ptr=B, partial_ptr=F, done_ptr=I, lists_ptr=I,
             singles_ptr=I, sinks_ptr=F, bias_ptr=F, positions_ptr=I, scale="fp32", factor="fp32", softcap="fp32")
build(page_copies._copy_pages, types, WORD=4, KIND=0, DIM=128, BLOCK=64)
some = dict(WINDOW=True, SOFTCAP=True, BIAS=True, KIND=1)
build(scaled_attention._attend_single_scaled, types, 2, **shape, **some, SINKS=True, ROWS=8, TOGETHER=4)
build(scaled_attention._attend_shared_scaled, types, **shape, **some, WORD=0, ROWS=64)
build(scaled_attention._attend_prompts_scaled, types, **shape, **some | dict(KIND=0), SINKS=True, WORD=2, ROWS=64)
some = dict(WINDOW=False, SOFTCAP=False, BIAS=False, KIND=2)
build(scaled_attention._attend_single_scaled, types, 2, **shape, **some, SINKS=False, ROWS=8, TOGETHER=4)
build(scaled_attention._attend_shared_scaled, types, **shape, **some, WORD=0, ROWS=64)
build(scaled_attention._attend_prompts_scaled, types, **shape, **some, SINKS=False, WORD=2, ROWS=64)
"""


@pytest.mark.parametrize(
    "kinds", [["some"], pytest.param(["some", ""], marks=pytest.mark.slow)], ids=["", "plain, too"]
)
def test_every_kernel_compiles_for_hopper(tmp_path, kinds):
    environment = {
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *kinds],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {
        "_add_rms_norm", "_post_norm", "_qk_norm", "_add_layer_norm", "_activate",
        "_glu", "_look_up", "_enter_heads", "_gemm", "_gemm_bulk", "_attend_single", "_attend_shared",
        "_attend_prompts", "_attend_prompts_warp_specialized", "_attend_single_at_once", "_attend_single_scaled",
        "_attend_shared_scaled", "_attend_prompts_scaled",
        "_attend_prompts_scaled_warp_specialized", "_attend_single_fp8", "_copy_pages",
        "_pick", "_settle", "_survey", "_narrow", "_collect", "_finish",
        "_summarize", "_normalize", "_convolve", "_scan", "_norm_heads", "_gate", "_shrink", "_expand", "_expand_gated",
        "_all_reduce", "_all_gather", "_add_parts", "_weigh_slots", "_add_to_slots", "_bound_pages",
        "_pool", "_gemm_scaled", "_quantize_rows", "_quantize_blocks", "_gemm_packed", "_gemm_chunked", "_dequantize",
        "_gemm_packed_warp_specialized", "_gemm_warp_specialized", "_add_chunks", "_split_rows", "_add_outliers", "_add_sparse",
    }  # fmt: skip
    assert set(done.stdout.split()) == kernels
