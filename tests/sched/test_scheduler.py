"""The scheduler's decisions, one by one. The mechanics under random load are in test_fuzz.py."""

import zlib

import msgspec

from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Tiers
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import Policy, make_policy
from tidemill.sched.request import BACKGROUND
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.events import EventBuffer
from tidemill.types.kv_policy import read_policy, settle
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def make(
    num_pages=64,
    page_size=4,
    rows=8,
    budget=16,
    policy="continuous",
    context=256,
    index="hash",
    tiers=None,
    **more,
):
    buffer = EventBuffer()
    scheduler = Scheduler(
        KVManager(num_pages + 1, page_size, index=index, tiers=tiers),
        num_rows=rows,
        token_budget=budget,
        max_context=context,
        policy=make_policy(policy),
        clock=VirtualClock(),
        emit=buffer,
        **more,
    )
    return scheduler, buffer


def add(scheduler, name, prompt, max_tokens=8, priority=0, **params):
    tokens = (
        prompt
        if isinstance(prompt, list)
        else [1000 + zlib.crc32(f"{name} {i}".encode()) % 1000 for i in range(prompt)]
    )
    return scheduler.table.add(
        Submit(
            name, tokens, SamplingParams(max_tokens=max_tokens, seed=0, **params), priority=priority
        )
    )


def step(scheduler, token=0):
    plan = scheduler.plan()
    assert plan is not None
    done = scheduler.commit(plan, {item.row: [token] for item in plan.items if item.samples})
    scheduler.table.check_integrity()
    return plan, done


def run(scheduler, limit=1000):
    finished = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return finished
        _, done = step(scheduler)
        finished |= {p.request.request_id: p.finish_reason for p in done if p.finish_reason}
    raise AssertionError("did not end")


def counts(plan):
    return [(item.start, item.count, item.samples) for item in plan.items]


def test_a_prompt_is_cut_to_the_budget_and_decoding_comes_first():
    scheduler, _ = make(budget=16)
    add(scheduler, "long", 40)
    add(scheduler, "late", 3)
    assert counts(step(scheduler)[0]) == [(0, 16, False)]
    assert counts(step(scheduler)[0]) == [(16, 16, False)]
    assert counts(step(scheduler)[0]) == [(32, 8, True), (0, 3, True)]
    assert counts(step(scheduler)[0]) == [(40, 1, True), (3, 1, True)]


def test_a_prompt_that_fills_the_context_is_computed_to_its_end():
    """Also if one token is left for its last step, as of a request that decodes."""
    scheduler, _ = make(budget=16, context=32)
    add(scheduler, "short", 1, max_tokens=1, pooling="mean")
    add(scheduler, "full", 32, max_tokens=1, pooling="mean")
    plans = [counts(step(scheduler)[0]) for _ in range(3)]
    assert plans == [[(0, 1, True), (0, 15, False)], [(15, 16, False)], [(31, 1, True)]]
    assert not scheduler.has_work


def test_a_new_row_is_described_once_and_pages_only_when_added():
    scheduler, _ = make(page_size=4)
    add(scheduler, "a", 4)
    plan, _ = step(scheduler)
    assert [len(new.page_ids[0]) for new in plan.new_rows] == [1]
    plan, _ = step(scheduler)
    assert not plan.new_rows
    assert [(u.first_index, len(u.page_ids)) for u in plan.page_updates] == [(1, 1)]
    plan, _ = step(scheduler)
    assert not plan.new_rows
    assert not plan.page_updates


def test_what_policies_keep_beside_pages_is_limited():
    """A request waits until there is memory for what its row keeps; that goes with the request."""
    scheduler, buffer = make(policy_bytes=100)
    policy = msgspec.structs.replace(
        settle(read_policy({"kind": "h2o", "budget": 8}), 4, 40, 256), beside_bytes=60
    )
    for name, cache in (("a", policy), ("b", policy), ("c", None)):
        scheduler.table.add(
            Submit(name, [1, 2, 3, 4], SamplingParams(max_tokens=3, seed=0)), cache=cache
        )
    plans = [step(scheduler)[0] for _ in range(4)]
    # the queue's order stays
    assert [[new.row for new in plan.new_rows] for plan in plans] == [[0], [], [], [0, 1]]
    assert [plan.left_rows for plan in plans] == [[], [], [], [0]]
    reasons = {event.reason for event in buffer.take() if isinstance(event, events.Deferred)}
    assert "KV policies have 100 bytes, of which too many are taken" in reasons
    assert run(scheduler) == {"b": "length", "c": "length"}


