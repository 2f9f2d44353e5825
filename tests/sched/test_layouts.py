"""When prefill and decode engines are expected to be better than engines that do both, and the step
costs this is told by."""

import random

import pytest

from tidemill.sched.layouts import Engines, Load, StepCost, StepCosts, compare, expect_split

# seconds: a step, a token of a prompt, a sequence that decodes
COST = StepCost(0.01, 0.00005, 0.0001)


def engines(num, cost=COST):
    return Engines(num, cost, token_budget=2048, num_slots=256)


def test_long_prompts_beside_decoding_speak_for_roles():
    advice = compare(Load(4, 2000, 200), engines(2), engines(2))
    assert advice.disaggregate
    assert advice.gain == pytest.approx(advice.alike.itl_p99_s / advice.split.itl_p99_s)
    assert advice.gain > 2
    assert advice.split.layout == "1 prefill + 1 decode"
    assert "improves" in advice.reason


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (Load(4, 20, 200), "too little"),  # short prompts
        (Load(0.1, 2000, 20), "too little"),  # so few that p99 does not see them
        # one prefill engine has too little for these prompts
        (Load(11, 2000, 100), "would not keep up"),
        (Load(4, 2000, 1), "nothing is decoded"),
    ],
)
def test_loads_that_engines_for_both_serve_as_well(load, why):
    advice = compare(load, engines(2), engines(2))
    assert not advice.disaggregate
    assert why in advice.reason


def test_kv_that_is_computed_again_is_no_gain():
    load = Load(4, 2000, 200)
    assert not compare(load, engines(2), engines(2), found=0.0).disaggregate


def test_more_engines_are_divided_as_their_work_is():
    assert (
        compare(Load(12, 4000, 50), engines(4), engines(4)).split.layout == "3 prefill + 1 decode"
    )
    assert expect_split(Load(100, 4000, 50), engines(4), 2).busy > 1


def test_costs_are_found_in_steps():
    rng, costs = random.Random(1), StepCosts()
    for _ in range(15):
        costs.observe(100, 3, 0.02)
    assert costs.cost is None
    for _ in range(500):
        prompt, num = rng.choice((0, 0, 100, 256)), rng.randrange(1, 20)
        costs.observe(prompt, num, (0.01 + 0.0002 * prompt + 0.001 * num) * rng.uniform(0.98, 1.02))
    found = costs.cost
    assert found.fixed_s == pytest.approx(0.01, rel=0.1)
    assert found.prompt_token_s == pytest.approx(0.0002, rel=0.05)
    assert found.sequence_s == pytest.approx(0.001, rel=0.1)
    alike = StepCosts()
    for _ in range(100):
        alike.observe(0, 4, 0.02)
    assert alike.cost is None
