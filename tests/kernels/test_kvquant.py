"""KVQuant: codes, ranges and outliers, and the compiled kernel beside its reference."""

import numpy as np
import pytest
import torch

from tidemill.kernels import kvquant, native
from tidemill.kernels.attention import TorchAttention
from tidemill.kernels.kv_cache import Angles, HeadWeights, PagedKV, new_cache, views
from tidemill.kernels.kvquant import KVQuant
from tidemill.kernels.native_attention import NativeAttention
from tidemill.kernels.rope import apply_rope
from tidemill.types.cache_layout import Place
from tidemill.types.model_config import AttentionSpec

LAYERS, G, N, D, S = 2, 2, 6, 24, 8


def make(bits: int, dim: int = D, seed: int = 0) -> KVQuant:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.linspace(-1, 1, 2**bits).pow(3).bfloat16().float().repeat(LAYERS, 1)
    scales = torch.rand(LAYERS, 2, G, dim, generator=generator) + 1
    offsets = torch.randn(LAYERS, 2, G, dim, generator=generator)
    return KVQuant(f"kvquant{bits}", bits, scales, offsets, levels, levels.flip(0))


@pytest.mark.parametrize("bits", [4, 3])
def test_codes_are_packed_without_gaps(bits):
    codes = torch.randint(
        0, 2**bits, (5, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    packed = kvquant.pack(codes, bits)
    assert packed.shape == (5, 40 * bits // 8)
    assert torch.equal(kvquant.unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [4, 3])
def test_errors_are_bounded_by_the_levels(bits):
    """What is inside its range is off by half a gap at most; the two keys and the value that are
    farthest out, by bfloat16."""
    own = make(bits).layer(1)
    levels, gap = own.key_levels, own.key_levels.diff().max() / 2 + 1e-6
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(20)
    inside = torch.rand(20, G, D, generator=generator) * 2 - 1
    kind = (positions > 0).long()
    keys = inside * own.scales[kind] + own.offsets[kind]
    keys[3, 1, 5], keys[7, 0, 2], keys[7, 0, 9] = 300.0, -50.0, 40.0
    codes, extra = kvquant.quantize_keys(keys, positions, own)
    found = kvquant.dequantize_keys(
        codes.transpose(0, 1), extra.transpose(0, 1), positions, own
    ).transpose(0, 1)
    error = (found - keys).abs() / own.scales[kind]
    far = keys.abs() > 30
    assert error[~far].max() <= gap * (1 + 1e-3)
    assert ((found - keys).abs()[far] / keys.abs()[far]).max() < 2**-8
    assert levels[0] == -1
    values = torch.randn(20, G, D, generator=generator)
    values[2, 0, 11] = 1000.0
    found = kvquant.dequantize_values(*kvquant.quantize_values(values, own), own)
    low, high, _ = kvquant.value_ranges(values)
    assert (
        ((found - values).abs() <= (high - low) / 2 * (gap + 0.02))
        .flatten()[torch.arange(values.numel()) != 2 * G * D + 11]
        .all()
    )
    assert abs(found[2, 0, 11] - 1000) < 4


def test_what_is_not_finite_stays_so():
    own = make(4).layer(0)
    x = torch.zeros(2, G, D)
    x[0, 1, 3], x[1, 0, 0] = float("nan"), float("inf")
    codes, extra = kvquant.quantize_keys(x, torch.arange(2), own)
    keys = kvquant.dequantize_keys(
        codes.transpose(0, 1), extra.transpose(0, 1), torch.arange(2), own
    ).transpose(0, 1)
    values = kvquant.dequantize_values(*kvquant.quantize_values(x, own), own)
    for found in (keys, values):
        assert (~found.isfinite()).any(-1).tolist() == [[False, True], [True, False]]
    same = kvquant.dequantize_values(*kvquant.quantize_values(torch.full((1, G, D), 0.5), own), own)
    assert torch.equal(same, torch.full((1, G, D), 0.5))


def paged(quant: KVQuant, dim: int, window: int = 0) -> PagedKV:
    pool = new_cache(20, LAYERS, G, S, dim, quant.name)
    values, extra = views(pool, LAYERS, G, S, dim, quant.name)
    tables = [torch.arange(1, 17, dtype=torch.int32).view(2, 8).flip(1).contiguous()]
    angle = torch.arange(128)[:, None] / 10000 ** torch.linspace(0, 1, dim // 2)
    spec = AttentionSpec(
        num_heads=N, num_kv_heads=G, head_dim=dim, scale=dim**-0.5, rotation=None, window=window
    )
    angles = [Angles(angle.cos(), angle.sin()), None]
    return PagedKV(
        values,
        tables,
        (spec,) * LAYERS,
        angles,
        tuple(Place(0, i) for i in range(LAYERS)),
        [],
        extra,
        quant,
    )


def attend(backend, kv: PagedKV, qkv: torch.Tensor, layer: int, first: int) -> torch.Tensor:
    """Tokens of row 1 from position `first` on, in one step."""
    positions = torch.arange(first, first + qkv.shape[0])
    slots = kv.tables[0][1, positions // S].long() * S + positions % S
    own = backend(kv)  # kept: steps point into it
    step = own.plan(
        np.array([1]), np.array([first]), np.array([qkv.shape[0]]), positions, slots[None]
    )
    return step.attend(layer, qkv.clone(), HeadWeights())


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize(
    ("bits", "dim", "window"), [(4, 24, 0), (3, 24, 0), (4, 64, 0), (3, 64, 20)]
)
def test_compiled_kernel_is_the_reference(bits, dim, window):
    quant = make(bits, dim)
    qkv = torch.randn(40, (N + 2 * G) * dim, generator=torch.Generator().manual_seed(2)) * 2
    for layer in range(LAYERS):
        caches = [paged(quant, dim, window), paged(quant, dim, window)]
        ours, theirs = (
            attend(one, kv, qkv, layer, 0)
            for one, kv in zip((NativeAttention, TorchAttention), caches, strict=True)
        )
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
        assert torch.equal(caches[0].cache, caches[1].cache)
        assert torch.equal(caches[0].scales, caches[1].scales)
        later = paged(quant, dim, window)
        parts = [
            attend(NativeAttention, later, part, layer, at)
            for at, part in ((0, qkv[:33]), (33, qkv[33:34]), (34, qkv[34:]))
        ]
        assert torch.equal(torch.cat(parts), ours)  # bit for bit


def test_keys_are_rotated_where_they_are_read():
    """Attention over the cache is attention over the dequantized keys, rotated to their positions."""
    quant, kv = make(4), paged(make(4), D)
    qkv = torch.randn(30, (N + 2 * G) * D, generator=torch.Generator().manual_seed(3))
    found = attend(TorchAttention, kv, qkv, 0, 0).view(30, N, D)
    q, k, v = qkv.view(30, -1, D).split([N, G, G], 1)
    own, positions = quant.layer(0), torch.arange(30)
    codes, extra = kvquant.quantize_keys(k, positions, own)
    k = kvquant.dequantize_keys(
        codes.transpose(0, 1), extra.transpose(0, 1), positions, own
    ).transpose(0, 1)
    v = kvquant.dequantize_values(*kvquant.quantize_values(v, own), own)
    angles = kv.angles[0]
    q, k = (apply_rope(x, angles.cos[:30], angles.sin[:30]) for x in (q, k))
    scores = torch.einsum("tnd,snd->nts", q, k.repeat_interleave(N // G, 1)) * kv.specs[0].scale
    scores = scores.masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("nts,snd->tnd", scores.softmax(-1), v.repeat_interleave(N // G, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