def test_prefix_hit_in_the_very_step_that_computes_it():
    scheduler, buffer = make(budget=64)
    prompt = list(range(20))
    add(scheduler, "a", prompt)
    add(scheduler, "b", prompt)
    plan, _ = step(scheduler)
    assert counts(plan) == [(0, 20, True), (16, 4, True)]
    reasons = [e.reason for e in buffer.take() if isinstance(e, events.Admitted)]
    assert reasons == ["prefix hit 0 of 20", "prefix hit 16 of 20"]


def test_a_page_in_part_the_same_is_copied_before_the_step():
    scheduler, buffer = make(budget=64, index="radix")
    common = list(range(10))
    add(scheduler, "a", [*common, 90, 91])
    step(scheduler)
    source = scheduler.kv.tables(scheduler.running[0].seq)[0][2]
    add(scheduler, "b", [*common, 92, 93])
    plan, _ = step(scheduler)
    target = plan.new_rows[0].page_ids[0][2]
    assert counts(plan)[1:] == [(10, 2, True)]
    assert plan.page_copies == [(source, target)]
    seen = [e.reason for e in buffer.take() if isinstance(e, events.Admitted)]
    assert seen == ["prefix hit 0 of 12", "prefix hit 10 of 12"]


def test_a_copy_of_what_is_discarded_is_not_made():
    """A request is to copy a page, but no step has been sent since, and the page turns out to hold
    NaN."""
    scheduler, buffer = make(budget=64, index="radix")
    common = list(range(10))
    (broken,) = add(scheduler, "a", [*common, 90, 91])
    step(scheduler)
    (copying,) = add(scheduler, "b", [*common, 92, 93])
    scheduler.kv.begin_step()
    assert scheduler._admit(copying)
    scheduler.table.discard(broken, "NaN")
    scheduler.table.check_integrity()
    assert "holds NaN" in next(e.reason for e in buffer.take() if isinstance(e, events.Preempted))
    plan, _ = step(scheduler)
    assert counts(plan) == [(8, 4, True)]
    assert not plan.page_copies


def test_what_the_cache_holds_does_not_count_against_the_budget():
    scheduler, _ = make(page_size=4, budget=16)
    common = list(range(24))
    add(scheduler, "first", [*common, 90])
    step(scheduler)
    step(scheduler)
    for i in range(3):
        add(scheduler, f"later{i}", [*common, 91 + i, 7])
    plan, _ = step(scheduler)
    assert counts(plan) == [(25, 1, True), *[(24, 2, True)] * 3]


def test_prompt_logprobs_skip_the_prefix_cache():
    scheduler, _ = make(budget=64)
    prompt = list(range(20))
    add(scheduler, "a", prompt)
    add(scheduler, "b", prompt, prompt_logprobs=1)
    assert counts(step(scheduler)[0]) == [(0, 20, True), (0, 20, True)]
    for start, num_cached in ((17, 16), (16, 12)):  # the logprob of a token needs the one before it
        add(
            scheduler,
            f"from {start}",
            prompt,
            prompt_logprobs=1,
            prompt_logprobs_start=start,
            max_tokens=1,
        )
        assert counts(step(scheduler)[0])[-1] == (num_cached, 20 - num_cached, True)


def test_finished_requests_leave_in_that_step_and_the_next_takes_the_row():
    scheduler, _ = make(rows=1)
    add(scheduler, "a", 2, max_tokens=1)
    add(scheduler, "b", 2, max_tokens=1)
    assert step(scheduler)[1][0].finish_reason == "length"
    plan, done = step(scheduler)
    assert plan.new_rows[0].row == 0
    assert done[0].request.request_id == "b"


