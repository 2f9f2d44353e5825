"""Small ops: right, and the same bits for a row wherever it stands."""

import pytest
import torch
import torch.nn.functional as F

from tidemill.kernels.norm import add_rms_norm, rms_norm
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.kernels.swiglu import swiglu

SIZES = [50, 64, 577, 1536]


def rows_keep_their_bits(function, x: torch.Tensor) -> None:
    whole = function(x.clone())
    for num in (1, 2, 3, 7, 33, 100):
        for start in (0, 1, 5, 200 - num):
            assert torch.equal(function(x[start : start + num].clone()), whole[start : start + num]), (num, start)


@pytest.mark.parametrize("size", SIZES)
def test_swiglu(size):
    x = torch.randn(200, 2 * size) * 4
    gate, up = x.chunk(2, -1)
    assert torch.allclose(swiglu(x), F.silu(gate) * up, atol=1e-5, rtol=1e-5)
    rows_keep_their_bits(swiglu, x)
    assert swiglu(torch.tensor([[-200.0, 200.0, 1.0, 1.0]])).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size):
    x, weight = torch.randn(200, size) * 3, torch.randn(size)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(rms_norm(x, weight, 1e-5), expected, atol=1e-5)
    rows_keep_their_bits(lambda rows: rms_norm(rows, weight, 1e-5), x)
    residual = torch.randn(200, size)
    total = residual + x
    assert torch.equal(add_rms_norm(x, residual, weight, 1e-5), rms_norm(total, weight, 1e-5))
    assert torch.equal(residual, total)


def test_rope_rotates_pairs_by_position():
    freqs, factor = rope_frequencies(8, 10000.0, None)
    cos, sin = rope_tables(freqs, factor, 16)
    x = torch.randn(16, 3, 8)
    out = apply_rope(x, cos, sin)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.arange(16.0)[:, None] * freqs
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(out, torch.cat([turned.real, turned.imag], -1), atol=1e-5)
    assert torch.equal(out[0], x[0])
