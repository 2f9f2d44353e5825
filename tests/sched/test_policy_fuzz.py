"""Random requests with and without KV policies, preempted and aborted: each finds what it must see,
in a model of the cache."""

import random

import pytest

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.kv.tiers import Moved, Tiers
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import make_policy
from tidemill.sched.scheduler import Scheduler
from tidemill.types.events import EventBuffer
from tidemill.types.kv_policy import KVPolicy, settle
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

CONTEXT, STREAM = 40, 100


class Cache:
    """What a runner would have in its pages: by page and offset, all tokens up to the one whose
    keys and values are there."""

    def __init__(self, scheduler):
        self.scheduler, self.kv, self.size = scheduler, scheduler.kv, scheduler.kv.page_size
        self.content, self.slots, self.policies = {}, {}, {}
        # content by slot of host memory; moves made and not reported yet
        self.host, self.moved = {}, []

    def move(self, plan, is_load):
        """At once, whenever it is reported."""
        for move in plan.page_moves:
            if move.is_load is not is_load:
                continue
            if is_load:
                for offset, value in self.host[move.source].items():
                    self.content[move.target, offset] = value
            else:
                self.host[move.target] = {
                    offset: self.content.get((move.source, offset)) for offset in range(self.size)
                }
            self.moved.append(Moved(move.number, 100, 0.1))

    def run(self, plan):
        self.move(plan, is_load=False)
        for new in plan.new_rows:
            self.slots[new.row], self.policies[new.row] = None, new.spec.cache
        read = [
            {offset: self.content.get((source, offset)) for offset in range(self.size)}
            for source, _ in plan.page_copies
        ]
        for (_, target), held in zip(plan.page_copies, read, strict=True):
            self.content |= {(target, offset): value for offset, value in held.items()}
        self.move(plan, is_load=True)
        plain = [item for item in plan.items if self.policies[item.row] is None]
        for item in plain:
            for position in range(item.start, item.start + item.count):
                self.put(item, position, self.value(item, position))
        for item in plan.items:
            if item not in plain:
                self.run_policy(item)
        for item in plain:  # nobody else has changed it
            for position in range(item.start + item.count):
                assert self.get(item, position) == self.value(item, position)

    def value(self, item, position):
        return tuple(self.scheduler.requests[item.seq].tokens[: position + 1])

    def table(self, item):
        return self.kv.tables(item.seq)[0]

    def get(self, item, slot):
        return self.content.get((self.table(item)[slot // self.size], slot % self.size))

    def put(self, item, slot, value):
        page = self.table(item)[slot // self.size]
        assert page
        policy = self.policies[item.row]
        # before, others may share it in the same step
        if policy is not None and item.start + item.count > policy.num_plain:
            assert self.kv.pool.references(page) == 1
        self.content[page, slot % self.size] = value

    def run_policy(self, item):
        policy = self.policies[item.row]
        if self.slots[item.row] is None:  # it starts, from what is the same without its policy
            assert item.start <= min(policy.num_plain, policy.num_reusable)
            self.slots[item.row] = [self.value(item, position) for position in range(item.start)]
        slots = self.slots[item.row]
        for position in range(item.start, item.start + item.count):
            assert policy.slot(position) == len(slots)
            assert [self.get(item, slot) for slot in range(len(slots))] == slots
            slots.append(
                self.value(item, position)
                if position < policy.num_plain
                else (item.seq, item.epoch, position)
            )
            self.put(item, len(slots) - 1, slots[-1])
            if policy.next_eviction(position) == position + 1:
                del slots[policy.kept - policy.recent : len(slots) - policy.recent]
                assert len(slots) == policy.kept
                for slot, value in enumerate(slots):
                    assert self.table(item)[slot // self.size] not in self.kv.index, (
                        "what is moved can be found"
                    )
                    self.put(item, slot, value)
        most = policy.most_slots(
            max(item.start + item.count, self.scheduler.requests[item.seq].num_known)
        )
        assert self.kv.num_pages_of(item.seq) <= -(-most // self.size)


def policy_of(rng):
    kind = rng.choice(["full", "window", "streaming", "h2o", "snapkv", "quest"])
    given = {
        "full": {},
        "window": {"recent": rng.randint(1, 30)},
        "streaming": {"sinks": rng.randint(0, 5), "recent": rng.randint(1, 20)},
        "h2o": {"budget": rng.choice([0.2, 0.5, 12])},
        "snapkv": {"budget": rng.choice([0.3, 9]), "observed": rng.randint(1, 8)},
        "quest": {"budget": 0.3},
    }[kind]
    return KVPolicy(kind, **given)


@pytest.mark.parametrize(
    ("index", "num_slots"), [*((index, 0) for index in INDEXES), ("hash", 8), ("hash", 30)]
)
@pytest.mark.parametrize("num_steps", [250, pytest.param(7000, marks=pytest.mark.slow)])
def test_everyone_finds_what_it_sees(index, num_slots, num_steps):
    """`num_slots`: of host memory behind the pages."""
    rng, num_moves = random.Random(f"{index}{num_slots or ''}"), {True: 0, False: 0}
    for page_size, num_pages in ((1, 90), (4, 21), (4, 60)):
        tiers = Tiers(num_slots, page_bytes=100) if num_slots else None
        if tiers is not None:
            tiers.costs.computed(1, 1.0)  # so that to load is faster
        scheduler = Scheduler(
            KVManager(num_pages + 1, page_size, True, index=index, tiers=tiers),
            num_rows=4, token_budget=16, max_context=CONTEXT, policy=make_policy("continuous"), clock=VirtualClock(),
            emit=EventBuffer(),
        )  # fmt: skip
        cache, live, num_evicting = Cache(scheduler), {}, 0
        for number in range(num_steps):
            if len(live) < 6 and rng.random() < 0.4:
                policy = policy_of(rng)
                context = STREAM if policy.kind in ("window", "streaming") else CONTEXT
                prompt = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, context - 1))]
                room = context - len(prompt)
                params = SamplingParams(
                    max_tokens=rng.randint(1, room), n=rng.choice([1, 1, 2]), seed=1
                )
                made = settle(policy, len(prompt), params.max_tokens, CONTEXT)
                num_evicting += made is not None
                for request in scheduler.table.add(
                    Submit(f"r{number}", prompt, params), cache=made, max_context=context
                ):
                    live[request.seq] = request
            if live and rng.random() < 0.02:
                scheduler.table.abort(live.pop(rng.choice(list(live))), "fuzz")
            if scheduler.running and rng.random() < 0.03:
                scheduler.table.preempt(rng.choice(scheduler.running), "fuzz")
            if cache.moved and rng.random() < 0.5:
                rng.shuffle(cache.moved)
                scheduler.table.moved(cache.moved)
                cache.moved = []
            plan = scheduler.plan()
            if plan is None:
                continue
            for move in plan.page_moves:
                num_moves[move.is_load] += 1
            cache.run(plan)
            sampled = {item.row: [rng.choice([1, 2])] for item in plan.items if item.samples}
            for done in scheduler.commit(plan, sampled):
                if done.finish_reason:
                    del live[done.request.seq]
            scheduler.table.check_integrity()
        assert num_evicting > num_steps // 30
    assert all(num > 10 for num in num_moves.values()) == bool(num_slots), num_moves