def test_finish_reasons():
    scheduler, _ = make()
    scheduler.table.add(
        Submit("eos", [1, 2], SamplingParams(max_tokens=5, seed=0), eos_token_ids=[9])
    )
    scheduler.table.add(
        Submit(
            "ignored",
            [1, 2],
            SamplingParams(max_tokens=2, seed=0, ignore_eos=True),
            eos_token_ids=[9],
        )
    )
    scheduler.table.add(
        Submit("stop id", [1, 2], SamplingParams(max_tokens=5, seed=0, stop_token_ids=(9,)))
    )
    _, done = step(scheduler, token=9)
    assert {p.request.request_id: p.finish_reason for p in done} == {
        "eos": "stop",
        "ignored": None,
        "stop id": "stop",
    }
    _, done = step(scheduler, token=9)
    assert {p.request.request_id: p.finish_reason for p in done} == {"ignored": "length"}


def test_output_ends_at_the_context():
    scheduler, _ = make(context=10)
    add(scheduler, "a", 6, max_tokens=None)
    for _ in range(4):
        _, done = step(scheduler)
    assert done[0].finish_reason == "length"
    assert len(done[0].request.tokens) == 10


def test_the_latest_is_preempted_and_resumes_from_the_prefix_cache():
    scheduler, buffer = make(num_pages=6, page_size=4)
    add(scheduler, "first", 8, max_tokens=12)
    add(scheduler, "second", 8, max_tokens=12)
    assert run(scheduler) == {"first": "length", "second": "length"}
    seen = buffer.take()
    preempted = [e for e in seen if isinstance(e, events.Preempted)]
    assert {e.request_id for e in preempted} == {"second"}
    assert preempted[0].reason == "no free page for first"
    resumed = [e for e in seen if isinstance(e, events.Admitted) and e.request_id == "second"][1]
    assert resumed.num_cached >= 4


def test_without_eviction_pages_of_other_engines_are_not_fetched_into_promised_ones():
    scheduler, buffer = make(num_pages=16, tiers=Tiers(4), evict=False)
    add(scheduler, "a", 8, max_tokens=44)
    step(scheduler)
    scheduler.kv.offload.learn([(place, b"%d" % place) for place in range(16)])
    assert run(scheduler) == {"a": "length"}
    assert scheduler.kv.offload.num_loading == 3  # of the 16; no load ends
    assert not [event for event in buffer.take() if isinstance(event, events.Preempted)]


def test_priority_decides_who_is_preempted():
    scheduler, buffer = make(num_pages=6, page_size=4)
    add(scheduler, "first", 8, max_tokens=12, priority=1)
    add(scheduler, "urgent", 8, max_tokens=12, priority=0)
    run(scheduler)
    assert {e.request_id for e in buffer.take() if isinstance(e, events.Preempted)} == {"first"}


def test_an_urgent_request_takes_the_place_of_a_lower_one():
    scheduler, buffer = make(rows=1)
    add(scheduler, "low", 4, priority=5)
    step(scheduler)
    add(scheduler, "urgent", 4, max_tokens=1, priority=0)
    add(scheduler, "equal", 4, max_tokens=1, priority=5)
    _plan, done = step(scheduler)
    assert [p.request.request_id for p in done] == ["urgent"]
    assert [e.request_id for e in buffer.take() if isinstance(e, events.Preempted)] == ["low"]
    # back in its old place, before its equal
    assert next(iter(scheduler.waiting)).request_id == "low"
    run(scheduler)


def test_no_request_is_preempted_in_vain():
    """Pages that a request of higher rank shares would not become free, so there is no point in
    preempting for them."""
    scheduler, buffer = make(num_pages=12, page_size=4, budget=64)
    prompt = list(range(16))
    add(scheduler, "top", prompt, max_tokens=20, priority=-5)
    add(scheduler, "low", [*prompt, 99], max_tokens=20, priority=5)
    for _ in range(3):
        step(scheduler)
    add(scheduler, "high", 30, max_tokens=2, priority=0)
    step(scheduler)
    assert not [e for e in buffer.take() if isinstance(e, events.Preempted)]
    assert run(scheduler).keys() == {"top", "low", "high"}


