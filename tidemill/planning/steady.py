"""Decoding sequences that are advanced together: a step costs what changes in it, not what goes on.

Most sequences of a step do what they did in the step before: one more token, in a page that they
have. `SteadyDecoding` looks at such a sequence only when it needs a page, ends, or is asked for.
Until then its tokens lag behind by a number of steps that is the same for all but for when each
joined:

    request          tokens and num_computed as of step `since`; both go on by one a step
    pages            always up to date: `_due` says at which step each sequence takes its next one, `_ends` when each ends
    prefix index     has its pages when it leaves, or before a queued request is looked up whose first page is known
    a plan           has no item of them, but always one of some sequence

While nothing but such sequences run, and at most one prompt that goes on by equal chunks, steps
differ in positions only: `most` says how many of them follow, `advance` makes them at once. That
goes on past the first token of a request and past the end of one: both are in the step in flight,
whose results come after the first of these steps is planned. Plans, pages and their order are as if
each sequence were looked at in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace, nsmallest
from typing import Any

from tidemill.planning.drafter import token_of
from tidemill.sched import preemption
from tidemill.sched.clock import Clock
from tidemill.sched.pages import Pages
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.policies import StepState
from tidemill.sched.queue import AGEING_S, Tenant
from tidemill.sched.request import Request
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.events import EventSink

_EARLY_S = 1e-6  # before a moment at which the queue's order changes: sums of times are not exact
_MAX_LOOKED_UP = 8  # queued requests whose first pages are


class _Member:
    """A sequence that is advanced with the others."""

    __slots__ = ("is_known", "offset", "pages", "rank", "request", "since")

    def __init__(self, request: Request, step: int, pages: list[int]) -> None:
        self.request, self.since, self.rank = request, step, request.rank
        self.pages = pages  # of the first group
        # the position that a step computes, less the step's number
        self.offset = request.num_computed - step
        self.is_known = False  # its first page is in the prefix index

    def __lt__(self, other: object) -> bool:
        """Heaps compare entries of one that left and has come back."""
        return False


class SteadyDecoding:
    """The sequences of a scheduler that only decode."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        emit: EventSink,
        *,
        steps_ahead: int,
        by_prefix: bool,
        evict: bool,
    ) -> None:
        """`steps_ahead`: as the runner's. `by_prefix`, `evict`: as the scheduler's."""
        self.scheduler, self._clock, self._emit, self._steps_ahead = (
            scheduler,
            clock,
            emit,
            steps_ahead,
        )
        self._by_prefix, self._evict = by_prefix, evict
        self._pages = Pages(scheduler.kv, clock, emit)  # what requests would need
        self.num_made = 0  # steps with such sequences so far: by these numbers all of this counts
        # requests that have got the tokens of these steps; for who reads it
        self.caught_up: list[tuple[str, int, int]] = []
        self.last_plan = StepPlan(-1)  # in flight, or committed
        self._num_in_last = 0  # sequences of that plan that have no item
        self._members: dict[int, _Member] = {}
        self._sum_of_offsets = 0
        self._longest = 0  # offset
        # a heap: a page is full (False), or taken (True)
        self._due: list[tuple[int, tuple[Any, ...], bool, _Member]] = []
        # a heap: when only the last token is to be drawn
        self._ends: list[tuple[int, int, _Member]] = []
        self._accounts: dict[Tenant, int] = {}  # and how many of them each has
        # of them, those whose first token the step in flight yields
        self._firsts: list[Request] = []
        kv = scheduler.kv
        windows = [group.window for group in kv.groups if group.window]
        # what is given back must be recorded by then
        large = 2 * max(group.page_size for group in kv.groups) + 2
        self._is_possible = (
            kv.offload.tiers is None and not kv.has_states and min(windows, default=large) >= large
        )
        self._is_simple = len(kv.groups) == 1 and not windows
        # what it computes enters the prefix index when it matters, not when it is computed
        self._records_late = self._is_simple
        self._records_now = not self._records_late
        # each plan has an item of every sequence, so that its event names them
        self.names_all = True

    # ---- what runs, as a runner sees it

    @property
    def num_steady(self) -> int:
        return len(self._members)

    @property
    def steady_context(self) -> tuple[int, int]:
        """The tokens that the steady requests of the last planned step see, in all, and the most
        that one of them does."""
        return self._sum_of_offsets + len(
            self._members
        ) * self.num_made, self._longest + self.num_made

    def steady_rows(self) -> list[int]:
        return [member.request.row for member in self._members.values()]

    # ---- joining and leaving

    def join(self) -> None:
        """After a step: what it planned and from now on only decodes."""
        last = self.last_plan
        if not last.items or not self._is_possible:
            return
        num, last.items = len(last.items), [item for item in last.items if not self._joins(item)]
        self._num_in_last += num - len(last.items)

    def _joins(self, item: StepItem) -> bool:
        request = self.scheduler.requests.get(item.seq)
        if request is None or request.epoch != item.epoch or (left := self._num_left(request)) <= 0:
            return False
        step = self.num_made
        member = self._members[request.seq] = _Member(
            request, step, self.scheduler.kv.tables(request.seq)[0]
        )
        member.is_known = len(request.tokens) - 1 > self.scheduler.kv.page_size
        self._sum_of_offsets += member.offset
        if member.offset > self._longest or len(self._members) == 1:
            self._longest = member.offset
        self._accounts[request.account] = self._accounts.get(request.account, 0) + 1
        heappush(self._ends, (step + left, request.seq, member))
        self._await_page(member, step + request.writable_end - request.num_computed)
        if request.first_token_s is None:
            self._firsts.append(request)
        return True

    def _num_left(self, request: Request) -> int:
        """Plans that it is part of until only its last token is to be drawn; 0: it is not steady."""
        num_known, is_first = len(request.tokens), request.first_token_s is None
        if (
            request.num_in_flight != self._steps_ahead
            or num_known + request.num_in_flight - request.num_computed != 1
            or request.in_background
            or request.waits_for_tokens
            or request.kv_policy is not None
            or request.drafts
            or (
                is_first
                and (
                    self.names_all
                    or not self._steps_ahead
                    or request.children
                    or request.prefix_leases
                )
            )
            or (request.writable_end < request.num_computed and not self._owns_page(request))
        ):
            return 0
        return request.max_tokens - num_known + request.num_prompt - 1

    def _owns_page(self, request: Request) -> bool:
        """Tells if no other sequence reads the page of the next token, for a prompt that was
        computed."""
        kv, position = self.scheduler.kv, request.num_computed
        if self._is_simple:
            pages, at = kv.tables(request.seq)[0], position // kv.page_size
            if at >= len(pages):
                request.writable_end = position
            elif kv.pool.references(pages[at]) == 1 and pages[at] not in kv.index:
                request.writable_end = (at + 1) * kv.page_size
        return request.writable_end >= position

    def _await_page(self, member: _Member, at: int) -> None:
        """The plan number `at` takes its next page. The one before is full of known tokens then, or
        a plan earlier where none is in flight."""
        if not self._steps_ahead and at > self.num_made:
            heappush(self._due, (at - 1, member.rank, False, member))
        heappush(self._due, (at, member.rank, True, member))

    def _catch_up(self, member: _Member, step: int) -> None:
        """Its request gets the tokens of the steps before this one."""
        request, num = member.request, step - member.since
        if num:
            request.num_computed += num
            request.tokens += [token_of(request.seq)] * num
            self.caught_up.append((request.request_id, member.since, step))
            member.since = step

    def catch_up(self) -> None:
        """All requests have the tokens of the steps so far."""
        for member in self._members.values():
            self._catch_up(member, self.num_made)

    def _record(self, member: _Member) -> None:
        """Records the member's tokens in the prefix index, as far as they were known when the last
        step was planned."""
        self._catch_up(member, self.num_made)
        tokens = member.request.tokens
        self.scheduler.kv.record(member.request.seq, tokens, len(tokens) - 1)

    def record(self) -> None:
        """The prefix index is to be used."""
        for member in self._members.values():
            self._record(member)

    def record_always(self) -> None:
        """From now on, what is computed is in the prefix index at once."""
        self._records_late = False
        self._records_now = True
        self.record()

    def _may_find(self) -> bool:
        """A queued request may be looked up whose prefix is that of a running one."""
        scheduler = self.scheduler
        waiting = scheduler.waiting.requests
        if not waiting or len(scheduler.running) == scheduler.num_rows:
            return False
        if self._by_prefix or len(waiting) > _MAX_LOOKED_UP:
            return True
        return any(
            scheduler.kv.index.knows_begin(self._pages.path(request))
            for request in waiting.values()
        )

    def settle(self, seqs: Iterable[int] | None = None) -> None:
        """These, or all, are looked at in each step again."""
        items, last = list[StepItem](), self.last_plan
        for seq in list(self._members if seqs is None else seqs):
            if (member := self._members.pop(seq, None)) is None:
                continue
            request, account = member.request, member.request.account
            self._record(member)
            if self._is_simple:
                request.writable_end = len(member.pages) * self.scheduler.kv.page_size
            member.since = -1  # of its entries in heaps: they are over
            self._sum_of_offsets -= member.offset
            self._accounts[account] -= 1
            if not self._accounts[account]:
                del self._accounts[account]
            if request.num_in_flight:
                items.append(
                    StepItem(seq, request.row, request.num_computed - 1, 1, True, request.epoch)
                )
            if self._firsts and request in self._firsts:
                self._firsts.remove(request)
            if member.offset == self._longest:
                self._longest = max([member.offset for member in self._members.values()], default=0)
        if not self._members:
            self._due.clear()
            self._ends.clear()
        self._num_in_last -= len(items)
        if items:
            last.items = (
                sorted(items + last.items, key=self._order)
                if len(items) + len(last.items) > 1
                else items
            )

    def _order(self, item: StepItem) -> tuple[Any, ...]:
        """The order of a plan: sequences that decode by their rank, then prompts."""
        request = self.scheduler.requests.get(item.seq)
        if request is None:
            return ()  # what is gone is not looked at
        is_prompt = item.count > 1 or request.first_token_s is None
        return (True,) if is_prompt else (False, *request.rank)

    def take_first_tokens(self) -> None:
        """The step in flight is committed."""
        now = self._clock.now()
        for request in self._firsts:
            request.first_token_s = now
            self._emit(events.FirstToken(now, request.request_id, now - request.arrival_s))
        self._firsts.clear()

    # ---- a step

    def plan(self) -> StepPlan | None:
        """The scheduler's next plan, without items of what goes on."""
        if self.names_all:
            self.settle()
        self._settle_ended()
        if self._members:
            self._records_now = not self._records_late or self._may_find()
            if self._records_now and self._records_late:
                self.record()
            if not self._can_stay():
                self.settle()
        plan = self._plan_beside() if self._members else self.scheduler.plan()
        self._records_now = not self._records_late
        if plan is not None and plan.items:
            self.last_plan, self._num_in_last = plan, len(self._members)
        return plan

    def _settle_ended(self) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self.num_made:
            _, seq, member = heappop(ends)
            if member.since >= 0:
                self.settle([seq])

    def _can_stay(self) -> bool:
        """In the next plan all of them get their token, and none of them can be preempted."""
        scheduler = self.scheduler
        kv, running, num_waiting = scheduler.kv, scheduler.running, len(scheduler.waiting.requests)
        num_others = len(running) - len(self._members)
        if (scheduler.policy.prefill_first and (num_others or num_waiting)) or len(
            running
        ) > scheduler.token_budget:
            return False
        if num_waiting and any(request.seq in self._members for request in self._that_may_yield()):
            return False
        if kv.has_windows and (num_others or num_waiting):
            num_others += scheduler.token_budget // kv.page_size + 1
        room = kv.num_free_pages // len(kv.groups) - num_others
        return room >= len(self._members) or room >= self._num_due()

    def _that_may_yield(self) -> list[Request]:
        """The running requests that the next queued one may preempt for itself."""
        scheduler = self.scheduler
        running, request = scheduler.running, scheduler.next_waiting() if self._evict else None
        if request is None:
            return []
        if (lower := preemption.lower(running, request)) or len(running) < scheduler.num_rows:
            return lower
        num_tenants = scheduler.waiting.num_tenants(request.in_background)
        return preemption.beyond_their_part(running, request, num_tenants, scheduler.num_rows)

    def _num_due(self) -> int:
        """That take a page in the next plan."""
        due, step = self._due, self.num_made
        if not due or due[0][0] > step:
            return 0
        return len(
            [1 for at, _, takes, member in due if at == step and takes and member.since >= 0]
        )

    def _plan_beside(self) -> StepPlan | None:
        """A plan in which all of them get their token, and the others what the scheduler gives
        them."""
        scheduler, members = self.scheduler, self._members
        plan, state = scheduler.begin_plan()
        state.num_left -= len(members)
        for account, num in self._accounts.items():
            account.num_served += num
        others = list[Request]()
        if len(scheduler.running) > len(members):
            others = [request for request in scheduler.running if request.seq not in members]
        prompts = [request for request in others if request.num_needed > 1]
        # in the order in which they would have been looked at
        while others and self._due and self._due[0][0] <= self.num_made:
            before = [request for request in others if request.rank < self._due[0][1]]
            scheduler.decode(before, plan, state)
            del others[: len(before)]
            self._turn_page()
        scheduler.decode(others, plan, state)
        self._turn_pages(self.num_made + 1)
        scheduler.prefill(prompts, plan, state)
        if not plan.items:
            self._leave_one(plan, state)
        self.num_made += 1
        return scheduler.end_plan(plan, state)

    def _leave_one(self, plan: StepPlan, state: StepState) -> None:
        """The last of them has an item: a plan without any would compute nothing."""
        request = next(
            request for request in reversed(self.scheduler.running) if request.seq in self._members
        )
        state.num_left += 1
        request.account.num_served -= 1
        self.settle([request.seq])
        self.scheduler.decode([request], plan, state)

    def _turn_pages(self, end: int) -> None:
        """Turns the pages of all plans before this one, in their order."""
        due = self._due
        if not self._is_simple:
            while due and due[0][0] < end:
                self._turn_page()
            return
        takers = list[list[int]]()
        size, is_ahead, records_now = (
            self.scheduler.kv.page_size,
            self._steps_ahead > 0,
            self._records_now,
        )
        while due:
            at, rank, takes, member = due[0]
            if at >= end:
                break
            if member.since < 0:
                heappop(due)
                continue
            if (records_now or not member.is_known) and (is_ahead or not takes):
                if takers:  # their pages may be those of equal content
                    self._grow(takers)
                    takers = []
                self._record_page(member, at)
            if not takes:
                heappop(due)
                continue
            takers.append(member.pages)
            if is_ahead:
                heapreplace(due, (at + size, rank, True, member))
            else:
                heappop(due)
                self._await_page(member, at + size)
        if takers:
            self._grow(takers)

    def _grow(self, tables: list[list[int]]) -> None:
        """One more page for each of these, in this order; there is one group, and there are free
        pages."""
        kv = self.scheduler.kv
        pages = kv.pool.take_all(len(tables))
        kv.num_evicted += kv.index.forget_all(pages)
        for table, page in zip(tables, pages, strict=True):
            table.append(page)

    def _turn_page(self) -> None:
        at, _, takes, member = heappop(self._due)
        if member.since < 0:
            return
        request, kv = member.request, self.scheduler.kv
        if (self._records_now or not member.is_known) and (not takes or self._steps_ahead):
            self._record_page(member, at)
        if takes:
            position = len(member.pages) * kv.page_size if self._is_simple else request.writable_end
            kv.trim(request.seq, position)
            added = kv.extend(request.seq, position + 1)
            assert added is not None, "there were enough pages"
            request.writable_end = position + kv.page_size
            self._await_page(member, at + kv.page_size)

    def _record_page(self, member: _Member, at: int) -> None:
        """Known by then are the tokens before the one that this plan computes, and where none is in
        flight, that one."""
        request = member.request
        self._catch_up(member, at)
        self.scheduler.kv.record(request.seq, request.tokens, len(request.tokens))
        member.is_known = True

    # ---- many steps

    @property
    def has_new(self) -> bool:
        """The queued request that is next was not looked at: the next step may not be like the
        last."""
        if not self.scheduler.waiting.requests or self._by_prefix:
            return False
        request = self.scheduler.next_waiting()
        return request is not None and not request.deferred_because

    def most(self) -> tuple[int, float, StepItem | None]:
        """The number of steps like the last one that follow it, if they are planned before some
        time, and which prompt goes on in them; 0: none, or it is not known."""
        none, scheduler, members, prompt = (0, 0.0, None), self.scheduler, self._members, None
        num = 1 << 30
        if members:
            self._settle_ended()
            if not members:
                return none
            num = self._ends[0][0] - self.num_made  # if it has left since, that is too few
        num_others, items = len(scheduler.running) - len(members), self.last_plan.items
        if num_others:
            if num_others != len(items):
                return none
            if not self._all_end(items):
                if num_others > 1:
                    return none
                prompt = items[0]
                num = min(num, self._num_chunks(prompt))
            elif not members or scheduler.waiting.requests:  # which may start once they have ended
                return none
        elif not members or len(members) > scheduler.token_budget:
            return none
        if num <= 0 or (self.names_all and not self._is_like_last(prompt)):
            return none
        until_s = scheduler.kv.held.next_end_s
        if scheduler.waiting.requests:
            until_s = min(until_s, self._queue_rests_until(prompt))
            if until_s <= self._clock.now():
                return none
        num = self._num_by_pages(num) if members else num
        return (num, until_s, prompt) if num > 0 else none

    def _all_end(self, items: Iterable[StepItem]) -> bool:
        """The last token of each is under way."""
        for item in items:
            request = self.scheduler.requests.get(item.seq)
            if request is None or request.epoch != item.epoch or not request.num_in_flight:
                return False
            if request.prefix_leases or request.children:
                return False
            if (
                len(request.tokens) + request.num_in_flight - request.num_prompt
                < request.max_tokens
            ):
                return False
        return True

    def has_results(self, prompt: StepItem | None) -> bool:
        """The step in flight yields a first token, or the last of a request."""
        return bool(self._firsts) or (prompt is None and bool(self.last_plan.items))

    def _is_like_last(self, prompt: StepItem | None) -> bool:
        """The last plan had the same sequences: its event tells of those that follow."""
        return self._num_in_last == len(self._members) and len(self.last_plan.items) == (
            prompt is not None
        )

    def _num_chunks(self, item: StepItem) -> int:
        """The number of steps that compute as much of the prompt as this one does, and none of them
        its last."""
        scheduler = self.scheduler
        request = scheduler.requests.get(item.seq)
        if (
            request is None
            or request.epoch != item.epoch
            or item.samples
            or scheduler.kv.has_windows
        ):
            return 0
        if (
            request.kv_policy is not None
            or request.in_background
            or item.count + len(self._members) != scheduler.token_budget
        ):
            return 0
        if scheduler.policy.prefill_first and self._members:
            return 0
        return (len(request.tokens) - request.num_computed - 1) // item.count

    def _queue_rests_until(self, prompt: StepItem | None) -> float:
        """Until when no queued request can start, nor take another's place; -inf: that is not
        known."""
        unknown, scheduler = -math.inf, self.scheduler
        alone = scheduler.waiting.only_tenant()
        if alone is None or self._by_prefix:
            return unknown
        request = scheduler.next_waiting()
        if request is None or not request.deferred_because:
            return unknown
        if prompt is not None and scheduler.requests[prompt.seq].account is not alone:
            return unknown
        if self._may_find():
            self.record()
        running = scheduler.running
        state = StepState(
            scheduler.token_budget, scheduler.token_budget, len(running), len(running)
        )
        state.num_waiting, state.num_rows = len(scheduler.waiting.requests), scheduler.num_rows
        if self._evict and scheduler.policy.may_admit(state):
            if preemption.lower(running, request):
                return unknown
            if (
                len(running) == scheduler.num_rows
                and scheduler.waiting.num_tenants(request.in_background) > 1
            ):
                return unknown
        state.num_left -= len(self._members) + (prompt.count if prompt is not None else 0)
        if self._obstacle_stays(request, state, prompt is not None) != request.deferred_because:
            return unknown
        oldest = alone.by_age[0]
        return math.inf if oldest.is_aged else _until_aged(oldest.queued_s, self._clock.now())

    def _obstacle_stays(self, request: Request, state: StepState, has_prompt: bool) -> str:
        """The obstacle that the next plan states, if that is nothing that these steps change; else
        a word that it never says."""
        if obstacle := self.scheduler.obstacle(request, state):
            return obstacle
        if has_prompt:  # its pages may be what the request waits for
            return "?"
        kv, running = self.scheduler.kv, self.scheduler.running
        reserve = self._pages.reserve(request, running, to_the_end=not self._evict)
        if self._pages.num_to_start(request) + reserve > kv.num_free_pages and not kv.holds(
            request.seq
        ):
            return (
                "not enough free pages"
                if self._evict
                else "not enough free pages to run to its end"
            )
        return "?"

    def _num_by_pages(self, num: int) -> int:
        """Steps for which there are free pages, whatever requests take."""
        kv = self.scheduler.kv
        size, per_page, free = kv.page_size, len(self._members) * len(kv.groups), kv.num_free_pages
        if (num // size + 2) * per_page <= free:
            return num
        most = (free // per_page - 2) * size
        if most > 0:
            return min(num, most)
        # Within a page's length each takes at most one of each group: until there is none for the
        # next to take one.
        room = free // len(kv.groups)
        ends = nsmallest(
            room + 1,
            [
                at - self.num_made
                for at, _, takes, member in self._due
                if takes and member.since >= 0
            ],
        )
        return min(num, size) if room >= len(ends) else min(num, ends[room], size)

    def advance(self, num: int, prompt: StepItem | None) -> StepPlan:
        """Plan and commit so many steps, none of which ends a request. Returns the last of them."""
        scheduler, kv, last = self.scheduler, self.scheduler.kv, self.last_plan
        num_evicted = kv.num_evicted
        for account, each in self._accounts.items():
            account.num_served += num * each
        self._turn_pages(self.num_made + num)
        if self._members:
            self.num_made += num
        items = list[StepItem]()
        if prompt is not None:
            request = scheduler.requests[prompt.seq]
            request.num_computed += num * prompt.count
            request.account.num_served += num * prompt.count
            kv.record(request.seq, request.tokens, request.num_computed)
            start = prompt.start + num * prompt.count
            items = [StepItem(prompt.seq, prompt.row, start, prompt.count, False, prompt.epoch)]
        self.last_plan = StepPlan(last.step + num, items)
        self._num_in_last = len(self._members)
        scheduler.skip(num)
        if kv.num_evicted > num_evicted:
            why = "least recently used, to make room"
            self._emit(events.PagesEvicted(self._clock.now(), kv.num_evicted - num_evicted, why, 0))
        return self.last_plan


def _until_aged(queued_s: float, now: float) -> float:
    """While the oldest request has not waited for so long, or if it has by now."""
    at = queued_s + AGEING_S
    return math.inf if now >= at else at - _EARLY_S
