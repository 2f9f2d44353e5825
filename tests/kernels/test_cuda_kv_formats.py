"""Attention over 8-bit and 4-bit keys and values on the GPU, without a GPU: interpreted in float32
against the reference, which gets what the values stand for."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.helpers import same_bits
from tests.kernels.test_cuda import KINDS, Scene, small_blocks
from tidemill.kernels.attention import attention_reference
from tidemill.kernels.cuda import kv_write, page_copies
from tidemill.kernels.kv_cache import Angles, dequantize, quantize, views
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.runner import cuda_work
from tidemill.types.kv_format import FORMATS

__all__ = ["small_blocks"]
REQUESTS = [(70, 1), (64, 1), (40, 12), (0, 1)]


def new_pool(num_pages, layers, kv_heads, page, dim, name):
    """Pages of bytes with garbage, and their values and scales."""
    torch.manual_seed(1)
    num_bytes = layers * 2 * kv_heads * page * FORMATS[name].head_bytes(dim)
    pool = torch.randint(0, 256, (num_pages, num_bytes), dtype=torch.uint8)
    return pool, *views(pool, layers, kv_heads, page, dim, name)


def in_format(scene, name):
    """Its cache in another format, and in float32 what that stands for. Nobody may see what nobody
    wrote."""
    pages, layers, _, kv_heads, page, dim = scene.cache.shape
    _, values, scales = new_pool(pages, layers, kv_heads, page, dim, name)
    written = scene.cache[..., 0] != 1e30
    codes, found = quantize(scene.cache[written], FORMATS[name])
    scales.fill_(float("nan"))
    values[written], scales[written] = codes, found
    exact = scene.cache.clone()
    exact[written] = dequantize(codes, found, FORMATS[name])
    return values, scales, exact


def reference(scene, exact):
    """Of every request, over the keys and values in `exact`."""
    made, first = [], 0
    for row, (before, new) in enumerate(scene.requests):
        positions = torch.arange(before + new)
        keys, values = exact[
            scene.table[row].long()[positions // 16], scene.layer, :, :, positions % 16
        ].unbind(1)
        q = scene.qkv[first : first + new].view(new, -1, 16)[:, : scene.heads]
        made.append(
            attention_reference(
                q, keys, values, positions[before:], scene.spec, scene.sinks, None
            ).flatten(1)
        )
        first += new
    return torch.cat(made)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fp8", "all at once"),
        *(
            pytest.param(*more, marks=slow)
            for more in [
                ("int8", None),
                ("fp8", None),
                ("int8", "window"),
                ("int4", None),
                ("int4", "all at once"),
            ]
        ),
    ],
)
def test_attention_reads_the_format(name, kind, small_blocks):
    """Tokens alone in several splits, a prompt, a split in common; alone they have the same bits."""
    scene = Scene(REQUESTS, 2, 1, family=(0, 1), **(KINDS[kind] if kind else {}))
    work = scene.work()
    assert work.shared.size
    scene.cache, scene.scales, exact = in_format(scene, name)
    out = scene.attend(work, 16, (3, 1, 1))
    assert_close(out, reference(scene, exact), atol=1e-4, rtol=1e-5)
    alone = cuda_work.make_work(
        np.array([(0, *REQUESTS[0])], np.int32), np.ones(1, bool), [scene.table.numpy()], 16, 32
    )
    assert torch.equal(scene.attend(alone, 1, (2, 0, 0))[0], out[0])


def test_a_token_and_the_drafts_after_it(small_blocks):
    """What they have in common is read once, and they have the bits that they have alone."""
    requests = [(28, 6), (70, 3)]
    scene = Scene(requests, 2, 1)
    items = np.array(
        [(row, before + i, 1) for row, (before, new) in enumerate(requests) for i in range(new)],
        np.int32,
    )
    scene.cache, scene.scales, exact = in_format(scene, "fp8")
    each, together = (
        cuda_work.make_work(
            items, np.ones(len(items), bool), [scene.table.numpy()], 16, 32, at_once
        )
        for at_once in (1, 8)
    )
    assert (each.singles[:, 7].max(), together.singles[:, 7].max()) == (1, 4)
    out = scene.attend(together, 16, (4, 1, 0))
    assert_close(out, reference(scene, exact), atol=1e-4, rtol=1e-5)
    assert torch.equal(scene.attend(each, 16, (4, 1, 0)), out)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_pages_of_prompts_are_copied(name, small_blocks, monkeypatch):
    """Of the prompts that there is room for; what a key or value stands for, even dimensions first."""
    monkeypatch.setattr(page_copies, "PROGRAMS", 2)
    monkeypatch.setattr(cuda_work, "COPY_PROGRAMS", 2)
    requests = [(70, 1), (3, 2), (40, 12), (0, 60)]
    scene = Scene(requests, 2, 1)
    items = np.array([(row, *request) for row, request in enumerate(requests)], np.int32)
    work = cuda_work.make_work(items, np.ones(4, bool), [scene.table.numpy()], 16, 32, room=6)
    assert {(row, copy) for *_, row, copy in work.prompts.tolist()} == {(1, 1), (2, 2), (3, 0)}
    scene.cache, scene.scales, exact = in_format(scene, name)
    words = np.full(4096, -1, np.int32)
    work.write(words, 128, 0, (1, 1, 1))
    copies = torch.full((6, 2, 1, 16, 16), 7.0)
    page_copies.copy_pages(
        scene.cache, scene.scales, scene.layer, scene.table, torch.from_numpy(words), copies
    )
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    for row, end, first in ((1, 5, 0), (2, 52, 1)):
        for at in range(end):
            found = copies[first + at // 16, :, :, at % 16]
            assert torch.equal(
                found,
                exact[int(scene.table[row, at // 16]), scene.layer, :, :, at % 16][..., order],
            )
    assert (copies[5] == 7.0).all()


def numbers(codes, name):
    """Of a format's codes, as integers."""
    if name == "int4":
        signed = codes.view(torch.int8)
        return torch.cat([(signed << 4) >> 4, signed >> 4], -1).int()
    return codes.view(torch.int8).int()


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_heads_enter_the_cache_in_its_format(name):
    """With the codes and scales of the reference; a value that is no number makes its own head's
    scale one."""
    heads, kv_heads, dim, page, layer = 4, 2, 16, 4, 1
    qkv = torch.randn(6, (heads + 2 * kv_heads) * dim) * torch.logspace(-35, 3, 6).unsqueeze(1)
    qkv[2], qkv[4, -1] = 0, float("inf")
    pool, cache, scales = new_pool(4, 3, kv_heads, page, dim, name)
    before = pool.clone()
    angles = Angles(*rope_tables(*rope_frequencies(dim, 1e4, None), 40))
    positions, slots = torch.tensor([30, 1, 2, 0, 7, 8]), torch.tensor([5, 0, 15, 9, 4, 11])
    _, k, v = qkv.view(6, -1, dim).clone().split([heads, kv_heads, kv_heads], 1)
    k = apply_rope(k, angles.cos[positions], angles.sin[positions])
    kv_write.enter_heads(qkv, cache, layer, positions, slots, angles, heads, scales=scales)
    codes, expected = quantize(torch.stack([k, v], 1), FORMATS[name])
    at = slots // page, layer, slice(None), slice(None), slots % page
    found = scales[at]
    if name == "int4":  # the offset beside it is a sum that may be rounded differently
        assert_close(found[..., 1], expected[..., 1], rtol=2**-7, atol=0)
        found, expected = found[..., 0], expected[..., 0]
        assert_close(found, expected, rtol=2**-6, atol=0, equal_nan=True)
    else:
        assert same_bits(found, expected)
    assert found.isnan().nonzero().tolist() == [[4, 1, 1]]
    is_number = ~expected.isnan()
    written, codes = numbers(cache[at], name)[is_number], numbers(codes, name)[is_number]
    assert (written - codes).abs().max() <= 1  # the rotation is rounded differently
    assert (written != codes).float().mean() < 0.01
    assert (pool != before).sum() <= 6 * 2 * kv_heads * FORMATS[name].head_bytes(dim)
    # All that was not theirs is as it was.
    cache[at].view(torch.int8).zero_()
    untouched = torch.ones(cache.shape[:-1], dtype=torch.bool)
    untouched[at] = False
    _, old, old_scales = pool, *views(before, 3, kv_heads, page, dim, name)
    assert torch.equal(cache.view(torch.int8)[untouched], old.view(torch.int8)[untouched])
    assert torch.equal(scales.view(torch.int16)[untouched], old_scales.view(torch.int16)[untouched])


