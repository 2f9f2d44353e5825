"""Pinned and retained prefixes, and the mode in which nothing is preempted."""

import random
import statistics

import pytest

from tests.sched.test_scheduler import add, make, run, step
from tidemill.kv.tiers import Moved, Tiers
from tidemill.planning.cost import LinearCost
from tidemill.planning.simulator import Arrival, SimConfig, simulate
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Hold, Submit


def submit(scheduler: Scheduler, name, tokens, max_tokens=1, prefix_leases=(), tenant="", salt=""):
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    spec = Submit(name, list(tokens), params, prefix_leases=prefix_leases, tenant=tenant, salt=salt)
    return scheduler.table.add(spec)[0]


def cached(scheduler, tokens):
    """How many of a new request's tokens are found."""
    return scheduler.kv.num_cached(scheduler.kv.path([*tokens, 5]))


def flood(scheduler, num=20, length=16, first=10_000):
    """Prompts that nobody asks for again, more of them than the pool holds."""
    for i in range(num):
        submit(scheduler, f"one-shot {i}", range(first + i * length, first + (i + 1) * length))
    run(scheduler)


def kinds(buffer, *types):
    return [event for event in buffer.take() if isinstance(event, types)]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_pinned_prefix_stays_and_a_retained_one_yields_only_to_need(index):
    scheduler, buffer = make(num_pages=32, index=index)
    submit(scheduler, "pin", range(16), prefix_leases=[Hold("a", 16, 60.0, is_pinned=True)])
    submit(scheduler, "keep", range(100, 116), prefix_leases=[Hold("b", 16, 60.0)])
    submit(scheduler, "neither", range(200, 216))
    run(scheduler)
    flood(scheduler)
    assert [cached(scheduler, range(n, n + 16)) for n in (0, 100, 200)] == [16, 16, 0]
    held = kinds(buffer, events.PrefixHeld)
    assert [
        (one.name, one.num_tokens, one.is_pinned, one.num_pinned, one.num_held) for one in held
    ] == [
        ("a", 16, True, 4, 4),
        ("b", 16, False, 4, 8),
    ]
    submit(scheduler, "large", range(5000, 5000 + 28 * 4))  # all but the pages of the pin
    run(scheduler)
    assert [cached(scheduler, range(n, n + 16)) for n in (0, 100)] == [16, 0]
    assert scheduler.kv.num_free_pages == 28


def test_a_hold_ends_at_its_time_or_when_it_is_let_go_and_can_be_renewed():
    scheduler, buffer = make(num_pages=32)
    for name, pinned in (("a", True), ("b", False), ("c", True)):
        submit(
            scheduler,
            name,
            range(ord(name), ord(name) + 16),
            prefix_leases=[Hold(name, 16, 10.0, pinned)],
            salt=name,
        )
    run(scheduler)
    scheduler.retention.renew("c", 100.0, "extended")
    scheduler._clock.advance(11.0)
    flood(scheduler, 1)
    assert [(one.name, one.reason) for one in kinds(buffer, events.HoldEnded)] == [
        ("a", "its time is over"),
        ("b", "its time is over"),
    ]
    assert scheduler.kv.held.num_pinned == 4
    scheduler.retention.renew("c", 0.0, "deleted")
    scheduler.retention.renew("c", 0.0, "deleted")  # it is not there any more
    assert [one.reason for one in kinds(buffer, events.HoldEnded)] == ["deleted"]
    assert scheduler.kv.held.num_pinned == scheduler.kv.num_held_pages == 0
    scheduler.table.check_integrity()


def test_a_hold_that_is_let_go_is_not_made_by_requests_under_way():
    scheduler, _ = make(num_pages=32)
    prefix_leases = [Hold("a", 16, 60.0, is_pinned=True), Hold("b", 16, 60.0)]
    requests = [submit(scheduler, "x", range(20), prefix_leases=prefix_leases)]
    scheduler.retention.renew("a", 0, "deleted", requests)
    run(scheduler)
    assert "a" not in scheduler.kv.held
    assert "b" in scheduler.kv.held


def test_holds_share_pages_by_count_and_the_bound_ends_the_least_recent():
    scheduler, buffer = make(num_pages=32)  # at most 16 are held
    submit(scheduler, "short", range(8), prefix_leases=[Hold("short", 8, 60.0)])
    run(scheduler)
    submit(scheduler, "long", range(32), prefix_leases=[Hold("long", 32, 60.0)])
    submit(scheduler, "other", range(100, 120), prefix_leases=[Hold("other", 20, 60.0)])
    run(scheduler)
    assert scheduler.kv.num_held_pages == 8 + 5
    scheduler.retention.renew("short", 60.0, "used")
    submit(scheduler, "third", range(200, 216), prefix_leases=[Hold("third", 16, 60.0)])
    run(scheduler)
    assert [one.name for one in kinds(buffer, events.HoldEnded)] == ["long"]
    assert scheduler.kv.num_held_pages == 2 + 5 + 4, "what is also of another hold is kept"
    submit(scheduler, "huge", range(1000, 1100), prefix_leases=[Hold("huge", 100, 60.0)])
    run(scheduler)
    assert [one.reason for one in kinds(buffer, events.PrefixNotHeld)] == [
        "it has 25 pages, and at most 16 may be held"
    ]


