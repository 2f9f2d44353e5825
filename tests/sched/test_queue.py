"""Which request is next: tenants in turn, ageing across priorities, and memory that does not grow
with tenants that have left."""

import zlib

import pytest

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import make_policy
from tidemill.sched.queue import _NUM_REMEMBERED, AGEING_S, PASSING_S
from tidemill.sched.request import BACKGROUND
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.events import EventBuffer
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

URGENT = -(2**31)


def make(rows=1, num_pages=64, index="hash", **more):
    clock, buffer = VirtualClock(), EventBuffer()
    scheduler = Scheduler(
        KVManager(num_pages + 1, 4, index=index),
        num_rows=rows,
        token_budget=16,
        max_context=256,
        policy=make_policy("continuous"),
        clock=clock,
        emit=buffer,
        **more,
    )
    return scheduler, clock, buffer


def add(scheduler, name, priority=0, tenant="", max_tokens=2, num_prompt=4, prompt=None):
    prompt = prompt or [1000 + zlib.crc32(f"{name} {i}".encode()) % 1000 for i in range(num_prompt)]
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    (request,) = scheduler.table.add(Submit(name, prompt, params, priority=priority, tenant=tenant))
    return request


def step(scheduler, clock, seconds=0.1):
    plan = scheduler.plan()
    clock.advance(seconds)
    done = scheduler.commit(plan, {item.row: [0] for item in plan.items if item.samples})
    scheduler.table.check_integrity()
    return [progress.request.request_id for progress in done if progress.finish_reason]


def flood(scheduler, clock, until, tenant, rows=1, limit_s=1000.0):
    """Keep the most urgent priority queued, two for each slot, until a request ends. Returns what
    ended, in order."""
    ended, num = [], 0
    while until not in ended:
        assert clock.now() < limit_s, f"{until} starves"
        while scheduler.waiting.num_waiting(False, tenant) < 2 * rows:
            add(scheduler, f"urgent{num}", URGENT, tenant)
            num += 1
        ended += step(scheduler, clock)
    return ended


def test_no_priority_starves_another():
    """Also within one tenant, while more and more urgent requests come than there are slots for."""
    for tenant in ("other", "flood"):
        scheduler, clock, buffer = make(rows=2)
        add(scheduler, "patient", 5, tenant, max_tokens=8)
        flood(scheduler, clock, "patient", "flood", rows=2, limit_s=2 * AGEING_S)
        admitted = [
            e for e in buffer.take() if isinstance(e, events.Admitted) and e.request_id == "patient"
        ]
        assert "; before higher priorities, after 10 s in the queue" in admitted[-1].reason


def test_until_then_priority_is_strict():
    scheduler, clock, _ = make()
    add(scheduler, "patient", 1)
    ended = flood(scheduler, clock, "patient", "")
    assert len(ended) > 0.9 * AGEING_S / 0.2  # of two steps each


def test_what_started_by_age_is_not_preempted_for_the_priorities_it_passed():
    scheduler, clock, buffer = make(rows=1)
    patient = add(scheduler, "patient", 1, max_tokens=20)
    while not patient.is_aged:
        if not scheduler.waiting.num_waiting(False) > 1:
            add(scheduler, "urgent", URGENT)
        step(scheduler, clock)
    buffer.take()
    add(scheduler, "late", URGENT)
    while "patient" not in step(scheduler, clock):
        pass
    assert not [e for e in buffer.take() if isinstance(e, events.Preempted)]


def test_urgent_requests_one_after_the_other_do_not_preempt_for_ever():
    """The next one comes when the last one has ended, so that none is queued when the patient one
    starts."""
    scheduler, clock, buffer = make(rows=1)
    add(scheduler, "patient", 1, max_tokens=100)
    ended, num = [], 0
    while "patient" not in ended:
        assert clock.now() < 3 * AGEING_S, "starves"
        if f"urgent{num - 1}" in ended or not num:
            step(scheduler, clock)
            add(scheduler, f"urgent{num}", URGENT, max_tokens=10)
            num += 1
        ended += step(scheduler, clock)
    assert sum(isinstance(e, events.Preempted) for e in buffer.take()) > 5


def test_urgent_requests_keep_every_second_place_in_a_long_queue():
    """Where everything has waited long, priority still counts: the two orders alternate."""
    scheduler, clock, _ = make()
    for i in range(6):
        add(scheduler, f"low{i}", 5, max_tokens=1)
    clock.advance(AGEING_S)
    for i in range(3):
        add(scheduler, f"high{i}", -5, max_tokens=1)
    order = [name for _ in range(9) for name in step(scheduler, clock)]
    assert order == ["high0", "low0", "high1", "low1", "high2", "low2", "low3", "low4", "low5"]


