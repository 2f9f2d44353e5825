"""Rows of embeddings are there when their tokens are computed, whoever comes, goes and is
preempted, within a bounded room."""

import random
from collections import Counter, deque

import pytest

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import make_policy
from tidemill.sched.scheduler import Scheduler
from tidemill.types.events import EventBuffer
from tidemill.types.inputs import EMBEDDINGS, PICTURE, Segment, key_of
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

BUDGET, ROWS, PAGE = 16, 4, 4
CONTENTS = {key_of(bytes([number])): bytes([number]) for number in range(6)}
KEYS = list(CONTENTS)


def make(input_rows=2 * BUDGET, num_pages=80, index="hash", rows=ROWS):
    kv = KVManager(1 + num_pages, PAGE, index=index)
    how = {"clock": VirtualClock(), "emit": EventBuffer(), "policy": make_policy("continuous")}
    return Scheduler(
        kv, num_rows=rows, token_budget=BUDGET, max_context=64, input_rows=input_rows, **how
    )


class Rows:
    """What the runner has: rows of embeddings, and which token has which."""

    def __init__(self):
        self.rows, self.inputs, self.num_encoded = {}, {}, 0

    def run(self, plan, scheduler):
        for new in (*plan.new_rows, *plan.row_copies):
            self.inputs[new.row if hasattr(new, "row") else new.target] = {}
        for each in plan.encodes:
            self.num_encoded += 1
            self.rows |= {row: (each.content, at) for at, row in enumerate(each.rows)}
        for each in plan.row_inputs:
            self.inputs[each.row] |= {each.start + at: row for at, row in enumerate(each.rows)}
        assert len(plan.encodes) <= 1 or sum(len(each.rows) for each in plan.encodes) <= BUDGET
        for item in plan.items:
            for segment in scheduler.requests[item.seq].spec.segments:
                for at in range(
                    max(item.start, segment.start), min(item.start + item.count, segment.end)
                ):
                    row = self.inputs[item.row][at]
                    assert self.rows[row] == (CONTENTS[segment.key], at - segment.start)
                if segment.is_whole:
                    assert not segment.start < item.start < segment.end
                    assert not segment.start < item.start + item.count < segment.end
        return {item.row: [1] for item in plan.items if item.samples}


def some_prompt(chance):
    prompt, segments = [5] * chance.randrange(1, 12), []
    for _ in range(chance.randrange(4)):
        which = chance.randrange(len(KEYS))
        kind = EMBEDDINGS if which % 2 else PICTURE
        segments.append(Segment(len(prompt), which + 3, kind, KEYS[which]))
        prompt += [0] * (which + 3) + [6] * chance.randrange(1, 5)
    return prompt, segments


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("input_rows", [10, 32])
def test_every_token_has_its_row_when_it_is_computed(index, input_rows):
    chance, counts = random.Random(input_rows), Counter()
    scheduler, runner, in_flight = make(input_rows, 40, index), Rows(), deque()
    while counts["requests"] < 150 or scheduler.has_work:
        if counts["requests"] < 150 and len(scheduler.requests) < 8 and chance.random() < 0.5:
            counts["requests"] += 1
            (prompt, segments), n = some_prompt(chance), chance.choice([1, 1, 2])
            params = SamplingParams(max_tokens=chance.randrange(1, 6), n=n, seed=0)
            scheduler.table.add(Submit("r", prompt, params, segments=segments, contents=CONTENTS))
        if scheduler.requests and chance.random() < 0.05:
            scheduler.table.abort(chance.choice(list(scheduler.requests.values())), "test")
        if scheduler.running and chance.random() < 0.1:
            scheduler.table.preempt(chance.choice(scheduler.running), "test")
        if chance.random() < 0.02:
            in_flight.clear()
            scheduler.table.drop_computed("test")
            runner.rows.clear()
        plan = scheduler.plan()
        if plan is not None and not plan.is_empty:
            in_flight.append((plan, runner.run(plan, scheduler)))
        counts["steps"] += 1
        assert counts["steps"] < 20_000, "nothing goes on"
        if in_flight and (plan is None or len(in_flight) > 1):
            scheduler.commit(*in_flight.popleft())
        scheduler.table.check_integrity()
    assert runner.num_encoded > 50


def test_a_picture_is_kept_for_the_next_request_until_room_is_needed():
    scheduler, runner = make(input_rows=16, rows=1), Rows()
    scheduler.kv.prefix_caching = False

    def compute(which):
        segments = [Segment(1, 8, PICTURE, KEYS[which])]
        params = SamplingParams(max_tokens=1, seed=0)
        scheduler.table.add(
            Submit("r", [5, *[0] * 8, 6], params, segments=segments, contents=CONTENTS)
        )
        while scheduler.has_work:
            plan = scheduler.plan()
            scheduler.commit(plan, runner.run(plan, scheduler))

    # room for two: the least recently used goes
    for which, num in ((0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        compute(which)
        assert runner.num_encoded == num


def test_what_a_running_request_needs_is_not_written_over():
    """Two prompts of which each needs most of the room: the second waits, and other tokens do not."""
    scheduler, runner = make(input_rows=12), Rows()
    for name, which in (("a", 0), ("b", 1)):
        segments = [Segment(10, 10, EMBEDDINGS, KEYS[which])]
        prompt = [5] * 10 + [0] * 10 + [6] * 30
        scheduler.table.add(
            Submit(
                name,
                prompt,
                SamplingParams(max_tokens=2, seed=0),
                segments=segments,
                contents=CONTENTS,
            )
        )
    plan = scheduler.plan()
    assert [(item.count, len(plan.encodes)) for item in plan.items] == [(16, 1)]
    scheduler.commit(plan, runner.run(plan, scheduler))
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan, scheduler))
    assert runner.num_encoded == 2
