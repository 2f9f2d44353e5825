"""Random traffic over a pool with host memory, disk and another engine behind it. The runner here
really moves what pages hold, late and in another order than told where it may, and fails now and
then; what a request reads must be what was computed."""

import random

import pytest

from tests.sched.test_fuzz import EOS, SchedulerMachine, submit_some
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import NOWHERE, Moved, Tier, Tiers
from tidemill.runner.base import accept
from tidemill.sched.queue import ORDERS

KINDS = [
    (Tier.HOST, False),
    (Tier.HOST, True),
    (Tier.DISK, False),
    (Tier.DISK, True),
    (Tier.PEER, True),
    (Tier.EXPORT, False),
]


class TierMachine(SchedulerMachine):
    def __init__(self, chance, num_slots, num_records, records=None, num_exports=0, remote=None):
        """`remote`: what another engine has, by place: key and content."""
        super().__init__()
        self.num_exports, self.exported, self.remote = (
            num_exports,
            {},
            {} if remote is None else remote,
        )
        self.chance, self.num_slots, self.num_records = chance, num_slots, num_records
        # by slot: content; by record: key and content
        self.slots, self.records = {}, {} if records is None else records
        self.queued = {tier: [] for tier in Tier}
        self.done = []
        self.counts = dict.fromkeys(KINDS, 0)
        self.num_failed = 0

    def make_kv(self, *how):
        on_disk = [(key, record) for record, (key, _) in self.records.items()]
        self.tiers = Tiers(
            self.num_slots, self.num_records, on_disk, page_bytes=100, num_exports=self.num_exports
        )
        self.tiers.num_skipped = 2
        self.tiers.costs.computed(1, self.chance.choice([0.0, 1.0]))
        kv = KVManager(*how, self.tiers)
        kv.offload.learn([(place, key) for place, (key, _) in self.remote.items()])
        return kv

    def waits_for_moves(self):
        return bool(self.tiers._under_way)

    # ---- what a runner does

    def begin_moves(self, moves):
        for move in moves:
            self.queued[move.tier].append(move)

    def before_write(self, page):
        """Stores are made in order until this page's is."""
        for tier in (Tier.HOST, Tier.EXPORT):
            while any(move.source == page and not move.is_load for move in self.queued[tier]):
                self.move(tier)

    def move(self, tier):
        move, content = self.queued[tier].pop(0), None
        fails = tier is not Tier.HOST and self.chance.random() < 0.1
        if tier is Tier.PEER and self.remote.get(move.source, (b"", {}))[0] != move.key:
            fails = True  # it has other content by now, and so another checksum
        if fails:
            self.num_failed += 1
            if move.is_load:
                self.before_write(move.target)
                self.contents[move.target] = {0: "what a failed load left"}
            elif tier is Tier.DISK and move.source != NOWHERE:
                self.records.pop(move.target, None)
            elif tier is Tier.EXPORT:
                self.exported.pop(move.target, None)
        elif tier is Tier.EXPORT:
            self.exported.pop(move.target, None)
            if move.source != NOWHERE:
                self.exported[move.target] = move.key, dict(self.contents[move.source])
        elif move.is_load:
            self.before_write(move.target)
            where = {Tier.HOST: self.slots, Tier.DISK: self.records, Tier.PEER: self.remote}[tier]
            content = where[move.source] if tier is Tier.HOST else where[move.source][1]
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
        for tier in self.chance.sample(list(Tier), len(Tier)):
            num = len(self.queued[tier])
            for _ in range(num if all_of_them else self.chance.randrange(num + 1)):
                if self.queued[tier]:
                    self.move(tier)
        self.chance.shuffle(self.done)
        if self.done:
            self.scheduler.table.moved(self.done)
        self.done = []
        self.scheduler.table.check_integrity()

    def hear(self):
        """Of the other engine: it has computed the same, or has evicted something, with and without
        saying so, or it is gone."""
        kv, what = self.scheduler.kv, self.chance.random()
        if what < 0.5:
            for slot, (key, content) in self.exported.items():
                self.remote[100 + slot] = key, dict(content)
                kv.offload.learn([(100 + slot, key)])
        elif what < 0.6 and self.remote:
            self.remote[self.chance.choice(list(self.remote))] = (
                b"another content",
                {0: "of another key"},
            )
        elif what < 0.7 and self.remote:
            place = self.chance.choice(list(self.remote))
            kv.offload.learn(
                [(place, b"")], [self.remote.pop(place)[0]] if self.chance.random() < 0.5 else []
            )
        elif what < 0.75:
            kv.offload.learn([(place, b"") for place in self.remote])
            self.remote.clear()
        self.scheduler.table.check_integrity()

    def fail_step(self):
        """What is under way comes to its end; plans that were not committed are lost."""
        self.move_some(all_of_them=True)
        self.in_flight.clear()
        self.scheduler.table.drop_computed("fuzz")
        self.scheduler.table.check_integrity()

    def nan(self, which):
        running = [request for request in self.scheduler.running if not request.children]
        if running:
            request = running[which % len(running)]
            self.scheduler.table.discard(request, "fuzz")
            del self.live[request.seq]

    def teardown(self):
        while self.in_flight:
            self.commit()
        for _ in range(5000):
            for request in [request for request in self.live.values() if request.awaiting_choice]:
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
        self.scheduler.table.check_integrity()
        kv = self.scheduler.kv
        assert kv.num_free_pages == kv.num_pages - kv.held.num_pinned
        assert not self.tiers.is_busy
        assert not self.tiers._kept
        assert len(self.tiers.host) + len(self.tiers.host._free) == self.num_slots
        assert not kv.offload.exporting
        assert {key: slot for slot, (key, _) in self.exported.items()} == self.tiers.exports._at
        for key, record in self.tiers.disk._at.items():
            assert self.records[record][0] == key


# 179: a request computes what is on its way from another engine, and pins it.
@pytest.mark.parametrize(
    "seeds", [(*range(5), 179), pytest.param(range(700), marks=pytest.mark.slow)], ids=len
)
def test_pages_come_back_as_they_were(seeds):
    counts, num_failed, num_steps, num_runs = {}, 0, 0, len(seeds)
    for seed in seeds:
        chance, records, remote = random.Random(seed), {}, {}
        num_exports = [30, 0, 2][seed % 3]
        num_slots, num_records = chance.choice([0, 1, 3, 8, 40]), [60, 0, 4, 0][seed % 4]
        kinds = chance.choice(
            [[(1, 0)], [(1, 0)], [(1, 5)], [(1, 0), (1, 3)], [(1, 0), (2, 2)], [(2, 2), (2, 2)]]
        )
        page_size, policy = (
            chance.choice([1, 2, 4]),
            chance.choice(["continuous", "splitfuse", "prefill-first"]),
        )
        # the second time after a kill: only what is on disk, and in the other engine, is left
        for _ in range(2):
            machine = TierMachine(chance, num_slots, num_records, records, num_exports, remote)
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
                machine.step(
                    chance.choices(range(EOS + 1), k=5),
                    drafts,
                    chance.randrange(1, 4),
                    chance.randrange(2),
                )
                machine.move_some()
                machine.hear()
                machine.sound()
                num_steps += 1
            for kind, num in machine.counts.items():
                counts[kind] = counts.get(kind, 0) + num
            num_failed += machine.num_failed
        machine.teardown()
    assert num_steps == 32 * num_runs
    assert all(num >= num_runs // 2 for num in counts.values()), counts
    assert num_failed