def test_a_forked_sample_preempts_none_for_pages_it_has():
    scheduler, buffer = make(num_pages=20, page_size=4, budget=64)
    for i in range(3):
        add(scheduler, f"low{i}", 10, max_tokens=12, priority=5)
    step(scheduler)
    add(scheduler, "hi", 20, n=2, max_tokens=4, priority=0)
    for _ in range(3):
        step(scheduler)
    assert not [e for e in buffer.take() if isinstance(e, events.Preempted)]
    run(scheduler)


def test_tenants_share_what_there_is():
    """One tenant floods the queue; the other's few requests are served in turn with its, and idling
    saves up no claim."""
    scheduler, _ = make(rows=1, budget=16)
    for i in range(6):
        scheduler.table.add(
            Submit(
                f"flood{i}",
                [i + 1] * 8,
                SamplingParams(max_tokens=2, seed=0, ignore_eos=True),
                tenant="a",
            )
        )
    step(scheduler)
    for i in range(2):
        scheduler.table.add(
            Submit(
                f"few{i}",
                [i + 50] * 8,
                SamplingParams(max_tokens=2, seed=0, ignore_eos=True),
                tenant="b",
            )
        )
    order = []
    while scheduler.has_work:
        _, done = step(scheduler)
        order += [progress.request.request_id for progress in done if progress.finish_reason]
    assert order == ["flood0", "few0", "flood1", "few1", "flood2", "flood3", "flood4", "flood5"]


