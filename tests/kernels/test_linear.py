import pytest
import torch

from tidemill.kernels.linear import BACKENDS, choose_backend, is_row_invariant, linear_reference, pack_linear

SHAPES = [(960, 576), (576, 1536), (3072, 576), (100, 24), (203, 60), (60, 133), (1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_backend_multiplies(shape, backend, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(37, shape[1])
    offset = torch.randn(shape[0]) if bias else None
    for rows in (1, 2, 37):
        out = BACKENDS[backend](weight, offset)(x[:rows])
        assert torch.allclose(out, linear_reference(x[:rows], weight, offset), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_backend_keeps_the_bits_of_every_row(shape):
    torch.manual_seed(1)
    weight, x = torch.randn(shape), torch.randn(300, shape[1])
    linear = pack_linear(weight)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 65, 255, 300):
        for start in {0, 1, 300 - rows}:
            part = x[start : start + rows]
            if part.shape[0] == rows:
                assert torch.equal(linear(part.clone()), whole[start : start + rows]), (rows, start)


def test_the_probe_notices_a_product_that_depends_on_its_batch():
    weight, x = torch.randn(64, 64), torch.randn(200, 64)
    assert is_row_invariant(BACKENDS["tiles"](weight, None), x)
    assert not is_row_invariant(lambda rows: rows @ weight.t() + 1e-6 * rows.shape[0], x)
    assert choose_backend(64, 64, torch.get_num_threads()) in BACKENDS
