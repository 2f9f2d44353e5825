"""AMX: matmuls have the bits they have without it; attention is right, and its bits are the same in
any company."""

import numpy as np
import pytest
import torch

from tests.kernels.test_attention import KINDS, LAYER, Scene
from tests.kernels.test_quantized_linear import random_codes
from tidemill.kernels import native, native_attention
from tidemill.kernels.kv_cache import HeadWeights
from tidemill.kernels.quantized_linear import QuantizedPanels
from tidemill.kernels.trees import Paths

pytestmark = pytest.mark.skipif(
    native.lib is None or not native.lib.has_tiles, reason="no AMX here"
)
REQUESTS = [(0, 1), (130, 1), (63, 1), (64, 1), (0, 40), (100, 33), (0, 2), (511, 3), (7, 100)]


@pytest.fixture
def without_tiles():
    """A function that runs another without AMX."""

    def run(function):
        native.lib.use_tiles(False)
        try:
            return function()
        finally:
            assert native.lib.use_tiles(True)

    return run


def test_they_can_be_left_out_and_taken_up(without_tiles):
    assert native.why.endswith("with AMX")
    assert without_tiles(lambda: native.lib.has_tiles) is False
    assert native.lib.has_tiles


@pytest.mark.parametrize("kind", ["Q4", "S4", "Q8", "Q8M", "MX4"])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(960, 576), (61, 96), (16, 32), (8, 64), (24, 1536)]
)
def test_matmuls_have_the_same_bits(without_tiles, kind, num_out, num_in):
    """From the rows on with which weights are unpacked; also of rows that do not fill a tile, and
    of a row with a NaN."""
    torch.manual_seed(0)
    panels = QuantizedPanels(random_codes(kind, num_out, num_in), None)
    for num_rows in (15, 16, 17, 31, 32, 77):
        x = torch.randn(num_rows, num_in)
        x[3, 5], x[num_rows - 1] = float("nan"), 0
        ours, theirs = panels(x), without_tiles(lambda x=x: panels(x))
        assert np.array_equal(ours.numpy().view(np.uint32), theirs.numpy().view(np.uint32))
        assert torch.equal(panels(x[-2:-1]), ours[-2:-1])


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (6, 2, 128), (4, 1, 32), (5, 1, 96), (2, 2, 256)]
)
def test_attention_equals_the_reference(without_tiles, page_size, heads, kv_heads, dim):
    scene = Scene(REQUESTS, heads, kv_heads, dim, page_size, "compiled", "bfloat16")
    out = scene.run()
    assert torch.allclose(out, torch.cat(scene.expected), atol=2e-5)
    assert not torch.equal(out, without_tiles(scene.run))  # it is another way


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_its_spec_says(kind):
    """Alone and among others, a request has the same bits."""
    scene = Scene(REQUESTS, 6, 2, 32, 16, "compiled", "bfloat16", **KINDS[kind])
    out, first = scene.run(), 0
    assert torch.allclose(out, torch.cat(scene.expected), atol=3e-5)
    for row, (_, new) in enumerate(REQUESTS):
        assert torch.equal(scene.run([row]), out[first : first + new])
        first += new


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 1, 128), (16, 1, 32)])
def test_the_size_of_a_tile_changes_no_bit(monkeypatch, page_size, heads, kv_heads, dim):
    scene = Scene(
        [(300, 1), (0, 70), (90, 64), (0, 5)],
        heads,
        kv_heads,
        dim,
        page_size,
        "compiled",
        "bfloat16",
    )
    results = []
    for num_rows in (heads // kv_heads, 7 * heads // kv_heads, 32, 192):
        monkeypatch.setattr(native_attention, "_MIN_TILE_ROWS", num_rows)
        monkeypatch.setattr(native_attention, "_MAX_TILE_ROWS", num_rows)
        results.append(scene.run())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_token_does_not_see_a_broken_one_after_it(broken):
    """Zero times what is no number is none."""
    scene = Scene([(20, 60)], 9, 3, 64, 16, "compiled", "bfloat16")
    good = scene.run()
    scene.qkv[0][33, -2, 7] = broken  # a value of the token at 53, of the second KV head
    out = scene.run().view(60, 9, 64)
    assert torch.equal(out[:33], good.view(60, 9, 64)[:33])
    assert torch.equal(out[33:, [0, 1, 2, 6, 7, 8]], good.view(60, 9, 64)[33:, [0, 1, 2, 6, 7, 8]])
    assert not out[33:, 3:6, 7].isfinite().any()
    assert torch.equal(out[33:, 3:6, 8:], good.view(60, 9, 64)[33:, 3:6, 8:])


def test_a_key_that_is_no_number_breaks_those_who_see_it():
    scene = Scene([(20, 60)], 9, 3, 64, 16, "compiled", "bfloat16")
    good = scene.run().view(60, 9, 64)
    scene.qkv[0][33, 9 + 1] = float("nan")
    out = scene.run().view(60, 9, 64)
    assert torch.equal(out[:33], good[:33])
    assert out[33:, 3:6].isnan().all()
    assert torch.equal(out[33:, 6:], good[33:, 6:])


def test_heads_that_no_token_chose_are_zero():
    scene = Scene([(20, 60)], 9, 3, 64, 16, "compiled", "bfloat16")
    whole = scene.run().view(60, 9, 64)
    scores = torch.ones(60, 3)
    scores[10:, 1] = -1
    scene.learned = HeadWeights(chosen=scores)
    some = scene.run().view(60, 9, 64)
    assert torch.equal(some[:10], whole[:10])
    assert not some[10:, 3:6].any()
    assert torch.equal(some[10:, 6:], whole[10:, 6:])


def test_a_layer_that_sees_both_ways():
    requests = [(0, 1), (0, 20), (0, 100), (0, 64)]
    scene = Scene(requests, 6, 2, 32, 16, "compiled", "bfloat16", is_bidirectional=True)
    out = scene.run()
    assert torch.allclose(out, torch.cat(scene.expected), atol=2e-5)
    assert torch.equal(scene.run([2]), out[21:121])


@pytest.mark.parametrize("page_size", [4, 16])
def test_tokens_of_a_tree_lie_elsewhere(page_size):
    """The same keys and values in other places of the sequence's pages: the same bits."""
    scene = Scene([(70, 1)], 9, 3, 64, page_size, "compiled", "bfloat16")
    plain, places = scene.run(), [78, 75, 79, 74, 77]  # of positions 66 .. 70
    old = scene.slots(0, torch.arange(71))
    kept = scene.kv.cache[old // page_size, LAYER, :, :, old % page_size].clone()
    scene.kv.tables[0][0, : 80 // page_size] = torch.arange(
        1, 80 // page_size + 1, dtype=torch.int32
    )
    new = scene.slots(0, torch.tensor([*range(66), *places]))
    scene.kv.cache[new // page_size, LAYER, :, :, new % page_size] = kept
    step = scene.backend.plan(
        np.array([0]),
        np.array([70]),
        np.array([1]),
        torch.tensor([70]),
        new[None, -1:],
        Paths.of([(66, places)]),
    )
    assert torch.equal(step.attend(LAYER, scene.qkv[0].flatten(1), scene.learned), plain)