def test_age_is_no_claim_against_another_tenant_of_the_same_priority():
    scheduler, clock, _ = make()
    for i in range(4):
        add(scheduler, f"flood{i}", tenant="a", max_tokens=1)
    step(scheduler, clock)
    clock.advance(5 * AGEING_S)
    for i in range(2):
        add(scheduler, f"few{i}", tenant="b", max_tokens=1)
    order = [name for _ in range(5) for name in step(scheduler, clock)]
    assert order == ["flood1", "few0", "flood2", "few1", "flood3"]


def test_the_background_does_not_age_into_the_foreground():
    scheduler, clock, _ = make()
    add(scheduler, "batch", BACKGROUND)
    clock.advance(10 * AGEING_S)
    add(scheduler, "somebody")
    ended = []
    while scheduler.has_work:
        ended += step(scheduler, clock)
    assert ended == ["somebody", "batch"]


def test_leaving_for_a_moment_pays_no_debt_and_idling_saves_up_no_claim():
    scheduler, clock, _ = make(rows=1)
    add(scheduler, "stays0", tenant="b", max_tokens=1)
    step(scheduler, clock)  # `b` was here first, and is the least served from now on
    add(scheduler, "large", tenant="a", num_prompt=100, max_tokens=2)
    for _ in range(3):
        step(scheduler, clock)
    add(scheduler, "stays1", tenant="b", max_tokens=1)
    add(scheduler, "stays2", tenant="b", max_tokens=1)
    while "large" not in step(scheduler, clock):
        pass
    add(scheduler, "again", tenant="a", max_tokens=1)
    add(scheduler, "new", tenant="c", max_tokens=1)
    order = []
    while scheduler.has_work:
        order += step(scheduler, clock)
    assert order[-1] == "again"
    # Nothing is left: the next ones start level, however much each has had.
    add(scheduler, "first", tenant="a", max_tokens=1)
    add(scheduler, "second", tenant="d", max_tokens=1)
    assert [step(scheduler, clock), step(scheduler, clock)] == [["first"], ["second"]]


def test_memory_does_not_grow_with_tenants_that_have_left():
    scheduler, clock, _ = make(rows=2)
    add(scheduler, "stays", tenant="stays", num_prompt=3, max_tokens=200)
    for i in range(3 * _NUM_REMEMBERED):
        scheduler.table.abort(add(scheduler, f"r{i}", tenant=f"tenant{i}"), "left")
    (kind, _) = scheduler.waiting._classes
    assert len(kind.tenants) == 1
    assert len(kind._served_before) <= _NUM_REMEMBERED
    while scheduler.has_work:
        step(scheduler, clock)
    assert not kind.tenants
    assert not kind._served_before


def test_samples_that_wait_for_their_prompt_do_not_stand_in_others_way():
    scheduler, clock, _ = make(rows=3)
    scheduler.table.add(
        Submit("r", [1] * 40, SamplingParams(max_tokens=1, seed=0, n=3), tenant="a")
    )
    add(scheduler, "other", tenant="b", max_tokens=1)
    assert scheduler.waiting.num_waiting(False, "a") == 3
    ended = []
    while scheduler.has_work:
        ended += step(scheduler, clock)
    assert sorted(ended) == ["other", "r:0", "r:1", "r:2"]


def test_what_is_preempted_for_a_priority_does_not_go_before_it():
    """Requests that waited long before they started (nothing more urgent waited then) are not
    preempted: back in the queue they would be level with the urgent one, and take the place that
    was made for it."""
    scheduler, clock, buffer = make(rows=4, num_pages=32)
    first = [add(scheduler, f"first{i}", tenant="t", max_tokens=60) for i in range(4)]
    step(scheduler, clock)
    for i in range(4):
        add(scheduler, f"low{i}", 5, "t", max_tokens=60, num_prompt=16)
    clock.advance(AGEING_S + 2)
    for request in first:
        scheduler.table.abort(request, "gone")
    for _ in range(6):
        step(scheduler, clock)
    assert [request.request_id for request in scheduler.running] == [f"low{i}" for i in range(4)]
    add(scheduler, "urgent", 0, "t", num_prompt=100)
    buffer.take()
    for _ in range(3):
        step(scheduler, clock)
    assert len(scheduler.running) == 4
    assert not [event for event in buffer.take() if isinstance(event, events.Preempted)]


