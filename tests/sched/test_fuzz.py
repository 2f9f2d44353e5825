"""Random submit, abort, finish and preempt steps: nothing leaks, nothing is lost, everything ends."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill.cache_layout import Group
from tidemill.events import EventBuffer
from tidemill.kv.manager import KVManager
from tidemill.runner.base import accept
from tidemill.sampling import SamplingParams
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import POLICIES, make_policy
from tidemill.sched.request import BACKGROUND
from tidemill.sched.scheduler import Scheduler

EOS = 7


class SchedulerMachine(RuleBasedStateMachine):
    steps_taken = 0

    def __init__(self):
        super().__init__()
        self.scheduler = None
        self.live = {}
        self.tables = {}  # by row: pages as a runner knows them, from the plans alone

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        page_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 5),
        caching=st.booleans(),
        background_tokens=st.sampled_from([0.125, 1.0, 3.0]),
        kinds=st.sampled_from([[(1, 0)], [(1, 0)], [(1, 5)], [(1, 0), (1, 3), (1, 9)], [(1, 0), (2, 2)], [(2, 2), (2, 2)]]),
    )
    def start(self, policy, page_size, rows, caching, background_tokens, kinds):
        groups, budget = [Group(page_size * factor, window, is_state=factor > 1) for factor, window in kinds], max(rows, 6)
        num_pages = sum(group.most_pages(24, budget) for group in groups)
        self.scheduler = Scheduler(
            KVManager(num_pages + 1, page_size, caching, groups, budget),
            num_rows=rows,
            token_budget=budget,
            max_context=24,
            policy=make_policy(policy),
            clock=(clock := VirtualClock()),
            emit=EventBuffer(),
            background_tokens=background_tokens,
            background_budget=3,
        )
        self.clock = clock

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([-(2**31), 0, 1, 2, BACKGROUND, BACKGROUND + 1]),
        salt=st.sampled_from(["", "x"]),
        tenant=st.sampled_from(["", "a", "b"]),
    )
    def submit(self, prompt, max_tokens, n, priority, salt, tenant):
        if len(self.live) < 12:
            params = SamplingParams(max_tokens=max_tokens, n=n, seed=1)
            ends = frozenset({EOS})
            for request in self.scheduler.add(
                "r", prompt, params, priority=priority, salt=salt, tenant=tenant, eos_token_ids=ends
            ):
                self.live[request.seq] = request

    @rule(seconds=st.sampled_from([0.01, 1.0, 7.0, 11.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(which=st.integers(0, 11))
    def abort(self, which):
        if self.live:
            request = list(self.live.values())[which % len(self.live)]
            self.scheduler.abort(request, "fuzz")
            del self.live[request.seq]

    @rule(which=st.integers(0, 4))
    def preempt(self, which):
        if self.scheduler.running:
            self.scheduler._preempt(self.scheduler.running[which % len(self.scheduler.running)], "fuzz")

    @rule(
        tokens=st.lists(st.integers(0, EOS), min_size=5, max_size=5),
        drafts=st.lists(st.integers(0, 1), max_size=5),
        times=st.integers(1, 8),
    )
    def step(self, tokens, drafts, times):
        for _ in range(times):
            for request in self.scheduler.running:
                request.drafts = drafts[: (request.row + len(request.tokens)) % 6] if self.scheduler.kv.can_fork else ()
            plan = self.scheduler.plan()
            if plan is None:
                assert not self.scheduler.has_work, "work is left but nothing was planned"
                return
            assert len({item.row for item in plan.items}) == len(plan.items)
            self.check_plan(plan)
            done = self.scheduler.commit(plan, accept(plan.items, plan.drafts, self.draw(plan, tokens)))
            for progress in done:
                if progress.finish_reason:
                    del self.live[progress.request.seq]
            self.scheduler.check_integrity()

    def draw(self, plan, tokens):
        """A row's drafts are right now and then."""
        return [
            plan.drafts[item.row][i] if i < item.num_drafts and (item.start + i) % 3 else tokens[item.row]
            for item in plan.items
            for i in range(item.num_draws)
        ]

    def check_plan(self, plan):
        """What a runner relies on: no page is written that another sequence holds, copies never chain, and the plans so far say
        which pages a row has."""
        assert not {new.row for new in plan.new_rows} & {update.row for update in plan.page_updates}
        assert len({new.row for new in plan.new_rows}) == len(plan.new_rows)
        for new in plan.new_rows:
            self.tables[new.row] = [dict(enumerate(page_ids)) for page_ids in new.page_ids]
        places = [(one.row, one.group, one.first_index + i) for one in plan.page_updates for i in range(len(one.page_ids))]
        assert len(places) == len(set(places)), "a device writes them in no order"
        for update in plan.page_updates:
            self.tables[update.row][update.group] |= dict(enumerate(update.page_ids, update.first_index))
        kv, by_seq = self.scheduler.kv, {r.seq: r for r in self.scheduler.running}
        written = []
        for item in plan.items:
            assert item.row == by_seq[item.seq].row
            for group, table, known in zip(kv.groups, kv.tables(item.seq), self.tables[item.row], strict=True):
                assert dict(enumerate(table)) == {i: page for i, page in known.items() if i < len(table) or page}
                first, end = item.start // group.page_size, group.num_pages_for(item.start + item.count)
                assert all(table[group.first_needed(item.start) : end]), "a page that is read was given back"
                written += table[first:end]
        assert len(written) == len(set(written)), "two sequences write one page"
        assert all(kv._pool.references(page) >= 1 for page in written)
        targets = [target for _, target in plan.page_copies]
        assert len(targets) == len(set(targets))
        for i, target in enumerate(targets):  # all sources are read before any target is written
            assert target not in {source for source, _ in plan.page_copies[i:]}

    @invariant()
    def sound(self):
        if self.scheduler:
            SchedulerMachine.steps_taken += 1
            self.scheduler.check_integrity()
            assert set(self.live) == set(self.scheduler._requests)

    def teardown(self):
        if not self.scheduler:
            return
        for _ in range(5000):
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.scheduler.commit(plan, {item.row: [1] for item in plan.items if item.samples})
        assert not self.scheduler.has_work, "a request starved"
        self.scheduler.check_integrity()
        assert self.scheduler.kv.num_free_pages == self.scheduler.kv.num_pages


@pytest.mark.parametrize("num_sequences", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_thousands_of_random_steps(num_sequences):
    SchedulerMachine.steps_taken = 0
    machine = SchedulerMachine.TestCase()
    machine.settings = settings(
        max_examples=num_sequences,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    machine.runTest()
    assert SchedulerMachine.steps_taken >= 33 * num_sequences, SchedulerMachine.steps_taken