def test_scales_of_fp8_end_where_the_kernels_can_use_them():
    """2**7, times 2**120 in the kernels: larger values saturate."""
    qkv, (_, cache, scales) = torch.full((1, 3 * 16), 3e38), new_pool(1, 1, 1, 4, 16, "fp8")
    kv_write.enter_heads(
        qkv, cache, 0, torch.tensor([0]), torch.tensor([0]), None, 1, scales=scales
    )
    assert scales[0, 0, :, 0, 0].tolist() == [128.0, 128.0]
    assert cache[0, 0, 0, 0, 0].float().tolist() == [448.0] * 16


def test_scales_of_fp8_are_powers_of_two():
    """So a score times a scale is the score of a key times the scale, bit for bit, and a weight
    likewise."""
    x = torch.randn(200, 16) * torch.logspace(-20, 3, 200).unsqueeze(1)
    codes, scales = quantize(x, FORMATS["fp8"])
    assert not (scales.view(torch.int16) & 0x7F).any()
    top = codes.float().abs().amax(-1)
    assert ((top >= 224) & (top <= 448)).all()
    off = (dequantize(codes, scales, FORMATS["fp8"]) - x).abs()
    assert (off <= x.abs() * 2**-4 + scales.float().unsqueeze(-1) * 2**-10).all()
