"""Random traffic over a pool with host memory and disk behind it. The runner here really moves what pages hold, late and in
another order than it was told where it may, and fails now and then; what a request reads must be what was computed."""

import random

import pytest

from tests.sched.test_fuzz import EOS, SchedulerMachine, submit_some
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import NOWHERE, Moved, Tier, Tiers
from tidemill.runner.base import accept
from tidemill.sched.queue import ORDERS


class TierMachine(SchedulerMachine):
    def __init__(self, chance, num_slots, num_records, records=None):
        super().__init__()
        self.chance, self.num_slots, self.num_records = chance, num_slots, num_records
        self.slots, self.records = {}, {} if records is None else records  # by slot: content; by record: key and content
        self.queued = {tier: [] for tier in Tier}
        self.done = []
        self.counts = {(tier, is_load): 0 for tier in Tier for is_load in (False, True)}
        self.num_failed = 0

    def make_kv(self, *how):
        on_disk = [(key, record) for record, (key, _) in self.records.items()]
        self.tiers = Tiers(self.num_slots, self.num_records, on_disk, page_bytes=100)
        self.tiers.num_skipped = 2
        self.tiers.costs.computed(1, self.chance.choice([0.0, 1.0]))
        return KVManager(*how, self.tiers)

    def waits_for_moves(self):
        return bool(self.tiers._under_way)

    # ---- what a runner does

    def begin_moves(self, moves):
        for move in moves:
            self.queued[move.tier].append(move)

    def before_write(self, page):
        """Stores are made in order until this page's is."""
        host = self.queued[Tier.HOST]
        while any(move.source == page and not move.is_load for move in host):
            self.move(Tier.HOST)

    def move(self, tier):
        move, content = self.queued[tier].pop(0), None
        fails = tier is Tier.DISK and self.chance.random() < 0.1
        if fails:
            self.num_failed += 1
            if move.is_load:
                self.before_write(move.target)
                self.contents[move.target] = {0: "what a failed load left"}
            elif move.source != NOWHERE:
                self.records.pop(move.target, None)
        elif move.is_load:
            self.before_write(move.target)
            content = self.slots[move.source] if tier is Tier.HOST else self.records[move.source][1]
            if tier is Tier.DISK:
                assert self.records[move.source][0] == move.key
            self.contents[move.target] = dict(content)
        elif move.source == NOWHERE:
            self.records.pop(move.target, None)
        elif tier is Tier.HOST:
            self.slots[move.target] = dict(self.contents[move.source])
        else:
            self.records[move.target] = move.key, self.slots[move.source]
        self.counts[tier, move.is_load] += not fails
        self.done.append(Moved(move.number, 100, 0.1, "it broke" if fails else ""))

    def move_some(self, all_of_them=False):
        for tier in self.chance.sample(list(Tier), 2):
            num = len(self.queued[tier])
            for _ in range(num if all_of_them else self.chance.randrange(num + 1)):
                if self.queued[tier]:
                    self.move(tier)
        self.chance.shuffle(self.done)
        if self.done:
            self.scheduler.moved(self.done)
        self.done = []
        self.scheduler.check_integrity()

    def fail_step(self):
        """What is under way comes to its end; plans that were not committed are lost."""
        self.move_some(all_of_them=True)
        self.in_flight.clear()
        self.scheduler.drop_computed("fuzz")
        self.scheduler.check_integrity()

    def nan(self, which):
        running = [request for request in self.scheduler.running if not request.children]
        if running:
            request = running[which % len(running)]
            self.scheduler.discard(request, "fuzz")
            del self.live[request.seq]

    def teardown(self):
        while self.in_flight:
            self.commit()
        for _ in range(5000):
            for request in [request for request in self.live.values() if request.is_held]:
                self.go_on(request, 1)
            plan = self.scheduler.plan()
            if plan is not None and plan.items:
                self.check_plan(plan)
                drawn = self.draw(plan, [1] * 5)
                self.write(plan, drawn)
                self.in_flight.append((plan, accept(plan.items, plan.drafts, drawn)))
                self.commit()
            elif plan is not None:
                self.change_pages(plan)
            elif not self.waits_for_moves():
                break
            self.move_some(all_of_them=plan is None)
        assert not self.scheduler.has_work, "a request starved"
        self.scheduler.check_integrity()
        kv = self.scheduler.kv
        assert kv.num_free_pages == kv.num_pages - kv.held.num_pinned
        assert not self.tiers.is_busy
        assert not self.tiers._kept
        assert len(self.tiers.host) + len(self.tiers.host._free) == self.num_slots
        for key, record in self.tiers.disk._at.items():
            assert self.records[record][0] == key


@pytest.mark.parametrize("num_runs", [5, pytest.param(700, marks=pytest.mark.slow)])
def test_pages_come_back_as_they_were(num_runs):
    counts, num_failed, num_steps = {}, 0, 0
    for seed in range(num_runs):
        chance, records = random.Random(seed), {}
        num_slots, num_records = chance.choice([1, 3, 8, 40]), chance.choice([0, 0, 4, 60])
        kinds = chance.choice([[(1, 0)], [(1, 0)], [(1, 5)], [(1, 0), (1, 3)], [(1, 0), (2, 2)], [(2, 2), (2, 2)]])
        page_size, policy = chance.choice([1, 2, 4]), chance.choice(["continuous", "splitfuse", "prefill-first"])
        for _ in range(2):  # the second time after a kill: only what is on disk is left
            machine = TierMachine(chance, num_slots, num_records, records)
            machine.start(policy, page_size, 4, 48, True, "hash", chance.choice(ORDERS), 1.0, kinds)
            for _ in range(16):
                submit_some(machine, chance)
                if chance.random() < 0.2:
                    machine.abort(chance.randrange(12))
                if chance.random() < 0.2:
                    machine.preempt(chance.randrange(4))
                if chance.random() < 0.05:
                    machine.nan(chance.randrange(4))
                if chance.random() < 0.05:
                    machine.fail_step()
                drafts = chance.choices(range(2), k=chance.randrange(6))
                machine.step(chance.choices(range(EOS + 1), k=5), drafts, chance.randrange(1, 4), chance.randrange(2))
                machine.move_some()
                machine.sound()
                num_steps += 1
            for kind, num in machine.counts.items():
                counts[kind] = counts.get(kind, 0) + num
            num_failed += machine.num_failed
        machine.teardown()
    assert num_steps == 32 * num_runs
    assert all(num > num_runs // 2 for num in counts.values()), counts
    assert num_failed