def test_first_come_first_served_within_a_priority():
    scheduler, _ = make(rows=1)
    for name, priority in (("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0)):
        add(scheduler, name, 2, max_tokens=1, priority=priority)
    order = [step(scheduler)[1][0].request.request_id for _ in range(4)]
    assert order == ["a1", "a2", "b1", "b2"]


def test_samples_share_the_prompt_and_copy_the_page_they_write():
    scheduler, buffer = make(page_size=4)
    add(scheduler, "r", 10, n=3, max_tokens=4)
    plan, _ = step(scheduler)
    assert counts(plan) == [(0, 10, True)]
    plan, _ = step(scheduler)
    assert counts(plan) == [(10, 1, True), (9, 1, True), (9, 1, True)]
    first, second, third = plan.new_rows and [
        list(scheduler.kv.tables(r.seq)[0]) for r in scheduler.running
    ]
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert len(plan.page_copies) == 2  # the last owner keeps the original
    assert sum(isinstance(e, events.Forked) for e in buffer.take()) == 2
    assert run(scheduler) == {"r:0": "length", "r:1": "length", "r:2": "length"}


def test_samples_share_even_when_the_first_ends_at_once():
    scheduler, _ = make(page_size=4)
    add(scheduler, "r", 10, n=2, max_tokens=1)
    step(scheduler)
    plan, done = step(scheduler)
    assert counts(plan) == [(9, 1, True)]
    assert done[0].finish_reason == "length"


def test_samples_survive_the_abort_of_the_first():
    scheduler, _ = make(page_size=4, budget=4)
    first, *_ = add(scheduler, "r", 10, n=3, max_tokens=2)
    step(scheduler)
    scheduler.table.abort(first, "test")
    scheduler.table.check_integrity()
    assert run(scheduler) == {"r:1": "length", "r:2": "length"}


def test_waiting_samples_give_up_their_pages_when_no_request_could_run():
    scheduler, _ = make(num_pages=4, page_size=4, rows=1, context=16)
    add(scheduler, "r", 9, n=2, max_tokens=1, priority=1)
    step(scheduler)
    add(scheduler, "big", 15, max_tokens=1, priority=0)
    assert run(scheduler) == {"big": "length", "r:1": "length"}


def test_abort_at_any_moment_frees_everything():
    scheduler, buffer = make(budget=4)
    (waiting,) = add(scheduler, "w", 4)
    scheduler.table.abort(waiting, "gone")
    (running,) = add(scheduler, "r", 10)
    step(scheduler)
    plan = scheduler.plan()
    scheduler.table.abort(running, "gone")
    scheduler.table.abort(running, "twice")
    assert scheduler.commit(plan, {}) == []
    scheduler.table.check_integrity()
    assert not scheduler.has_work
    assert sum(isinstance(e, events.Aborted) for e in buffer.take()) == 2


def test_two_steps_in_flight():
    """A step can be planned before the last one's tokens are known, and a stale result is dropped."""
    scheduler, _ = make(rows=2)
    (a,) = add(scheduler, "a", 4, max_tokens=3, priority=1)
    one = scheduler.plan()
    two = scheduler.plan()
    assert counts(one) == [(0, 4, True)]
    assert counts(two) == [(4, 1, True)]
    assert scheduler.commit(one, {0: [11]})[0].token_ids == [11]
    scheduler.table.preempt(a, "test")
    assert scheduler.commit(two, {0: [12]}) == []
    assert a.tokens[4:] == [11]
    assert run(scheduler) == {"a": "length"}


def test_the_reason_for_waiting_is_said_once():
    scheduler, buffer = make(rows=1)
    add(scheduler, "a", 2, max_tokens=5)
    add(scheduler, "b", 2)
    for _ in range(4):
        step(scheduler)
    deferred = [e for e in buffer.take() if isinstance(e, events.Deferred)]
    assert [(e.request_id, e.reason) for e in deferred] == [("b", "all 1 slots are taken")]


def tokens_of(scheduler, plan):
    return {
        scheduler.requests[item.seq].request_id: item.count
        for item in plan.items
        if item.seq in scheduler.requests
    }


def test_the_background_has_the_engine_while_no_other_request_is_there():
    scheduler, _ = make(budget=16)
    add(scheduler, "batch", 40, max_tokens=20, priority=BACKGROUND)
    assert tokens_of(scheduler, step(scheduler)[0]) == {"batch": 16}
    add(scheduler, "somebody", 12, max_tokens=4)
    # It is in the middle of its prompt, and yet the newcomer starts at once and is not slowed by
    # more than the allowed token.
    # a second prompt is not cut
    assert tokens_of(scheduler, step(scheduler)[0]) == {"somebody": 12}
    for _ in range(3):
        assert step(scheduler)[0].num_tokens <= 2
    assert "somebody" not in {request.request_id for request in scheduler.running}
    assert tokens_of(scheduler, step(scheduler)[0])["batch"] > 1


def test_alone_the_background_keeps_its_steps_short():
    scheduler, _ = make(budget=16, background_budget=6)
    for i in range(3):
        add(scheduler, f"batch{i}", 20, priority=BACKGROUND)
    assert max(step(scheduler)[0].num_tokens for _ in range(8)) == 6
    assert len(run(scheduler)) == 3


def test_beside_others_the_background_moves_on_slowly_but_moves_on():
    scheduler, _ = make(budget=16, background_tokens=0.25)
    for i in range(4):
        add(scheduler, f"batch{i}", 3, max_tokens=100, priority=BACKGROUND)
    step(scheduler)
    add(scheduler, "somebody", 3, max_tokens=41)
    step(scheduler)
    given = [step(scheduler)[0].num_tokens - 1 for _ in range(40)]
    assert sum(given) == 10
    assert max(given) == 1


def test_rows_and_pages_are_given_up_by_the_background_first():
    scheduler, _ = make(rows=2, num_pages=16)
    add(scheduler, "batch0", 20, max_tokens=20, priority=BACKGROUND)
    add(scheduler, "batch1", 20, max_tokens=20, priority=BACKGROUND)
    step(scheduler)
    add(scheduler, "somebody", 8, max_tokens=2)
    assert "somebody" in tokens_of(scheduler, step(scheduler)[0])
    assert run(scheduler) == {"batch0": "length", "batch1": "length", "somebody": "length"}


def test_what_a_tenant_runs_in_the_background_is_not_counted_against_it():
    scheduler, _ = make(rows=1)
    scheduler.table.add(
        Submit(
            "batch",
            [5] * 30,
            SamplingParams(max_tokens=30, seed=0),
            priority=BACKGROUND,
            tenant="a",
        )
    )
    for _ in range(10):
        step(scheduler)
    scheduler.table.add(Submit("of a", [6] * 3, SamplingParams(max_tokens=2, seed=0), tenant="a"))
    scheduler.table.add(Submit("of b", [7] * 3, SamplingParams(max_tokens=2, seed=0), tenant="b"))
    assert list(run(scheduler)) == ["of a", "of b", "batch"]


def test_under_every_policy_the_background_ends_and_so_do_the_others():
    for policy in ("continuous", "splitfuse", "prefill-first", "static", "none"):
        scheduler, _ = make(policy=policy, rows=3, background_tokens=0.125)
        add(scheduler, "batch0", 40, priority=BACKGROUND)
        step(scheduler)
        for i in range(3):
            add(scheduler, f"somebody{i}", 20)
            add(scheduler, f"batch{i + 1}", 20, priority=BACKGROUND)
        assert len(run(scheduler)) == 7, policy


def test_the_background_queues_apart():
    scheduler, _ = make(rows=1)
    for i in range(5):
        add(scheduler, f"batch{i}", 3, priority=BACKGROUND + i)
    add(scheduler, "somebody", 3)
    assert scheduler.waiting.num_waiting(in_background=True) == 5
    assert scheduler.waiting.num_waiting(in_background=False) == 1


def test_a_step_is_filled_for_requests_that_are_queued_but_not_for_the_background():
    for num_more, priority, num_tokens in ((1, 0, 16), (9, BACKGROUND, 12), (0, 0, 12)):
        scheduler, _ = make(budget=16)
        scheduler.policy.step_cost = 1.5
        add(scheduler, "a", 12)
        (second,) = add(scheduler, "b", 14)
        for i in range(num_more):
            add(scheduler, f"more{i}", 14, priority=priority)
        assert step(scheduler)[0].num_tokens == num_tokens
        assert second.num_computed == num_tokens - 12


class AdmitsFirst(Policy):
    """While `holds`, a prompt that has a slot is not computed yet."""

    holds = True

    def chunk(self, num_needed, state):
        is_started = state.num_running > state.num_running_before or not state.num_left
        return 0 if self.holds and is_started else super().chunk(num_needed, state)


def holding(**settings):
    scheduler, _ = make(**settings)
    scheduler.policy = AdmitsFirst()
    return scheduler


def test_a_slot_taken_in_a_step_that_computes_nothing_is_in_the_next_plan():
    scheduler = holding()
    (request,) = add(scheduler, "a", 6)
    assert scheduler.plan() is None
    scheduler.table.check_integrity()
    scheduler.policy.holds = False
    plan, _ = step(scheduler)
    assert [(new.row, new.token_ids) for new in plan.new_rows] == [
        (request.row, request.tokens[:6])
    ]
    assert not step(scheduler)[0].new_rows


def test_what_was_not_sent_is_forgotten_with_its_request():
    scheduler = holding()
    (gone,) = add(scheduler, "gone", 6)
    assert scheduler.plan() is None
    scheduler.table.abort(gone, "test")
    scheduler.policy.holds = False
    add(scheduler, "next", 3)
    plan, _ = step(scheduler)
    assert [len(new.token_ids) for new in plan.new_rows] == [3]


def test_a_page_copy_planned_in_a_step_that_computes_nothing_is_in_the_next_plan():
    scheduler = holding(page_size=4)
    first, second, _third = add(scheduler, "r", 10, n=3, max_tokens=2)
    scheduler.policy.holds = False
    step(scheduler)
    shared = scheduler.kv.tables(first.seq)[0][2]
    # the other samples cannot start yet
    scheduler.table.free_rows, kept = [], scheduler.table.free_rows
    ahead = scheduler.plan()
    scheduler.table.free_rows = kept
    scheduler.policy.holds = True
    # the first one's last token is under way, the second one has its slot
    assert scheduler.plan() is None
    assert second.row >= 0
    scheduler.commit(ahead, {first.row: [1]})
    scheduler.policy.holds = False
    plan, _ = step(scheduler)
    assert plan.page_copies == [(shared, plan.new_rows[0].page_ids[0][2])]
    assert [new.row for new in plan.new_rows] == [item.row for item in plan.items]


def test_a_row_that_is_new_in_a_plan_has_its_pages_there_and_nowhere_else():
    scheduler, _ = make(page_size=4)
    add(scheduler, "r", 10, n=3, max_tokens=4)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.page_copies
    assert len(plan.new_rows) == 2
    assert not {new.row for new in plan.new_rows} & {update.row for update in plan.page_updates}
    for new in plan.new_rows:
        assert new.page_ids == scheduler.kv.tables(
            next(r.seq for r in scheduler.running if r.row == new.row)
        )


def test_drafts_leave_draws_to_requests_that_start_in_the_same_step():
    scheduler, _ = make(rows=8, budget=256, max_draws=16)
    for i in range(2):
        add(scheduler, f"old{i}", [1, 2, 3, 4 + i], max_tokens=100)
    step(scheduler)
    for request in scheduler.running:
        request.guess([7] * 8)
    for i in range(6):
        add(scheduler, f"new{i}", [9, 9, 20 + i])
    plan = scheduler.plan()
    assert plan.drafts
    assert sum(item.num_draws for item in plan.items) <= 16


def test_pages_of_a_step_that_follows_drafts_are_cleared_if_they_are_given_up():
    """If the drafts were NaN, it may have written NaN as well, and nobody looks."""
    scheduler, _ = make()
    add(scheduler, "x", [1, 2, 3, 4], max_tokens=100)
    step(scheduler)
    scheduler.running[0].guess([0, 0])
    first = scheduler.plan()
    second = scheduler.plan()
    assert first.drafts
    assert not second.drafts
    scheduler.commit(first, {scheduler.running[0].row: [0, 0, 0]})  # right
    written = scheduler.kv.tables(scheduler.running[0].seq)[0][-1]
    scheduler.table.abort(scheduler.running[0], "left")
    add(scheduler, "y", [9])
    assert written in scheduler.plan().page_zeroes


def test_nobody_is_preempted_or_kept_waiting_for_a_guess():
    scheduler, buffer = make(num_pages=4, rows=4, budget=64, context=16)
    for i in range(2):
        add(scheduler, f"r{i}", [1 + i, 2, 3, 4])
    step(scheduler)
    scheduler.running[0].guess([5] * 5)
    for _ in range(3):
        step(scheduler)
    assert not [event for event in buffer.take() if isinstance(event, events.Preempted)]
    scheduler, _ = make(rows=8, budget=16, max_draws=16)
    for i in range(2):
        add(scheduler, f"old{i}", [1, 2, 3, 4 + i], max_tokens=100)
    step(scheduler)
    add(scheduler, "new", 20)
    for _ in range(5):
        for request in scheduler.running:
            request.guess([7] * 8)
        step(scheduler)
    assert all(request.num_computed >= request.num_prompt for request in scheduler.running)
    assert len(scheduler.running) == 3


def test_a_tenants_request_of_higher_priority_is_not_preempted_for_another_tenant():
    """It would be the first in the queue again, and start again: for ever."""
    scheduler, buffer = make(rows=2, budget=16)
    for i, (priority, tenant) in enumerate([(0, "a"), (0, "a"), (1, "b")]):
        params = SamplingParams(max_tokens=6, seed=0)
        scheduler.table.add(Submit(f"r{i}", [10 + i] * 5, params, priority=priority, tenant=tenant))
    while scheduler.has_work:
        step(scheduler)
    assert not [event for event in buffer.take() if isinstance(event, events.Preempted)]


def test_a_higher_priority_takes_what_kv_policies_keep_of_a_lower_one():
    scheduler, buffer = make(policy_bytes=100)
    kept = msgspec.structs.replace(
        settle(read_policy({"kind": "h2o", "budget": 8}), 4, 200, 256), beside_bytes=60
    )
    scheduler.table.add(
        Submit("low", [1, 2, 3, 4], SamplingParams(max_tokens=100, seed=0), priority=5), cache=kept
    )
    step(scheduler)
    scheduler.table.add(
        Submit("high", [1, 2, 3, 5], SamplingParams(max_tokens=3, seed=0)), cache=kept
    )
    step(scheduler)
    assert [event.request_id for event in buffer.take() if isinstance(event, events.Preempted)] == [
        "low"
    ]
    assert [request.request_id for request in scheduler.running] == ["high"]
