"""The textbook pictures, from the real scheduler on the virtual clock."""

import itertools

import pytest

from tidemill.planning.cost import LinearCost
from tidemill.planning.simulator import Arrival, SimConfig, simulate
from tidemill.sched.policies import POLICIES
from tidemill.sched.queue import AGEING_S
from tidemill.types.events import Deferred

# Four slots' worth of sequences and three more, one token of prompt each: output lengths as in the
# usual chart.
CHART = [
    Arrival(name, 0.0, 1, length)
    for name, length in zip("ABCDEFG", [5, 2, 4, 7, 3, 6, 2], strict=True)
]


def chart(policy):
    return simulate(CHART, SimConfig(policy=policy, num_rows=4)).chart("ABCDEFG")


def test_static_batching_leaves_slots_idle_until_the_longest_ends():
    assert chart("static") == [
        "11111........",
        "11...........",
        "1111.........",
        "1111111......",
        ".......111...",
        ".......111111",
        ".......11....",
    ]


def test_continuous_batching_refills_a_slot_in_the_next_step():
    assert chart("continuous") == [
        "11111.....",
        "11........",
        "1111......",
        "1111111...",
        "..111.....",
        "....111111",
        ".....11...",
    ]


LATER = [
    Arrival(*one)
    for one in zip("ABCDEFG", [0, 1, 1, 6, 7, 9, 9.5], [1] * 7, [4, 2, 5, 3, 6, 2, 4], strict=True)
]


def timeline(policy, **more):
    """Seconds from left to right; a step takes one."""
    return simulate(LATER, SimConfig(policy=policy, num_rows=4, **more)).timeline("ABCDEFG")


def test_dynamic_batching_waits_for_a_batch_but_not_longer_than_its_window():
    assert timeline("static") == [
        "1111...............",
        "....11.............",
        "....11111..........",
        ".........111.......",
        ".........111111....",
        ".........11........",
        "...............1111",
    ]
    assert timeline("dynamic", batch_window_s=2.0) == [
        "..1111............",
        "..11..............",
        "..11111...........",
        "........111.......",
        "........111111....",
        "..............11..",
        "..............1111",
    ]
    assert timeline("continuous") == [
        "1111..........",
        ".11...........",
        ".11111........",
        "......111.....",
        ".......111111.",
        ".........11...",
        "..........1111",
    ]


def test_a_full_batch_does_not_wait_for_the_window():
    arrivals = [Arrival(f"r{i}", 0.25 * i, 1, 2) for i in range(4)]
    result = simulate(arrivals, SimConfig(policy="dynamic", num_rows=4, batch_window_s=60.0))
    assert result.steps[0].start_s == 0.75
    assert any(
        isinstance(e, Deferred) and e.reason == "policy dynamic: no admission in this step"
        for e in result.events
    )


def test_no_batching_runs_one_after_the_other():
    lines = chart("none")
    assert all(sum(line[i] != "." for line in lines) == 1 for i in range(len(lines[0])))
    assert len(lines[0]) == 5 + 2 + 4 + 7 + 3 + 6 + 2


def long_prompt_among_decoders(policy, budget=256):
    decoders = [Arrival(f"d{i}", 0.0, 16, 200) for i in range(16)]
    arrivals = [*decoders, Arrival("long", 50.0, 8192, 4)]
    config = SimConfig(policy=policy, token_budget=budget, num_rows=32)
    return simulate(
        arrivals, config, LinearCost(fixed_s=1.0, per_token_s=0.01)
    ), 1.0 + 0.01 * budget


def test_a_long_prompt_never_delays_a_running_request_by_more_than_one_budgeted_step():
    result, full_step_s = long_prompt_among_decoders("continuous")
    assert max(result.longest_gap_s(f"d{i}") for i in range(16)) <= full_step_s + 1e-9
    assert any(
        step.tokens_of.get("long", 0) > 1 and len(step.tokens_of) == 17 for step in result.steps
    )


def test_prefill_first_shows_the_stall():
    result, full_step_s = long_prompt_among_decoders("prefill-first")
    stall = 1.0 + 0.01 * 8192
    assert min(result.longest_gap_s(f"d{i}") for i in range(16)) >= stall
    assert stall > 20 * full_step_s
    assert max(step.num_tokens for step in result.steps) == 256, "no step exceeds the budget"


def test_splitfuse_fills_every_budget_until_it_drains():
    lengths = [700, 3, 90, 512, 40, 1300, 260, 8, 77, 1024]
    arrivals = [Arrival(f"r{i}", 0.0, length, 6) for i, length in enumerate(lengths)]
    result = simulate(arrivals, SimConfig(policy="splitfuse", token_budget=256))
    remaining = sum(lengths)
    for step in result.steps:
        prompt_tokens = step.num_tokens - sum(1 for n in step.tokens_of.values() if n == 1)
        if remaining >= 256:
            assert step.num_tokens == 256
        remaining -= step.num_steps * prompt_tokens
    assert (
        sum(step.num_steps for step in result.steps if step.num_tokens == 256)
        >= sum(lengths) // 256
    )
    assert any(len(step.tokens_of) > 2 for step in result.steps), "short prompts are fused"