def test_a_preempted_request_keeps_its_place_by_age():
    scheduler, clock, _ = make()
    add(scheduler, "first", tenant="t", max_tokens=60)
    step(scheduler, clock)
    old = add(scheduler, "old", 5, "t", max_tokens=60)
    clock.advance(AGEING_S - 1)
    scheduler.table.abort(scheduler.running[0], "gone")
    step(scheduler, clock)
    add(scheduler, "young", 5, "t")
    clock.advance(0.5)
    add(scheduler, "urgent", 0, "t")
    step(scheduler, clock)
    assert [request.request_id for request in scheduler.running] == ["urgent"]
    assert [request.request_id for request in old.account.by_age] == ["old", "young"]


def test_a_tenant_with_all_slots_makes_way_for_another():
    """At equal priority: its latest requests beyond half of the slots wait, and go on once the
    others have ended."""
    scheduler, clock, buffer = make(rows=4)
    for i in range(4):
        add(scheduler, f"many{i}", tenant="many", max_tokens=40)
    for _ in range(4):
        step(scheduler, clock)
    for i in range(3):
        add(scheduler, f"few{i}", tenant="few", max_tokens=4)
    ended = []
    while len(ended) < 7:
        ended += step(scheduler, clock)
    assert set(ended[:3]) == {"few0", "few1", "few2"}
    preempted = [event.request_id for event in buffer.take() if isinstance(event, events.Preempted)]
    assert set(preempted) == {"many3", "many2"}, "no more than is beyond its part"


def test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_one():
    scheduler, clock, _ = make(rows=4)
    add(scheduler, "long", tenant="one", num_prompt=160)
    step(scheduler, clock)
    add(scheduler, "short", tenant="two", num_prompt=5, max_tokens=1)
    add(scheduler, "own", tenant="one", num_prompt=5, max_tokens=1)
    plan = scheduler.plan()
    assert {item.seq: item.count for item in plan.items} == {0: 11, 1: 5}  # of a budget of 16


def test_more_tenants_than_slots():
    scheduler, clock, _ = make(rows=2)
    for i in range(2):
        add(scheduler, f"many{i}", tenant="many", max_tokens=40)
    step(scheduler, clock)
    for i in range(3):
        add(scheduler, f"tenant{i}", tenant=f"tenant{i}", max_tokens=2)
    ended = []
    while len(ended) < 5:
        ended += step(scheduler, clock)
    assert set(ended[:3]) == {"tenant0", "tenant1", "tenant2"}


@pytest.mark.parametrize("index", INDEXES)
def test_by_prefix_the_longest_cached_one_is_first(index):
    scheduler, clock, buffer = make(order="prefix", index=index)
    document = list(range(500, 512))
    add(scheduler, "before", prompt=[*document, 1])
    while scheduler.has_work:
        step(scheduler, clock)
    add(scheduler, "other")
    add(scheduler, "short", prompt=[*document[:5], 2])
    add(scheduler, "long", prompt=[*document, 3])
    add(scheduler, "urgent", -1)
    add(scheduler, "long too", prompt=[*document, 4])
    ended = []
    while scheduler.has_work:
        ended += step(scheduler, clock)
    assert ended == ["urgent", "long", "long too", "short", "other"]
    reasons = {
        event.request_id: event.reason
        for event in buffer.take()
        if isinstance(event, events.Admitted)
    }
    assert reasons["long"] == "prefix hit 12 of 13; before 2 that came earlier: the longest prefix"
    assert reasons["other"] == "prefix hit 0 of 4"


def test_by_prefix_nobody_starves():
    """Requests for a cached document keep coming. One that is not cached starts soon after its
    time, and from then on every second one is the first in line."""
    scheduler, clock, _ = make(order="prefix")
    document, ended, num = list(range(500, 512)), [], 0
    add(scheduler, "before", prompt=[*document, 1])
    step(scheduler, clock)
    for i in range(3):
        add(scheduler, f"patient{i}")
    while "patient2" not in ended:
        assert clock.now() < 2 * PASSING_S, "starved"
        while len(scheduler.waiting) < 8:
            add(scheduler, f"cached{num}", prompt=[*document, num])
            num += 1
        ended += step(scheduler, clock)
    first = ended.index("patient0")
    assert first > 0.8 * PASSING_S / 0.2  # of two steps each
    assert [name.startswith("patient") for name in ended[first:]] == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_by_prefix_tenants_stay_in_turn():
    scheduler, clock, _ = make(order="prefix")
    ended = []
    for i in range(9):
        add(scheduler, f"cached{i}", tenant="a", prompt=[*range(500, 512), i])
    ended += step(scheduler, clock)
    add(scheduler, "not cached", tenant="b", num_prompt=13)
    while scheduler.has_work:
        ended += step(scheduler, clock)
    assert ended.index("not cached") <= 2
