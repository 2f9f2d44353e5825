"""Masks and score changes, against attention written out by hand; FlexAttention against the
reference, without compiling: what it traces runs as torch ops."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.kernels import test_attention
from tests.kernels.test_attention import Scene, spec_of
from tidemill.errors import ConfigError
from tidemill.kernels import flex_attention, masks, native
from tidemill.kernels.attention import attention_reference
from tidemill.kernels.flex_attention import FlexAttention
from tidemill.types import events
from tidemill.types.coverage import COVERED, uncovered

LEN = 9


def seen_by(mask):
    return {(q, k) for q in range(LEN) for k in range(LEN) if mask(q, k)}


def test_masks_are_functions_of_two_positions():
    every_pair = [(q, k) for q in range(LEN) for k in range(LEN)]
    before = {(q, k) for q, k in every_pair if k <= q}
    near = {(q, k) for q, k in every_pair if q - k < 3}
    first = {(q, k) for q, k in every_pair if k <= q or k < 4}
    assert seen_by(masks.causal) == before
    assert seen_by(masks.window(3)) == near
    assert seen_by(masks.prefix(4)) == first
    assert seen_by(masks.prefix(LEN)) == set(every_pair)
    assert seen_by(masks.every([masks.causal, masks.window(3)])) == before & near
    assert seen_by(masks.every([masks.prefix(4), masks.window(3)])) == first & near


@pytest.mark.parametrize("kind", [np.arange, torch.arange], ids=["numpy", "torch"])
def test_masks_take_arrays(kind):
    """Two documents in one sequence, which do not see each other."""
    positions, of = kind(LEN), kind(LEN) // 5
    mask = masks.every([masks.causal, masks.document(of[:, None], of[None])])
    seen = mask(positions[:, None], positions[None])
    assert {(q, k) for q in range(LEN) for k in range(LEN) if seen[q, k]} == {
        (q, k) for q in range(LEN) for k in range(q + 1) if (q < 5) == (k < 5)
    }


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 16, 71])
def test_slopes_of_alibi_equal_transformers(num_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    expected = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    assert torch.allclose(masks.alibi_slopes(num_heads), expected, rtol=1e-6)


def test_the_reference_equals_attention_written_out():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, LEN, 4, 8)
    distance = (torch.arange(LEN) - torch.arange(LEN)[:, None]).float()
    hidden = torch.zeros(LEN, LEN).masked_fill((distance > 0) | (distance <= -4), float("-inf"))
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
    table = torch.randn(4, 2 * LEN - 1)
    learned = table[:, (distance + LEN - 1).long()]
    for spec, bias, added in (
        (spec_of(4, 4, 8, window=4, has_alibi=True), None, hidden + slopes * distance),
        (spec_of(4, 4, 8, is_bidirectional=True, has_distance_bias=True), table, learned),
    ):
        expected = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=added
        ).transpose(0, 1)
        assert torch.allclose(
            attention_reference(q, k, v, torch.arange(LEN), spec, bias_NW=bias), expected, atol=1e-5
        )


KINDS = {
    "plain": {},
    "ALiBi": {"has_alibi": True},
    "window": {"window": 20},
    "bidirectional": {"is_bidirectional": True},
    "all at once": {
        "window": 70,
        "softcap": 3.0,
        "scale": 0.4,
        "has_sinks": True,
        "has_alibi": True,
        "rotated": 24,
    },
}

FAST = ("bidirectional", "all at once")


def scene_of(kind, monkeypatch):
    monkeypatch.setattr(test_attention, "NUM_PAGES", 24)
    requests = [(0, 1), (130, 1), (63, 1), (0, 12), (100, 5)]
    if KINDS[kind].get("is_bidirectional"):
        requests = [(0, 1), (0, 20), (0, 17)]
    return Scene(requests, 6, 2, 32, 16, "torch", **KINDS[kind])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS]
)
def test_flex_attention_equals_the_reference(kind, monkeypatch):
    """What is in the cache of nobody, or of others, is poisoned: it must not count."""
    scene = scene_of(kind, monkeypatch)
    scene.kv.tables[0][1, 12:] = scene.kv.tables[0][2, 0]  # left over from an earlier sequence
    scene.backend = FlexAttention(scene.kv, is_compiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        assert torch.allclose(scene.run(), torch.cat(scene.expected), atol=3e-5)
        some = [2, 0]
        assert torch.allclose(
            scene.run(some), torch.cat([scene.expected[row] for row in some]), atol=3e-5
        )


@pytest.mark.slow
def test_one_compiled_kernel_serves_all_numbers_of_tokens(monkeypatch):
    """As far as a machine without a GPU can tell: traced once, and run as traced."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compile_as_ever = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function: compile_as_ever(function, backend=backend)
    )
    flex_attention._kernel.cache_clear()
    scene = scene_of("all at once", monkeypatch)
    scene.backend = FlexAttention(scene.kv)
    with torch.inference_mode():
        for rows in ([0, 3], [1], [2, 4], [0]):
            assert torch.allclose(
                scene.run(rows), torch.cat([scene.expected[row] for row in rows]), atol=3e-5
            )
    flex_attention._kernel.cache_clear()
    assert len(compiled) == 1


def test_the_table_says_what_kernels_have(monkeypatch):
    everything = spec_of(4, 4, 32, window=8, softcap=2.0, has_sinks=True, has_alibi=True)
    assert everything.kinds == ["window", "softcap", "sinks", "ALiBi"]
    for kernel in COVERED:
        both_ways = spec_of(4, 4, 32, is_bidirectional=True, has_distance_bias=True)
        assert uncovered(kernel, [spec_of(4, 4, 32), everything, both_ways]) == ""
    assert "not of 24" in uncovered("Triton", [spec_of(4, 4, 24)])
    assert "not of 20" in uncovered("C", [spec_of(4, 4, 20)])
    monkeypatch.setitem(COVERED, "C", replace(COVERED["C"], kinds=("window", "sinks")))
    assert (
        uncovered("C", [spec_of(4, 4, 32), everything])
        == "the C attention kernels do not have softcap or ALiBi"
    )


def test_the_choice_of_attention_is_an_event(tmp_path):
    make_llama(tmp_path, hidden_size=40, num_attention_heads=2, num_key_value_heads=1)
    model = load_model(tmp_path)
    [event] = [
        event
        for event in make_core(model).take_events()
        if isinstance(event, events.KernelsFellBack)
    ]
    assert ("not of 20" in event.reason) == (native.lib is not None)
    assert "torch computes it" in event.reason


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_odd_heads_on_a_cpu(tmp_path, num_kv_heads):
    """Heads of 20, for which --fast-math took an attention that failed at the first request: now it
    is refused at start."""
    theirs = make_llama(
        tmp_path, hidden_size=80, num_attention_heads=4, num_key_value_heads=num_kv_heads
    )
    model, prompt = load_model(tmp_path), list(range(3, 43))
    with pytest.raises(
        ConfigError, match=r"--fast-math cannot be combined with a CPU.* Leave --fast-math out"
    ):
        make_core(model, fast_math=True)
    made = run(make_core(model), {"x": (prompt, greedy(8, ignore_eos=True))})["x"]
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    assert made.tokens == expected[0, len(prompt) :].tolist()
