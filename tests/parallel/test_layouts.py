"""The cost model of layouts: the formulas of the paper, and where their minima are."""

from dataclasses import replace

import pytest

from tests.parallel.test_cuts import config, spec
from tidemill.capabilities.features import Setup
from tidemill.config import EngineOptions
from tidemill.distributed.layouts import (
    DEVICES,
    Layout,
    Phase,
    choose,
    cost,
    engine_seconds,
    gather_from,
    layouts,
    rank_costs,
)
from tidemill.machine import Machine
from tidemill.runner.rank import settle_layout

# A dense model with F = 4 E, all of whose weights are in its layers, on devices whose links are all
# that counts.
MODEL = config(
    spec(32, 32, 128),
    num_layers=1,
    vocab_size=1,
    hidden_size=4096,
    intermediate_size=16384,
    is_gated=False,
)
LINK = replace(DEVICES["h200"], latency=0.0, flops=1e30, memory=1e30)


def sent(layout: Layout, size: int, num_tokens: int) -> float:
    return cost(MODEL, layout, size, Phase("x", num_tokens, 1, 1), LINK).sent_bytes


def test_1d_does_not_shrink_with_ranks_and_2d_does():
    one_d = [sent(Layout(), size, 1) for size in (4, 64)]
    assert one_d == [2 * 2 * 4096 * 2 * 3 / 4, 2 * 2 * 4096 * 2 * 63 / 64]  # two blocks, two bytes
    two_d = [sent(Layout(grid=grid), size, 1) for size, grid in ((16, 2), (64, 4), (256, 8))]
    assert two_d[0] > two_d[1] > two_d[2]
    assert two_d[2] < one_d[1] / 2


@pytest.mark.parametrize("size", [64])
def test_many_tokens_gather_weights_few_move_activations(size):
    """The paper's figure: the more tokens, the more of the weights are gathered."""
    best = [
        rank_costs(MODEL, size, Phase("x", tokens, tokens, 1), LINK)[0].layout
        for tokens in (64, 16384, 2**22)
    ]
    assert best[0].gathered == 1
    assert best[0].grid > 1
    assert 1 < best[1].gathered < best[2].gathered


def test_the_choice_is_one_that_the_engine_has():
    costs = rank_costs(MODEL, 4, Phase("decode", 8, 8, 1024), DEVICES["cpu"])
    assert {one.layout for one in costs} == set(layouts(4))
    assert choose(costs, 4).layout.is_there(4)
    assert costs == sorted(costs, key=lambda one: one.seconds)


def test_more_ranks_than_kv_heads_read_keys_more_than_once():
    phase = Phase("decode", 8, 8, 10**6)
    shared = replace(MODEL, layers=(replace(MODEL.layers[0], num_kv_heads=2),))
    device = replace(DEVICES["h200"], weight_bytes=0)
    by_two, by_eight = (cost(shared, Layout(), size, phase, device).memory_s for size in (2, 8))
    assert by_two == by_eight
    assert (
        cost(MODEL, Layout(), 8, phase, device).memory_s
        < cost(MODEL, Layout(), 2, phase, device).memory_s
    )


def test_auto_takes_the_fastest_that_the_model_and_options_allow():
    here = Machine(num_cores=4, memory_bytes=2**34, available_bytes=2**34, kernels="some")
    options = EngineOptions(tensor_parallel=4, tensor_layout="auto")

    def settled(device="cpu", machine=here, **changes):
        dtype = {"cpu": "float32", "cuda": "bfloat16"}[device]
        asked = replace(options, **changes)
        setup = Setup(
            options=asked,
            model=MODEL,
            machine=machine,
            device=device,
            dtype=dtype,
            scheme="dense",
            kv_dtype=dtype,
        )
        return settle_layout(setup)

    name, why = settled()
    assert why.startswith(f"estimated for a prompt of 512 tokens and 256 more: {name} ")
    assert all(f"{other} " in why for other in ("1d", "2d", "gathered"))
    assert "2d" not in settled(tensor_parallel=3)[1]  # no grid
    assert "gathered" not in settled(machine=replace(here, kernels=""))[1]
    assert settled("cuda")[0] == "1d"


def test_more_of_the_prompt_makes_gathering_cheaper():
    """Relative to moving activations: what the engine gathers does not grow with tokens."""
    ratios = []
    for num_tokens in (8, 512, 2**15):
        phase = Phase("prefill", num_tokens, 1, 1)
        one_d, gathered = (
            cost(MODEL, one, 4, phase, DEVICES["cpu"]).sent_s
            for one in (Layout(), Layout(gathered=4))
        )
        ratios.append(gathered / one_d)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 10
    assert ratios[-1] < 1


def test_steps_are_computed_by_rows_from_where_that_is_faster():
    device = DEVICES["cpu"]
    begin = gather_from(MODEL, 4, device)
    for num_tokens, best in ((begin - 1, False), (begin, True), (8 * begin, True)):
        phase = Phase("x", num_tokens, 1, 0)
        one_d, shared = (
            cost(MODEL, one, 4, phase, device)
            for one in (Layout(), Layout(gathered=4, in_place=True))
        )
        assert (shared.seconds < one_d.seconds) == best
        assert engine_seconds(MODEL, 4, phase, device)["phased"] == min(
            one_d.seconds, shared.seconds
        )
        assert shared.sent_bytes < one_d.sent_bytes
    # never: reading all weights would take too long
    assert gather_from(MODEL, 4, replace(device, memory=1.0)) == 0
    assert gather_from(MODEL, 4, replace(device, memory=1e30)) == 4  # a row for each rank
    assert "phased" not in engine_seconds(MODEL, 4, phase, DEVICES["h200"])
