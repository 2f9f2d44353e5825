"""The GPU's matmuls of quantized weights without a GPU, interpreted: tests/gpu checks them on a
GPU."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from tidemill.kernels.cuda import norm, packed_gemm, rounding, scaled_gemm
from tidemill.kernels.cuda.packed_gemm import PackedTile, pack, unpack_reference
from tidemill.kernels.cuda.rounding import Scaled
from tidemill.kernels.cuda.scaled_gemm import ScaledTile
from tidemill.kernels.glu import glu_reference
from tidemill.kernels.handover import Handover
from tidemill.kernels.pending import SplitK


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("swap", [0, 1])
def test_scaled(dtype, swap):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 72), torch.randn(40, 72)
    largest = rounding.LARGEST[dtype]
    scales = weight.abs().amax(1) / largest
    codes = weight / scales[:, None]
    stored = Scaled(
        torch.nn.functional.pad(codes if dtype.is_floating_point else codes.round(), (0, 8)).to(
            dtype
        ),
        scales,
    )
    given = scaled_gemm.quantize_rows(x, dtype, 80)
    assert_close(given.scales, x.abs().amax(1) / largest)
    rounded = given.values_NK.float() * given.scales[:, None]
    assert_close(rounded[:, :72], x, atol=0.07 * 3 if dtype.is_floating_point else 0.02, rtol=0.07)
    expected = rounded @ (stored.values_NK.float() * scales[:, None]).t()
    tile = ScaledTile(16, 32, 32, 2, 4, swap)
    assert_close(
        scaled_gemm.gemm_scaled(given, stored, torch.float32, tile), expected, atol=1e-4, rtol=1e-4
    )
    bias = torch.randn(40)
    gated = scaled_gemm.gemm_scaled(given, stored, torch.float32, tile, bias_N=bias, act="silu")
    both = expected + bias
    assert_close(
        gated, glu_reference(torch.cat([both[:, ::2], both[:, 1::2]], 1)), atol=1e-4, rtol=1e-4
    )


def test_scaled_by_blocks():
    torch.manual_seed(0)
    x, values = (
        torch.randn(5, 200) * torch.logspace(-2, 2, 200),
        torch.randn(24, 208).clamp(-3, 3).to(torch.float8_e4m3fn),
    )
    weight = Scaled(values, torch.rand(2, 24))
    given = scaled_gemm.quantize_blocks(x, torch.float8_e4m3fn, 208)
    tops = torch.nn.functional.pad(x, (0, 56)).unflatten(1, (2, 128)).abs().amax(2)
    assert_close(given.scales, tops.t() / 448)

    def wide(one):
        return one.values_NK.float() * one.scales.t().repeat_interleave(128, 1)[:, :208]

    for swap in (0, 1):
        out = scaled_gemm.gemm_scaled(
            given, weight, torch.float32, ScaledTile(16, 16, 128, 2, 4, swap)
        )
        assert_close(out, wide(given) @ wide(weight).t(), atol=1e-2, rtol=1e-4)


def test_values_that_are_not_finite_are_not_lost():
    x = torch.ones(3, 32)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    for dtype in (torch.float8_e4m3fn, torch.int8):
        scales = scaled_gemm.quantize_rows(x, dtype, 32).scales
        assert scales[0] == 1 / rounding.LARGEST[dtype]
        assert scales[1:].isnan().all()
        static = scaled_gemm.quantize_rows(x, dtype, 32, torch.tensor([0.5])).scales
        assert static[0] == 0.5
        assert static[1:].isnan().all()


KINDS = [
    (4, "zeros", 128),
    (4, "zeros", 32),
    (4, "offsets", 32),
    (8, "zeros", 0),
    (8, "zeros", 32),
    (8, "offsets", 64),
    (2, "zeros", 0),
]


def new_packed(bits, kind, group, outs=40, ins=256):
    torch.manual_seed(1)
    low, high = (-128, 128) if bits == 8 else (0, 1 << bits)
    codes = torch.randint(low, high, (outs, ins)).to(torch.int8)
    groups = ins // (group or ins)
    scales = torch.rand(outs, groups).bfloat16().float()
    others = (
        torch.randint(0, 16, (outs, groups)).float()
        if kind == "zeros"
        else torch.randn(outs, groups).bfloat16().float()
    )
    others = None if kind in ("nf4", "e2m1") or (bits == 8 and kind == "zeros") else others
    scale, other = (
        torch.zeros(outs, ins) if one is None else one.repeat_interleave(group or ins, 1)
        for one in (scales, others)
    )
    table = {"nf4": packed_gemm.NF4, "e2m1": packed_gemm.E2M1}.get(kind)
    if table is not None:
        values = torch.tensor(table)[codes.long()] * scale
    else:
        values = codes * scale + other if kind == "offsets" else (codes - other) * scale
    return pack(codes, bits, kind, scales, others), values


@pytest.mark.parametrize(("bits", "kind", "group"), [*KINDS, (4, "nf4", 64), (4, "e2m1", 32)])
def test_packed(bits, kind, group):
    ins = 512 if bits == 2 else 384 if group in (32, 128) else 256
    weight, values = new_packed(bits, kind, group, ins=ins)
    assert_close(unpack_reference(weight), values)
    assert_close(packed_gemm.dequantize(weight, dtype=torch.float32), values)
    ids = torch.tensor([3, 39, 0, 3], dtype=torch.int32)
    assert_close(packed_gemm.dequantize(weight, ids, dtype=torch.float32), values[ids.long()])
    x = torch.randn(5, ins)
    for tile in (PackedTile(16, 32, 2, 4), PackedTile(16, 16, 2, 4, 1)):
        assert_close(packed_gemm.gemm_packed(x, weight, tile), x @ values.t(), atol=1e-2, rtol=1e-4)
    bias, both = torch.randn(40), x @ values.t()
    both = both + bias
    gated = packed_gemm.gemm_packed(x, weight, PackedTile(16, 32, 2, 4), bias_N=bias, act="silu")
    assert_close(
        gated, glu_reference(torch.cat([both[:, ::2], both[:, 1::2]], 1)), atol=1e-1, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("kind", "zero", "factor", "expected"),
    [
        ("zeros", 8.0, 0.1, "small"),
        ("zeros", 8.0, 1.0, "offsets"),
        ("zeros", 7.0, 0.1, "zeros"),
        ("offsets", 7.3, 0.1, "small"),
    ],
)
def test_weights_are_stored_in_the_cheapest_form(kind, zero, factor, expected):
    """Where `zero * scale` is exact, and where a scale leaves room for the factor of codes without
    an exponent."""
    torch.manual_seed(0)
    codes, scales = (
        torch.randint(0, 16, (8, 256)).to(torch.int8),
        ((torch.rand(8, 2) + 0.3) * factor).bfloat16().float(),
    )
    others = (
        (torch.full_like(scales, zero) if kind == "zeros" else scales * -zero).bfloat16().float()
    )
    weight = pack(codes, 4, kind, scales, others)
    assert weight.kind == expected
    scale, other = (one.repeat_interleave(128, 1) for one in (scales, others))
    values = (codes - other) * scale if kind == "zeros" else codes * scale + other
    assert torch.equal(unpack_reference(weight), values)
    assert torch.equal(packed_gemm.dequantize(weight, dtype=torch.float32), values)


@pytest.mark.parametrize("chunk", [256, 512])
def test_packed_in_chunks(chunk):
    """Each of them a program's, all of them one program's, and of the dequantized weight: the same
    sums."""
    weight, values = new_packed(4, "zeros", 128, ins=768)
    weight = dataclasses.replace(weight, chunk=chunk)
    x = torch.randn(5, 768)
    tiles = (
        PackedTile(16, 32, 2, 4),
        PackedTile(16, 32, 2, 4, 0, 1),
        PackedTile(8, 16, 2, 4, 1, 1),
        PackedTile(16, 32, 2, 4, 0, 1, 1),
    )
    outs = [packed_gemm.gemm_packed(x, weight, tile) for tile in tiles]
    dense = packed_gemm.dequantize(weight, dtype=torch.float32)
    outs.append(packed_gemm.gemm_chunked(x, dense, chunk, tile=(16, 16, 64, 2, 4)))
    for out in outs:
        assert_close(out, x @ values.t(), atol=1e-2, rtol=1e-4)
    assert not packed_gemm._workspace(x.device, 1, 1)[1].any()  # counted anew each time


def test_a_norm_is_handed_over_alone():
    """The codes of a norm that is written as it is, too; what is returned cannot be read."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    handover = Handover(torch.int8)
    made, residuals = [], []
    for alone in (False, True):
        mine = residual.clone()
        out = norm.add_rms_norm(x, mine, weight, 1e-5, 1.0, handover, alone)
        assert out.is_meta == alone
        assert out.shape == x.shape
        made.append(handover.take(out))
        residuals.append(mine)
    assert torch.equal(made[0].values_NK, made[1].values_NK)
    assert torch.equal(made[0].scales, made[1].scales)
    assert torch.equal(*residuals)


def test_a_norm_adds_up_split_k_partials():
    torch.manual_seed(0)
    sums, residual, weight = (
        torch.randint(-16, 17, (4, 5, 96)) / 8,
        torch.randn(5, 96).bfloat16(),
        torch.randn(96),
    )
    mine, other = residual.clone(), residual.clone()
    out = norm.add_rms_norm(SplitK(sums), mine, weight, 1e-5, 0.5)
    assert torch.equal(out, norm.add_rms_norm(sums.sum(0).bfloat16(), other, weight, 1e-5, 0.5))
    assert torch.equal(mine, other)
