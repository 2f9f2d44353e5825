import pytest
import torch

from tidemill.kernels import native
from tidemill.kernels.linear import (
    BACKENDS,
    choose_backend,
    is_row_invariant,
    linear_reference,
    pack_linear,
)

SHAPES = [(960, 576), (576, 1536), (3072, 576), (100, 24), (203, 60), (60, 133), (1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [pack_linear, *BACKENDS.values()], ids=["chosen", *BACKENDS])
@pytest.mark.parametrize("bias", [False, True])
def test_every_backend_multiplies_and_looks_up(shape, make, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(37, shape[1])
    offset = torch.randn(shape[0]) if bias else None
    linear = make(weight, offset)
    for rows in (1, 2, 37):
        assert torch.allclose(
            linear(x[:rows]), linear_reference(x[:rows], weight, offset), atol=1e-3, rtol=1e-4
        )
    ids = torch.randint(0, shape[0], (9,))
    assert torch.equal(linear.rows(ids), weight[ids])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_keeps_its_bits(shape, dtype, backend):
    torch.manual_seed(1)
    weight, x = torch.randn(shape).to(dtype), torch.randn(300, shape[1])
    linear = pack_linear(weight)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 65, 255, 300):
        for start in {0, 1, 300 - rows}:
            part = x[start : start + rows]
            if part.shape[0] == rows:
                assert torch.equal(linear(part.clone()), whole[start : start + rows]), (rows, start)


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_weights_give_the_bits_of_float32(dtype):
    torch.manual_seed(2)
    weight, x = torch.randn(77, 130).to(dtype), torch.randn(11, 130)
    assert torch.equal(pack_linear(weight)(x), pack_linear(weight.float())(x))


def test_the_probe_notices_a_matmul_that_depends_on_its_batch():
    weight, x = torch.randn(64, 64), torch.randn(512, 64)
    assert is_row_invariant(BACKENDS["tiles"](weight, None), x)
    assert not is_row_invariant(lambda rows: rows @ weight.t() + 1e-6 * rows.shape[0], x)
    assert choose_backend(64, 64, torch.get_num_threads()) in BACKENDS
