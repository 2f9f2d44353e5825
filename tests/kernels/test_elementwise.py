"""Small ops: right, and the same bits for a row wherever it stands."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.argmax import argmax
from tidemill.kernels.clip import clip
from tidemill.kernels.glu import activate, glu
from tidemill.kernels.noise import (
    exponential_noise,
    gumbel_argmax,
    gumbel_argmax_reference,
    noise_keys,
)
from tidemill.kernels.norm import add_layer_norm, add_rms_norm, post_norm, qk_norm

SIZES = [50, 64, 577, 1536]


def rows_keep_their_bits(function, x: torch.Tensor) -> None:
    whole = function(x.clone())
    for num in (1, 2, 3, 7, 33, 100):
        for start in (0, 1, 5, 200 - num):
            assert torch.equal(
                function(x[start : start + num].clone()), whole[start : start + num]
            ), (num, start)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("act", "of_torch"), [("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))]
)
def test_glu(size, backend, act, of_torch):
    x = torch.randn(200, 2 * size) * 4
    gate, up = x.chunk(2, -1)
    assert torch.allclose(glu(x, act), of_torch(gate) * up, atol=1e-5, rtol=1e-5)
    assert torch.allclose(activate(x, act), of_torch(x), atol=1e-5, rtol=1e-5)
    rows_keep_their_bits(lambda some: activate(some, act), x)
    rows_keep_their_bits(lambda some: glu(some, act), x)
    extreme = glu(torch.tensor([[-200.0, 200.0, -80.0, 1.0, 1.0, 1.0]]), act)
    assert torch.allclose(extreme, torch.tensor([[0.0, 200.0, 0.0]]), atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size, backend):
    x, weight = torch.randn(200, size) * 3, torch.randn(size)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(add_rms_norm(None, x, weight, 1e-5), expected, atol=1e-5)
    rows_keep_their_bits(lambda rows: add_rms_norm(None, rows, weight, 1e-5), x)
    residual = torch.randn(200, size)
    total = residual + x
    assert torch.equal(
        add_rms_norm(x, residual, weight, 1e-5), add_rms_norm(None, total.clone(), weight, 1e-5)
    )
    assert torch.equal(residual, total)
    scaled = residual + x * 0.3
    assert torch.allclose(
        add_rms_norm(x, residual, weight, 1e-5, 0.3),
        add_rms_norm(None, scaled, weight, 1e-5),
        atol=1e-5,
    )
    assert torch.allclose(residual, scaled, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_values_are_cut_off(size, backend):
    x = torch.randn(50, size) * 3
    x[3, 0], x[4, 0], x[5, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert torch.equal(clip(x.clone(), 1.5).nan_to_num(7.0), x.clamp(-1.5, 1.5).nan_to_num(7.0))


@pytest.mark.parametrize("size", SIZES)
def test_norms_of_other_kinds(size, backend):
    x, weight, bias = torch.randn(200, size) * 3 + 5, torch.randn(size), torch.randn(size)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5).float()
    assert torch.allclose(add_layer_norm(None, x, weight, bias, 1e-5), expected, atol=1e-4)
    rows_keep_their_bits(lambda rows: add_layer_norm(None, rows, weight, bias, 1e-5), x)
    residual = torch.randn(200, size)
    total = residual + x
    assert torch.equal(
        add_layer_norm(x, residual, weight, bias, 1e-5),
        add_layer_norm(None, total.clone(), weight, bias, 1e-5),
    )
    assert torch.equal(residual, total)

    normed = add_rms_norm(None, x.clone(), weight, 1e-5)
    assert torch.allclose(post_norm(x, total, weight, 1e-5), total + normed, atol=1e-5)
    assert torch.equal(residual, total)
    rows_keep_their_bits(lambda rows: post_norm(rows, rows, weight, 1e-5), x)

    qkv, k_weight = torch.randn(200, size + 2 * 24), torch.randn(24)
    parts = (
        add_rms_norm(None, qkv[:, :size].clone(), weight, 1e-5),
        add_rms_norm(None, qkv[:, size:-24].clone(), k_weight, 1e-5),
    )
    assert torch.allclose(
        qk_norm(qkv.clone(), weight, k_weight, 1e-5),
        torch.cat([*parts, qkv[:, -24:]], 1),
        atol=1e-5,
    )
    rows_keep_their_bits(lambda rows: qk_norm(rows, weight, k_weight, 1e-5), qkv)


def test_noise_is_exponential_and_a_function_of_seed_and_position():
    keys = noise_keys(torch.tensor([1, 1, 2, -5]), torch.tensor([7, 8, 7, 2**40]))
    noise = exponential_noise(keys, 50_000)
    assert noise.min() > 0
    assert noise.max() <= 64
    assert torch.allclose(noise.mean(1), torch.ones(4), atol=0.03)
    assert torch.allclose(noise.median(1).values, torch.full((4,), 0.6931), atol=0.02)
    assert (noise < 1e-3).float().mean() == pytest.approx(1e-3, rel=0.3)
    assert len({tuple(row[:4].tolist()) for row in noise}) == 4


def test_a_draw_depends_on_its_row_alone(backend):
    logits = torch.randn(50, 1003)
    logits[:, 100:300] = float("-inf")
    seeds, positions = torch.randint(-(2**40), 2**40, (50,)), torch.randint(0, 2**30, (50,))
    drawn = gumbel_argmax(logits, seeds, positions)
    assert not ((drawn >= 100) & (drawn < 300)).any()
    for i in range(50):
        assert (
            gumbel_argmax(logits[i : i + 1].clone(), seeds[i : i + 1], positions[i : i + 1])
            == drawn[i]
        )


@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0, 1000.0])
def test_a_compiled_draw_is_the_references(scale):
    """But for ties to the last digit, of which there are none here."""
    if native.lib is None:
        pytest.skip(native.why)
    torch.manual_seed(0)
    logits, seeds = torch.randn(400, 2053) * scale, torch.arange(400)
    keys = noise_keys(seeds, seeds * 3)
    assert torch.equal(
        gumbel_argmax(logits, seeds, seeds * 3), gumbel_argmax_reference(logits, keys)
    )


@pytest.mark.parametrize("width", [1, 7, 8, 49, 1000])
def test_argmax_is_the_first_of_the_highest(width, backend):
    """-1: it is not finite, or a value is NaN."""
    x = torch.randint(0, 6, (60, width)).float()
    x[1] = -3.0
    x[2, : width // 2] = float("-inf")
    expected = [row.index(max(row)) for row in x.tolist()]
    x[0], x[3, width - 1], x[4, width // 2], expected[0], expected[3:5] = (
        float("-inf"),
        float("inf"),
        float("nan"),
        -1,
        [-1, -1],
    )
    assert argmax(x).tolist() == expected