def test_pins_are_bounded_and_a_tenant_leaves_room_for_others():
    scheduler, buffer = make(num_pages=32)
    for i in range(4):
        submit(
            scheduler,
            f"{i}",
            range(100 * i, 100 * i + 20),
            prefix_leases=[Hold(f"{i}", 20, 60.0, is_pinned=True)],
        )
    run(scheduler)
    assert [one.reason for one in kinds(buffer, events.PrefixNotHeld)] == [
        "15 of 16 pages are pinned"
    ]
    scheduler, buffer = make(num_pages=32)
    for tenant, tokens in (("x", range(40)), ("x", range(32)), ("y", range(16)), ("y", range(16))):
        name = f"{tenant} {len(tokens)}"
        submit(
            scheduler,
            name,
            tokens,
            prefix_leases=[Hold(name, len(tokens), 60.0, True)],
            tenant=tenant,
            salt=tenant,
        )
        run(scheduler)
    assert [(one.name, one.reason) for one in kinds(buffer, events.PrefixNotHeld)] == [
        ("x 40", "it has 10 pages, and this API key may pin 8 more")
    ]
    assert scheduler.kv.held.num_pinned == 12


def test_a_pin_that_is_used_stays_whatever_others_have_pinned_since():
    scheduler, buffer = make(num_pages=32)
    for tenant, length in (("x", 32), ("y", 16), ("x", 32)):
        hold = Hold(tenant, length, 60.0, is_pinned=True)
        submit(
            scheduler,
            f"{tenant}{length}",
            range(length),
            prefix_leases=[hold],
            tenant=tenant,
            salt=tenant,
        )
        run(scheduler)
    assert not kinds(buffer, events.PrefixNotHeld, events.HoldEnded)
    assert scheduler.kv.held.num_pinned == 12


def test_a_pin_is_given_up_only_for_a_request_that_could_not_run_at_all():
    scheduler, buffer = make(num_pages=32, context=128)
    submit(scheduler, "pin", range(16), prefix_leases=[Hold("a", 16, 1e6, is_pinned=True)])
    run(scheduler)
    submit(scheduler, "small", range(500, 520), max_tokens=30)
    submit(scheduler, "whole", range(1000, 1100), max_tokens=28)
    assert run(scheduler) == {"small": "length", "whole": "length"}
    assert [one.reason for one in kinds(buffer, events.HoldEnded)] == ["whole cannot run beside it"]


def test_a_session_is_held_with_its_output_until_it_is_known_whether_it_returns():
    scheduler, buffer = make(num_pages=32)
    submit(
        scheduler,
        "turn",
        range(10),
        max_tokens=10,
        prefix_leases=[Hold("s", 0, 5.0, reason="may return")],
    )
    run(scheduler)
    (held,) = kinds(buffer, events.PrefixHeld)
    assert held.num_tokens == 16, "19 tokens were computed"
    scheduler.retention.renew("s", 300.0, "a tool call is under way")
    scheduler._clock.advance(200.0)
    flood(scheduler)
    assert cached(scheduler, [*range(10), *[0] * 10]) == 16


def test_what_a_failed_step_computed_is_not_held():
    scheduler, buffer = make(num_pages=32)
    submit(scheduler, "pin", range(16), prefix_leases=[Hold("a", 16, 60.0, is_pinned=True)])
    run(scheduler)
    scheduler.table.drop_computed("a step failed")
    assert [one.reason for one in kinds(buffer, events.HoldEnded)] == ["a step failed"]
    assert cached(scheduler, range(16)) == 0
    scheduler.table.check_integrity()


# ---- the mode in which nothing is preempted


@pytest.mark.parametrize("n", [1, 3])
def test_without_eviction_nothing_is_preempted_under_pressure(n):
    tokens = {}
    for evict in (True, False):
        scheduler, buffer = make(num_pages=24, evict=evict, context=96)
        for i in range(6):
            add(scheduler, f"r{i}", 8, max_tokens=40, n=n, priority=-i)
        tokens[evict] = run(scheduler)
        seen = buffer.take()
        assert any(isinstance(event, events.Preempted) for event in seen) is evict
        reasons = {event.reason for event in seen if isinstance(event, events.Deferred)}
        assert ("not enough free pages to run to its end" in reasons) is not evict
    assert tokens[True] == tokens[False]