def test_continuous_does_not_cut_a_second_prompt():
    arrivals = [Arrival("a", 0.0, 100, 2), Arrival("b", 0.0, 100, 2)]
    result = simulate(arrivals, SimConfig(policy="continuous", token_budget=150))
    assert result.steps[0].tokens_of == {"a": 100}
    assert result.steps[1].tokens_of == {"a": 1, "b": 100}
    assert any(isinstance(e, Deferred) and "budget" in e.reason for e in result.events)


def test_on_a_gpu_continuous_cuts_a_second_prompt_while_many_are_queued():
    arrivals = [Arrival(f"r{i:02}", 0.0, 700, 1) for i in range(12)]
    result = simulate(arrivals, SimConfig(token_budget=1000, num_rows=32, device="cuda"))
    full = [step.num_tokens == 1000 for step in result.steps]
    # now 300 tokens for the one that ends outweigh 256 for each that is queued
    few = full.index(False)
    assert few >= 5
    assert not any(full[few:])
    assert result.steps[0].tokens_of == {"r00": 700, "r01": 300}
    decoding = [
        *(Arrival(f"d{i:02}", 0.0, 16, 60) for i in range(20)),
        *(Arrival(f"r{i}", 5.0, 700, 1) for i in range(6)),
    ]
    result = simulate(decoding, SimConfig(token_budget=1000, num_rows=32, device="cuda"))
    beside = [
        step.tokens_of.values()
        for step in result.steps
        if "d00" in step.tokens_of and step.start_s > 5
    ]
    assert beside
    assert all(sum(num > 1 for num in counts) <= 1 for counts in beside)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_finishes_everything_under_page_pressure(policy):
    arrivals = [
        Arrival(f"r{i}", i * 0.7, 20 + 13 * (i % 7), 5 + 11 * (i % 5), priority=i % 2)
        for i in range(60)
    ]
    config = SimConfig(
        policy=policy, num_rows=8, token_budget=64, num_pages=16, page_size=16, max_context=256
    )
    result = simulate(arrivals, config)
    assert {a.request_id: a.num_output for a in arrivals} == {
        k: len(v) for k, v in result.token_times_s.items()
    }


def test_the_same_arrivals_give_the_same_steps():
    config = SimConfig(num_rows=8, token_budget=64, num_pages=16, max_context=256)
    arrivals = [Arrival(f"r{i}", i * 0.3, 30, 20) for i in range(40)]
    assert simulate(arrivals, config).steps == simulate(arrivals, config).steps


# there a batch waits for its longest member
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"static"}))
def test_a_flood_of_the_highest_priority_starves_no_other_tenant(policy):
    """Twice what the engine can do, for two minutes, all of it more urgent than what others ask."""
    flood = [
        Arrival(f"flood{i}", i * 0.1, 20, 20, priority=-(2**31), tenant="flood")
        for i in range(1200)
    ]
    others = [
        Arrival(f"other{i}", 20.0 + 9 * i, 20, 20, tenant=f"tenant{i % 3}") for i in range(10)
    ]
    config = SimConfig(policy=policy, num_rows=4, token_budget=64)
    cost = LinearCost(fixed_s=0.02, per_token_s=0.005)
    result = simulate([*flood, *others], config, cost)
    waits = [result.token_times_s[other.request_id][0] - other.arrival_s for other in others]
    assert max(waits) < AGEING_S + 5
    assert min(waits) > AGEING_S - 1  # until then, priority is strict: the flood never let go
    assert result.token_times_s["flood1199"][0] > 120


@pytest.mark.parametrize("policy", ["continuous", "splitfuse", "prefill-first"])
def test_steps_ahead_change_when_tokens_are_known_and_nothing_else(policy):
    """A token of a step is known a step later, and all requests get all theirs."""
    arrivals = [Arrival(f"r{i}", i * 1.7, 30 + i, 8) for i in range(12)]
    result = simulate(
        arrivals, SimConfig(policy=policy, num_rows=4, token_budget=64, steps_ahead=1)
    )
    assert all(
        len(times) == 8 and times == sorted(times) for times in result.token_times_s.values()
    )
    assert all(one.end_s <= two.start_s for one, two in itertools.pairwise(result.steps))
    assert any(one.end_s == two.start_s for one, two in itertools.pairwise(result.steps)), (
        "no gap while there is work"
    )
