"""Random submit, fork, abort, finish and preempt steps, also ahead of results: nothing leaks or is
lost, everything ends."""

import itertools
import random
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.runner.base import accept, draws
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import POLICIES, make_policy
from tidemill.sched.queue import ORDERS
from tidemill.sched.request import BACKGROUND
from tidemill.sched.scheduler import Scheduler
from tidemill.types.cache_layout import Group
from tidemill.types.events import EventBuffer, PageCopied, PagesEvicted, Preempted, PrefixHeld
from tidemill.types.sampling import Beams, SamplingParams
from tidemill.types.wire import Hold, Submit

EOS = 7


class SchedulerMachine(RuleBasedStateMachine):
    steps_taken = held_seen = 0

    def __init__(self):
        super().__init__()
        self.scheduler = None
        self.live = {}
        self.tables = {}  # by row: pages as a runner knows them, from the plans alone
        self.num_copies = 0
        # of pages: by place, the tokens up to the one whose keys and values were written there last
        self.contents = {}
        self.tokens = {}  # by row: tokens likewise
        self.in_flight = deque()  # plans whose results are not committed, and the results

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        page_size=st.sampled_from([1, 2, 4]),
        rows=st.sampled_from([1, 2, 3, 4, 5, 8]),
        least_budget=st.just(6),
        caching=st.booleans(),
        index=st.sampled_from(sorted(INDEXES)),
        order=st.sampled_from(ORDERS),
        background_tokens=st.sampled_from([0.125, 1.0, 3.0]),
        kinds=st.sampled_from(
            [
                [(1, 0)],
                [(1, 0)],
                [(1, 5)],
                [(1, 0), (1, 3), (1, 9)],
                [(1, 0), (2, 2)],
                [(4, 2), (4, 2)],
            ]
        ),
    )
    def start(
        self,
        policy,
        page_size,
        rows,
        least_budget,
        caching,
        index,
        order,
        background_tokens,
        kinds,
        evict=True,
    ):
        groups = [
            Group(page_size * factor, window, is_state=factor > 1) for factor, window in kinds
        ]
        budget = max(rows, least_budget)
        num_pages = sum(group.most_pages(24, budget) for group in groups)
        self.scheduler = Scheduler(
            self.make_kv(num_pages + 1, page_size, caching, groups, budget, index),
            num_rows=rows,
            token_budget=budget,
            max_context=24,
            policy=make_policy(policy, step_cost=8 * (rows % 2)),
            clock=(clock := VirtualClock()),
            emit=EventBuffer(),
            background_tokens=background_tokens,
            background_budget=3,
            order=order,
            evict=evict,
        )
        self.clock = clock

    def make_kv(self, *how):
        return KVManager(*how, tells_empty=True)

    def waits_for_moves(self):
        return False

    def begin_moves(self, moves):
        assert not moves

    def before_write(self, page):
        """A runner does not write to a page before it is stored."""

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([-(2**31), 0, 1, 2, BACKGROUND, BACKGROUND + 1]),
        salt=st.sampled_from(["", "x"]),
        tenant=st.sampled_from(["", "a", "b"]),
        is_beam=st.sampled_from([False, False, True]),
        hold=st.sampled_from([None, "a", "b", "c", "d"]),
    )
    def submit(self, prompt, max_tokens, n, priority, salt, tenant, is_beam=False, hold=None):
        if len(self.live) < 12:
            beams = Beams(2) if is_beam and n == 1 else None
            params = SamplingParams(max_tokens=max_tokens, n=n, seed=1, beams=beams)
            ranks = {"priority": priority, "salt": salt, "tenant": tenant, "eos_token_ids": [EOS]}
            prefix_leases = (
                [Hold(hold, max_tokens % 2 * len(prompt), max_tokens, is_pinned=hold < "c")]
                if hold
                else []
            )
            for request in self.scheduler.table.add(
                Submit("r", prompt, params, **ranks, prefix_leases=prefix_leases)
            ):
                self.live[request.seq] = request

    @rule(name=st.sampled_from("abcd"), seconds=st.sampled_from([0.0, 0.0, 5.0]))
    def renew(self, name, seconds):
        self.scheduler.retention.renew(name, seconds, "fuzz")

    @rule()
    def lose(self):
        """A step failed, and with it what was in flight."""
        self.in_flight.clear()
        self.scheduler.table.drop_computed("fuzz")

    @rule(seconds=st.sampled_from([0.01, 1.0, 7.0, 11.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(which=st.integers(0, 11))
    def abort(self, which):
        if self.live:
            request = list(self.live.values())[which % len(self.live)]
            self.scheduler.table.abort(request, "fuzz")
            del self.live[request.seq]

    @rule(which=st.integers(0, 11))
    def fork(self, which):
        """Of any request at any point: running, queued, preempted, held, in the middle of its
        prompt."""
        if self.live and len(self.live) < 12:
            sources = (
                self.scheduler.running
                if which % 2 and self.scheduler.running
                else list(self.live.values())
            )
            request = sources[which % len(sources)]
            child = self.scheduler.table.fork(request, "fork")
            assert child.tokens == request.tokens
            assert child.rank[:-1] == request.rank[:-1]
            self.live[child.seq] = child

    @rule(which=st.integers(0, 11), token=st.integers(0, 2))
    def choose(self, which, token):
        held = [request for request in self.live.values() if request.awaiting_choice]
        if held:
            self.go_on(held[which % len(held)], token)

    def go_on(self, request, token):
        self.scheduler.table.choose(request, token)
        if request.num_output >= request.max_tokens:
            self.scheduler.table.finish(request, "length")
            del self.live[request.seq]

    @rule(which=st.integers(0, 11))
    def drop(self, which):
        if self.live:
            request = list(self.live.values())[which % len(self.live)]
            self.scheduler.table.drop(request)
            del self.live[request.seq]

    @rule(which=st.integers(0, 4))
    def preempt(self, which):
        if self.scheduler.running:
            self.scheduler.table.preempt(
                self.scheduler.running[which % len(self.scheduler.running)], "fuzz"
            )

    @rule(
        tokens=st.lists(st.integers(0, EOS), min_size=5, max_size=5),
        drafts=st.lists(st.integers(0, 1), max_size=5),
        times=st.integers(1, 8),
        steps_ahead=st.sampled_from([0, 1]),
    )
    def step(self, tokens, drafts, times, steps_ahead=0):
        for _ in range(times):
            for request in self.scheduler.running:
                num = (request.row + len(request.tokens)) % 6
                request.guess(
                    drafts[:num] if self.scheduler.kv.can_fork and not request.params.beams else ()
                )
            plan = self.scheduler.plan()
            if plan is None and not self.in_flight:
                held = all(request.awaiting_choice for request in self.live.values())
                assert held or self.waits_for_moves(), "work is left but nothing was planned"
                return
            if plan is not None and not plan.items:
                self.change_pages(plan)
            elif plan is not None:
                assert len({item.row for item in plan.items}) == len(plan.items)
                self.check_plan(plan)
                drawn = self.draw(plan, tokens)
                self.write(plan, drawn)
                self.in_flight.append((plan, accept(plan.items, plan.drafts, drawn)))
            while self.in_flight and (plan is None or len(self.in_flight) > steps_ahead):
                self.commit()
            self.scheduler.table.check_integrity()

    def commit(self):
        for progress in self.scheduler.commit(*self.in_flight.popleft()):
            if progress.finish_reason:
                del self.live[progress.request.seq]

    def draw(self, plan, tokens):
        """A row's drafts are right now and then."""
        return [
            plan.drafts[item.row][i]
            if i < item.num_drafts and (item.start + i) % 3
            else tokens[item.row % 5]
            for item in plan.items
            for i in range(item.num_draws)
        ]

    def write(self, plan, drawn):
        """As a runner does: what is drawn goes into the rows."""
        rows, positions = draws(plan.items)
        for row, position, token in zip(rows, positions, drawn, strict=True):
            self.tokens[row][position:] = [token]

    def check_plan(self, plan):
        """What a runner relies on: no page is written that another sequence holds, copies never
        chain, and the plans so far say which pages a row has."""
        assert not {new.row for new in plan.new_rows} & {update.row for update in plan.page_updates}
        assert len({new.row for new in plan.new_rows}) == len(plan.new_rows)
        tables, known = dict(self.tables), dict(self.tokens)
        for copy in plan.row_copies:
            self.tables[copy.target] = [dict(table) for table in tables[copy.source]]
            self.tokens[copy.target] = known[copy.source][: copy.num_tokens]
        for new in plan.new_rows:
            self.tokens[new.row] = list(new.token_ids)
            self.tables[new.row] = [dict(enumerate(page_ids)) for page_ids in new.page_ids]
        places = [
            (one.row, one.group, one.first_index + i)
            for one in plan.page_updates
            for i in range(len(one.page_ids))
        ]
        assert len(places) == len(set(places)), "a device writes them in no order"
        for update in plan.page_updates:
            self.tables[update.row][update.group] |= dict(
                enumerate(update.page_ids, update.first_index)
            )
        for write in plan.token_writes:
            self.tokens[write.row][write.position] = write.token_id
        kv, by_seq = self.scheduler.kv, {r.seq: r for r in self.scheduler.running}
        written = []
        for item in plan.items:
            assert item.row == by_seq[item.seq].row
            assert not by_seq[item.seq].awaiting_choice
            for mine, theirs in zip(
                self.tokens[item.row][: item.start + item.count],
                by_seq[item.seq].tokens,
                strict=False,
            ):
                assert mine == theirs
            for group, table, known in zip(
                kv.groups, kv.tables(item.seq), self.tables[item.row], strict=True
            ):
                assert dict(enumerate(table)) == {
                    i: page for i, page in known.items() if i < len(table) or page
                }
                first, end = (
                    item.start // group.page_size,
                    group.num_pages_for(item.start + item.count),
                )
                assert all(table[group.first_needed(item.start) : end]), (
                    "a page that is read was given back"
                )
                written += table[first:end]
        assert len(written) == len(set(written)), "two sequences write one page"
        assert all(kv.pool.references(page) >= 1 for page in written)
        assert set(plan.empty_pages).isdisjoint(written)
        self.change_pages(plan)
        for page in plan.empty_pages:
            self.contents.pop(page, None)
        self.compute(plan)

    def change_pages(self, plan):
        targets = [target for _, target in plan.page_copies]
        assert len(targets) == len(set(targets))
        stores, loads = (self.sent(plan, is_load) for is_load in (False, True))
        self.begin_moves(stores)
        # all, before any target is written
        read = [dict(self.contents.get(source, {})) for source, _ in plan.page_copies]
        self.num_copies += len(targets)
        for target, content in zip(targets, read, strict=True):
            self.write_page(target, content)
        self.begin_moves(loads)

    def sent(self, plan, is_load):
        return [move for move in plan.page_moves if move.is_load is is_load]

    def write_page(self, page, content):
        self.before_write(page)
        self.contents[page] = content

    def compute(self, plan):
        """What a runner does: all write their tokens' keys and values, which depend on all tokens
        up to there; then each finds those that it sees. States are read before any is written."""
        for item in plan.items:
            for group, table in self.state_tables(item) if item.start else ():
                assert self.contents[table[(item.start - 1) // group.page_size]] == {
                    0: tuple(self.tokens[item.row][: item.start])
                }
        for item in plan.items:
            for group, table in self.state_tables(item):
                end = item.start + item.count
                for i in range(item.start // group.page_size, group.num_pages_for(end)):
                    self.before_write(table[i])
                    self.contents[table[i]] = {
                        0: tuple(self.tokens[item.row][: min(end, (i + 1) * group.page_size)])
                    }
            for page, place, expected in self.places(item, plan.drafts, False):
                self.before_write(page)
                self.contents.setdefault(page, {})[place] = expected
        for item in plan.items:
            for page, place, expected in (
                self.places(item, plan.drafts, True) if not self.follows_wrong_drafts(item) else ()
            ):
                assert self.contents[page][place] == expected

    def follows_wrong_drafts(self, item):
        """Of a step in flight: what is computed counts for nothing."""
        before = [
            (one, drawn)
            for plan, drawn in self.in_flight
            for one in plan.items
            if one.seq == item.seq
        ]
        return any(
            one.epoch == item.epoch and len(drawn.get(one.row, ())) < one.num_draws
            for one, drawn in before
        )

    def state_tables(self, item):
        kv = self.scheduler.kv
        return [
            (group, table)
            for group, table in zip(kv.groups, kv.tables(item.seq), strict=True)
            if group.is_state
        ]

    def places(self, item, drafts, with_seen):
        tokens = [
            *self.tokens[item.row][: item.start + item.count - item.num_drafts],
            *drafts.get(item.row, ()),
        ]
        for group, table in zip(
            self.scheduler.kv.groups, self.scheduler.kv.tables(item.seq), strict=True
        ):
            first = (
                (max(0, item.start - group.window + 1) if group.window else 0)
                if with_seen
                else item.start
            )
            for i in range(first, 0 if group.is_state else item.start + item.count):
                yield table[i // group.page_size], i % group.page_size, tuple(tokens[: i + 1])

    @invariant()
    def sound(self):
        if self.scheduler:
            SchedulerMachine.steps_taken += 1
            self.scheduler.table.check_integrity()
            assert set(self.live) == set(self.scheduler.requests)

    def teardown(self):
        if not self.scheduler:
            return
        while self.in_flight:
            self.commit()
        for _ in range(5000):
            for request in [request for request in self.live.values() if request.awaiting_choice]:
                self.go_on(request, 1)
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.scheduler.commit(plan, {item.row: [1] for item in plan.items if item.samples})
        assert not self.scheduler.has_work, "a request starved"
        self.scheduler.table.check_integrity()
        assert (
            self.scheduler.kv.num_free_pages
            == self.scheduler.kv.num_pages - self.scheduler.kv.held.num_pinned
        )
        SchedulerMachine.held_seen += sum(
            isinstance(event, PrefixHeld) for event in self.scheduler._emit.take()
        )


@pytest.mark.parametrize("num_sequences", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_thousands_of_random_steps(num_sequences):
    """How many exactly is not Tidemill's: what Hypothesis draws depends on which other modules are
    imported."""
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
    assert SchedulerMachine.steps_taken >= 15 * num_sequences, SchedulerMachine.steps_taken


def submit_some(machine, chance):
    """Prompts that have much in common, so that many are admitted in a step with part of another's
    page."""
    for _ in range(chance.randrange(4)):
        common = ([0, 1, 2, 2] * 4)[: chance.choice([0, 3, 7, 11, 15])]
        prompt = common + chance.choices(range(3), k=chance.randrange(1, 5))
        ranks = {
            "priority": chance.choice([0, 0, 0, 1, BACKGROUND]),
            "tenant": chance.choice(["", "", "a"]),
        }
        max_tokens, n, salt = (
            chance.randrange(1, 5),
            chance.choice([1, 1, 1, 3]),
            chance.choice(["", "", "x"]),
        )
        hold = dict(enumerate("abcd")).get((3 * sum(prompt) + len(prompt)) % 10)
        machine.submit(prompt, max_tokens, n, salt=salt, hold=hold, **ranks)


@pytest.mark.parametrize("num_runs", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_prompts_with_common_beginnings(num_runs):
    num_copies = SchedulerMachine.held_seen = 0
    for seed in range(num_runs):
        chance, machine = random.Random(seed), SchedulerMachine()
        kinds = chance.choice([[(1, 0)], [(1, 0)], [(1, 5)], [(1, 0), (1, 3)], [(1, 0), (2, 2)]])
        page_size, index = chance.choice([2, 4, 8]), chance.choice(["radix", "radix", "hash"])
        order, policy = chance.choice(ORDERS), chance.choice(["continuous", "splitfuse"])
        machine.start(policy, page_size, 4, 48, True, index, order, 1.0, kinds)
        for _ in range(30):
            submit_some(machine, chance)
            if chance.random() < 0.2:
                machine.abort(chance.randrange(12))
            if chance.random() < 0.2:
                machine.preempt(chance.randrange(4))
            if chance.random() < 0.2:
                machine.wait(4.0)
            drafts = chance.choices(range(2), k=chance.randrange(6))
            machine.step(chance.choices(range(EOS + 1), k=5), drafts, chance.randrange(1, 4))
            machine.sound()
        num_copies += machine.num_copies
        machine.teardown()
    assert num_copies > 3 * num_runs
    assert SchedulerMachine.held_seen > num_runs


@pytest.mark.parametrize("num_runs", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_without_eviction_nothing_is_ever_preempted(num_runs):
    num_deferred = 0
    for seed in range(num_runs):
        chance, machine = random.Random(seed), SchedulerMachine()
        kinds = chance.choice([[(1, 0)], [(1, 0)], [(1, 5)], [(1, 0), (1, 3)], [(1, 0), (2, 2)]])
        page_size, index = chance.choice([2, 4, 8]), chance.choice(["radix", "radix", "hash"])
        machine.start(
            "continuous", page_size, 4, 48, True, index, "arrival", 1.0, kinds, evict=False
        )
        for _ in range(30):
            submit_some(machine, chance)
            if chance.random() < 0.1:
                machine.abort(chance.randrange(12))
            if chance.random() < 0.2:
                machine.renew(chance.choice("abcd"), chance.choice([0.0, 5.0]))
            drafts = chance.choices(range(2), k=chance.randrange(6))
            machine.step(
                chance.choices(range(EOS + 1), k=5),
                drafts,
                chance.randrange(1, 4),
                chance.randrange(2),
            )
            machine.sound()
        seen = machine.scheduler._emit.take()
        assert not [event for event in seen if isinstance(event, Preempted)]
        num_deferred += sum("to its end" in getattr(event, "reason", "") for event in seen)
        machine.teardown()
    assert num_deferred > num_runs


@pytest.mark.parametrize("num_requests", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("page_size", "num_pages", "index"), [(1, 160, "hash"), (16, 15, "radix")])
def test_no_page_of_one_pool_is_lost_over_thousands_of_requests(
    page_size, num_pages, index, num_requests
):
    """Thousands of them are aborted, many preempted, by force and for want of pages, some with
    samples that share pages."""
    chance, emit = random.Random(page_size), EventBuffer()
    group = Group(page_size, 0)
    kv = KVManager(1 + num_pages, page_size, True, [group], 48, index, tells_empty=True)
    scheduler = Scheduler(
        kv,
        num_rows=12,
        token_budget=48,
        max_context=64,
        policy=make_policy("continuous"),
        clock=VirtualClock(),
        emit=emit,
    )
    beginnings = [chance.choices(range(EOS), k=32) for _ in range(8)]
    live, in_flight, counts = dict[int, object](), deque(), Counter()
    for number in itertools.count():
        for _ in range(chance.randrange(5)):
            if counts["requests"] < num_requests and len(live) < 30:
                counts["requests"] += 1
                prompt = chance.choice(beginnings)[: chance.randrange(33)] + chance.choices(
                    range(EOS), k=chance.randrange(1, 8)
                )
                params = SamplingParams(
                    max_tokens=chance.randrange(1, 10), n=chance.choice([1] * 9 + [2]), seed=1
                )
                how = {"priority": chance.randrange(2), "eos_token_ids": [EOS]}
                live |= {
                    request.seq: request
                    for request in scheduler.table.add(Submit("r", prompt, params, **how))
                }
        if live and chance.random() < 0.7:
            counts["aborts"] += 1
            scheduler.table.abort(live.pop(chance.choice(list(live))), "fuzz")
        if scheduler.running and chance.random() < 0.2:
            counts["forced"] += 1
            scheduler.table.preempt(chance.choice(scheduler.running), "fuzz")
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(
                (
                    plan,
                    {item.row: [chance.randrange(EOS + 1)] for item in plan.items if item.samples},
                )
            )
        while in_flight and (plan is None or len(in_flight) > number % 2):
            for progress in scheduler.commit(*in_flight.popleft()):
                if progress.finish_reason:
                    del live[progress.request.seq]
        if number % 50 == 0:
            scheduler.table.check_integrity()
            counts.update(type(event) for event in emit.take())
        if counts["requests"] == num_requests and not live and not in_flight:
            break
    scheduler.table.check_integrity()
    assert not scheduler.has_work
    assert kv.num_free_pages == kv.num_pages, "pages are lost"
    kv.clear_prefixes()
    assert kv.num_free_pages == kv.num_pages
    assert not list(kv.cached_pages())
    assert counts["aborts"] > 0.3 * num_requests
    assert counts["forced"] > 0.05 * num_requests
    assert counts[Preempted] > counts["forced"] + 0.02 * num_requests
    assert counts[PagesEvicted] > 0.1 * num_requests
    assert counts[PageCopied] > 0.01 * num_requests