def test_without_eviction_as_many_run_as_fit_to_their_ends():
    scheduler, _ = make(num_pages=24, evict=False, context=96)
    for i in range(4):
        add(scheduler, f"r{i}", 8, max_tokens=40)  # 12 pages each
    step(scheduler)
    assert len(scheduler.running) == 2


# ---- agents among one-shot traffic


def agents_and_one_shots(retain_s: float) -> list[Arrival]:
    """Four sessions whose turns contain all before, and prompts that come once. `retain_s`: 0
    retains no session."""
    chance, arrivals = random.Random(0), []

    def tokens(num: int) -> list[int]:
        return chance.choices(range(1, 30_000), k=num)

    for session in range(4):
        at, prompt = chance.uniform(0, 15), tokens(1500)
        for turn in range(4):
            name, num_output = f"agent {session} {turn}", chance.randrange(20, 60)
            prefix_leases = (
                (Hold(f"session {session}", 0, retain_s, reason="a tool call is under way"),)
                if retain_s
                else ()
            )
            arrivals.append(
                Arrival(
                    name,
                    at,
                    len(prompt),
                    num_output,
                    prompt_ids=tuple(prompt),
                    prefix_leases=prefix_leases,
                )
            )
            # the simulator's tokens are 0
            prompt = [*prompt, *[0] * num_output, *tokens(chance.randrange(50, 400))]
            at += 3 + chance.uniform(5, 20)
    systems, at = [tokens(256) for _ in range(4)], 0.0
    while (at := at + chance.expovariate(6.0)) < 60.0:
        prompt = [*chance.choice(systems), *tokens(chance.randrange(100, 600))]
        name = f"one-shot {len(arrivals)}"
        arrivals.append(
            Arrival(name, at, len(prompt), chance.randrange(10, 50), prompt_ids=tuple(prompt))
        )
    return arrivals


def shares_and_ttft(retain_s: float) -> dict[str, tuple[float, float]]:
    """By kind of request: the share of prompt tokens that were cached, and the mean time to the
    first token."""
    arrivals = agents_and_one_shots(retain_s)
    config = SimConfig(num_rows=32, token_budget=512, num_pages=1200, max_pinned=0.5)
    result = simulate(arrivals, config, LinearCost(fixed_s=0.01, per_token_s=0.00025))
    found = {
        event.request_id: event.num_cached
        for event in reversed(result.events)
        if isinstance(event, events.Admitted)
    }
    first = {
        event.request_id: event.since_arrival_s
        for event in result.events
        if isinstance(event, events.FirstToken)
    }
    figures = {}
    for kind in ("agent", "one-shot"):
        ours = [arrival for arrival in arrivals if arrival.request_id.startswith(kind)]
        share = sum(found[arrival.request_id] for arrival in ours) / sum(
            arrival.num_prompt for arrival in ours
        )
        figures[kind] = share, statistics.mean(first[arrival.request_id] for arrival in ours)
    return figures


def test_agents_find_their_sessions_among_one_shot_traffic():
    without, retained = shares_and_ttft(0.0), shares_and_ttft(300.0)
    assert without["agent"][0] < 0.1
    assert retained["agent"][0] > 0.6
    assert retained["one-shot"][0] > without["one-shot"][0] - 0.05
    assert retained["agent"][1] < without["agent"][1]


def test_a_hold_of_a_page_that_could_not_be_loaded_ends():
    """A preempted request comes back, and ends while its pages are still on their way: a stop
    string was found late."""
    scheduler, buffer = make(num_pages=32, tiers=Tiers(0, 0, [], page_bytes=100))
    kv, a = (
        scheduler.kv,
        submit(
            scheduler,
            "a",
            range(16),
            max_tokens=40,
            prefix_leases=[Hold("p", 0, 60.0, is_pinned=True)],
        ),
    )
    for _ in range(3):
        step(scheduler)
    keys = kv.index.keys_of(kv.path(a.tokens))
    scheduler.table.preempt(a, "test")
    for page in list(kv.cached_pages()):
        kv._forget(page)
    kv.offload.learn(list(enumerate(keys)))  # another engine has them
    plan = scheduler.plan()
    assert kv.offload.num_loading == len(plan.page_moves) > 0
    scheduler.table.finish(a, "stop")
    assert kv.held.num_pinned == len(plan.page_moves)
    scheduler.table.moved([Moved(move.number, 0, 0.0, "it is gone") for move in plan.page_moves])
    (ended,) = kinds(buffer, events.HoldEnded)
    assert ended.name == "p"
    assert "could not be loaded" in ended.reason
    assert kv.num_free_pages == kv.num_pages
    scheduler.table.check_integrity()
