"""What else decides in an engine decides in a simulation, too: samples, aborts, speculation, tiers."""

import math

import pytest

from tidemill.planning.cost import Curve, FittedCost, LinearCost
from tidemill.planning.drafter import Speculation
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine, SimTiers, simulate
from tidemill.types.events import Aborted, DraftsVerified, Forked, PagesLoaded

COST = LinearCost(fixed_s=0.01, per_token_s=0.0001)


def events_of(result, kind):
    return [event for event in result.events if isinstance(event, kind)]


def test_samples_share_their_prompt():
    result = simulate([Arrival("a", 0.0, 100, 8, n=3)], SimConfig(), COST)
    assert {name: len(times) for name, times in result.token_times_s.items()} == {
        "a:0": 8,
        "a:1": 8,
        "a:2": 8,
    }
    assert len(events_of(result, Forked)) == 2
    assert sum(step.num_tokens * step.num_steps for step in result.steps) < 2 * 100


def test_a_client_that_goes_away_leaves_its_place():
    arrivals = [Arrival("gone", 0.0, 10, 10_000, abort_s=1.0), Arrival("next", 0.1, 10, 5)]
    engine = SimEngine(SimConfig(num_rows=1), COST)
    for arrival in arrivals:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(math.inf)
    result = engine.result()
    assert engine.num_under_way == 0
    assert [event.request_id for event in events_of(result, Aborted)] == ["gone"]
    assert 1.0 <= result.token_times_s["next"][0] < 1.1
    assert result.token_times_s["gone"][-1] < 1.02


def test_what_comes_while_a_request_is_taken_is_in_its_step():
    curve = Curve([1], [0.05])
    arrivals = [Arrival("a", 1.0, 10, 3), Arrival("b", 1.0002, 10, 3), Arrival("c", 1.0102, 10, 3)]

    def first_tokens(submit_s):
        result = simulate(
            arrivals, SimConfig(), FittedCost(curve, curve, *[0.0] * 6, submit_s=submit_s)
        )
        return [result.token_times_s[name][0] for name in "abc"]

    # the others wait for the first one's step
    assert first_tokens(0.0) == pytest.approx([1.05, 1.1, 1.1])
    assert first_tokens(0.0003) == pytest.approx([1.0503, 1.0503, 1.1003])


def test_drafts_that_are_right_more_often_make_more_tokens_a_step():
    def duration(acceptance):
        config = SimConfig(speculation=Speculation(acceptance, max_drafts=4, adaptive=False))
        result = simulate([Arrival("a", 0.0, 16, 400)], config, COST)
        assert len(result.token_times_s["a"]) == 400
        verified = [done for event in events_of(result, DraftsVerified) for done in event.of]
        return result.steps[-1].end_s, sum(right for _, _, right in verified) / max(
            sum(num for _, num, _ in verified), 1
        )

    (low_s, low), (high_s, high) = duration(0.2), duration(0.9)
    assert low < 0.2 < 0.6 < high
    assert high_s < 0.5 * low_s


def test_drafts_that_cost_too_much_are_not_made():
    config = SimConfig(speculation=Speculation(0.05, draft_s=1.0))
    result = simulate([Arrival("a", 0.0, 16, 200)], config, COST)
    plain = simulate([Arrival("a", 0.0, 16, 200)], SimConfig(), COST)
    assert result.steps[-1].end_s < plain.steps[-1].end_s + 30  # a few trials


def test_pages_come_back_from_host_memory_if_that_is_faster():
    prompts = {name: tuple(range(i * 1000, i * 1000 + 320)) for i, name in enumerate("ab")}
    order = "abababab"
    arrivals = [
        Arrival(f"{name}{i}", 10.0 * i, 320, 2, prompt_ids=prompts[name])
        for i, name in enumerate(order)
    ]
    cost = LinearCost(fixed_s=0.01, per_token_s=0.001)

    def result(tiers):
        return simulate(arrivals, SimConfig(num_pages=24, max_context=384, tiers=tiers), cost)

    fast = result(SimTiers(host_pages=100, page_bytes=1 << 20, host_rate=10e9))
    assert len(events_of(fast, PagesLoaded)) >= 5
    without = result(None)
    last = arrivals[-1].request_id
    assert fast.token_times_s[last][0] < without.token_times_s[last][0] - 0.2


def test_context_that_sequences_share_is_read_once():
    """A prompt's pages are the same for all that share them: the cost model sees it."""
    shared = tuple(range(1000))
    arrivals = [Arrival("first", 0.0, 1000, 60, prompt_ids=shared)]
    arrivals += [
        Arrival(f"r{i}", 1.0, 1010, 20, prompt_ids=(*shared, *range(2000 + 50 * i, 2010 + 50 * i)))
        for i in range(7)
    ]
    curve = Curve([1], [0.05])
    fitted = {
        unit: FittedCost(
            curve, curve, 1e-5, 0.0, 1e-5, 0.0, 0.0, 0.0, shared_unit=unit, shared_s=1e-6
        )
        for unit in (0, 64)
    }
    ends = {
        unit: simulate(arrivals, SimConfig(token_budget=2048), cost).steps[-1]
        for unit, cost in fitted.items()
    }
    assert ends[64].end_s < ends[0].end_s - 0.3


def test_of_shared_context_the_first_may_pay_in_full():
    """With the same cost for seeing it first and again, sharing changes nothing."""
    shared = tuple(range(64))
    arrivals = [
        Arrival(name, 0.0, 68, 10, prompt_ids=(*shared, *[100 + i] * 4))
        for i, name in enumerate("abc")
    ]
    curve = Curve([1], [0.05])

    def end_s(**how):
        cost = FittedCost(curve, curve, 1e-5, 0.0, 1e-5, 0.0, 0.0, 0.0, **how)
        return simulate(arrivals, SimConfig(token_budget=2048), cost).steps[-1].end_s

    alone_s, shared_s = end_s(), 1e-5
    assert end_s(shared_unit=16, shared_s=shared_s, first_pays=True) == pytest.approx(alone_s)
    # 64 tokens more in each of 9 steps
    assert end_s(shared_unit=16, shared_s=shared_s) > alone_s + 1e-3
