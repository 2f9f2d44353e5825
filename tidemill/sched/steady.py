"""A scheduler whose decoding sequences are advanced together: a step costs what changes in it, not what goes on.

Most sequences of a step do what they did in the step before: one more token, in a page that they have. `SteadyScheduler` looks
at such a sequence only when it needs a page, ends, or is asked for. Until then its tokens lag behind by a number of steps that is
the same for all but for when each joined:

    request          tokens and num_computed as of step `since`; both go on by one a step
    pages            always up to date: `_due` says at which step each sequence takes its next one, `_ends` when each ends
    prefix index     has its pages when it leaves, or before a queued request is looked up whose first page is known
    a plan           has no item of them, only their number

While nothing but such sequences run, and at most one prompt that goes on by equal chunks, steps differ in positions only:
`most` says how many of them follow, `advance` makes them at once. That goes on past the first token of a request and past the
end of one: both are in the step in flight, whose results come after the first of these steps is planned. Plans, pages, events
and their order are as if each sequence were looked at in each step. Simulations use it: their runner needs no items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace, nsmallest
from typing import Any

from tidemill import events
from tidemill.sched import preemption
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.policies import StepState
from tidemill.sched.queue import AGEING_S, Tenant
from tidemill.sched.request import Request
from tidemill.sched.scheduler import Scheduler

_EARLY_S = 1e-6  # before a moment at which the queue's order changes: sums of times are not exact
_NUM_LOOKED_UP = 8  # queued requests whose first pages are


class _Member:
    """A sequence that is advanced with the others."""

    __slots__ = ("is_known", "offset", "pages", "rank", "request", "since")

    def __init__(self, request: Request, step: int, pages: list[int]) -> None:
        self.request, self.since, self.rank = request, step, request.rank
        self.pages = pages  # of the first group
        self.offset = request.num_computed - step  # the position that a step computes, less the step's number
        self.is_known = False  # its first page is in the prefix index

    def __lt__(self, other: object) -> bool:
        """Heaps compare entries of one that left and has come back."""
        return False


class SteadyScheduler(Scheduler):
    """`steps_ahead`: as the runner's. `first_token`: what the first sequence draws, always; the second draws the next."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps_ahead = self.first_token = 0
        self.num_made = 0  # steps with such sequences so far: by these numbers all of this counts
        self.caught_up: list[tuple[str, int, int]] = []  # requests that have got the tokens of these steps; for who reads it
        self.last_plan = StepPlan(-1)  # in flight, or committed
        self._num_decoding = 0  # of its items, the first: of sequences that ran and decoded
        self._members: dict[int, _Member] = {}
        self._sum_of_offsets = 0
        self._longest = 0  # offset
        self._due: list[tuple[int, tuple[Any, ...], bool, _Member]] = []  # a heap: a page is full (False), or taken (True)
        self._ends: list[tuple[int, int, _Member]] = []  # a heap: when only the last token is to be drawn
        self._accounts: dict[Tenant, int] = {}  # and how many of them each has
        self._firsts: list[Request] = []  # of them, those whose first token the step in flight yields
        kv = self.kv
        windows = [group.window for group in kv.groups if group.window]
        large = 2 * max(group.page_size for group in kv.groups) + 2  # what is given back must be recorded by then
        self._is_possible = kv.tiers is None and not kv.has_states and min(windows, default=large) >= large
        self._is_simple = len(kv.groups) == 1 and not windows
        self._records_late = self._is_simple  # what it computes enters the prefix index when it matters, not when it is computed
        self._records_now = not self._records_late
        self.names_steady = True  # in events, one for each change of them: False if nobody reads these

    # ---- what runs, as a runner sees it

    @property
    def num_steady(self) -> int:
        return len(self._members)

    @property
    def steady_context(self) -> tuple[int, int]:
        """The tokens that the steady requests of the last planned step see, in all, and the most that one of them does."""
        return self._sum_of_offsets + len(self._members) * self.num_made, self._longest + self.num_made

    def steady_rows(self) -> list[int]:
        return [member.request.row for member in self._members.values()]

    # ---- joining and leaving

    def add(self, *arguments: Any, **options: Any) -> list[Request]:
        if options.get("prefix_leases"):  # they look up what is cached
            self._records_late = False
            self._records_now = True
            self.record_all()
        return super().add(*arguments, **options)

    def join(self) -> None:
        """After a step: what it planned and from now on only decodes."""
        last, num = self.last_plan, self._num_decoding
        if not last.items or not self._is_possible:
            return
        kept = [item for item in last.items[:num] if not self._joins(item)]
        self._num_decoding, num_joined = len(kept), num - len(kept)
        if prompts := last.items[num:]:  # all of them, or none: first tokens are told in their order
            requests = [self.requests.get(item.seq) for item in prompts]
            lefts = [0 if request is None else self._num_left(request) for request in requests]
            if min(lefts) > 0 and all(
                request and request.epoch == item.epoch for request, item in zip(requests, prompts, strict=True)
            ):
                for request, left in zip(requests, lefts, strict=True):
                    assert request is not None
                    self._add(request, left)
                    if request.first_token_s is None:
                        self._firsts.append(request)
                num_joined += len(prompts)
            else:
                kept += prompts
        last.num_steady += num_joined
        last.items = kept

    def _joins(self, item: StepItem) -> bool:
        request = self.requests.get(item.seq)
        if request is None or request.epoch != item.epoch or request.first_token_s is None:
            return False
        if (left := self._num_left(request)) <= 0:
            return False
        self._add(request, left)
        return True

    def _num_left(self, request: Request) -> int:
        """Plans that it is part of until only its last token is to be drawn; 0: it is not steady."""
        num_known = len(request.tokens)
        if (
            request.num_in_flight != self.steps_ahead
            or num_known + request.num_in_flight - request.num_computed != 1
            or request.in_background
            or request.waits_for_tokens
            or request.cache is not None
            or request.drafts
            or (request.first_token_s is None and (not self.steps_ahead or request.children or request.prefix_leases))
            or (request.writable_end < request.num_computed and not self._owns_page(request))
        ):
            return 0
        return request.max_tokens - num_known + request.num_prompt - 1

    def _owns_page(self, request: Request) -> bool:
        """Tells if no other sequence reads the page of the next token, for a prompt that was computed."""
        if self._is_simple:
            request.writable_end = self.kv.owned_end(request.seq, request.num_computed)
        return request.writable_end >= request.num_computed

    def _add(self, request: Request, left: int) -> None:
        step = self.num_made
        member = self._members[request.seq] = _Member(request, step, self.kv.tables(request.seq)[0])
        member.is_known = len(request.tokens) - 1 > self.kv.page_size
        self._sum_of_offsets += member.offset
        if member.offset > self._longest or len(self._members) == 1:
            self._longest = member.offset
        self._accounts[request.account] = self._accounts.get(request.account, 0) + 1
        heappush(self._ends, (step + left, request.seq, member))
        self._await_page(member, step + request.writable_end - request.num_computed)

    def _await_page(self, member: _Member, at: int) -> None:
        """The plan number `at` takes its next page. The one before is full of known tokens then, or a plan earlier where none
        is in flight."""
        if self.steps_ahead:
            heappush(self._due, (at, member.rank, True, member))
        else:
            if at > self.num_made:
                heappush(self._due, (at - 1, member.rank, False, member))
            heappush(self._due, (at, member.rank, True, member))

    def catch_up(self, member: _Member) -> None:
        """Its request has all tokens of the steps so far."""
        request, num = member.request, self.num_made - member.since
        if num:
            request.num_computed += num
            request.tokens += [self.first_token + request.seq] * num
            self.caught_up.append((request.request_id, member.since, self.num_made))
            member.since = self.num_made

    def catch_up_all(self) -> None:
        for member in self._members.values():
            self.catch_up(member)

    def _record(self, member: _Member) -> None:
        """Records the member's tokens in the prefix index, as far as they were known when the last step was planned."""
        self.catch_up(member)
        tokens = member.request.tokens
        self.kv.record(member.request.seq, tokens, len(tokens) - 1)

    def record_all(self) -> None:
        """The prefix index is to be used."""
        for member in self._members.values():
            self._record(member)

    def _may_find(self) -> bool:
        """A queued request may be looked up whose prefix is that of a running one."""
        if not self.waiting.requests or not self._free_rows:
            return False
        if self._by_prefix or len(self.waiting.requests) > _NUM_LOOKED_UP:
            return True
        return any(self.kv.knows_begin(self._pages.path(request)) for request in self.waiting.requests.values())

    def settle(self, seqs: Iterable[int] | None = None) -> None:
        """These, or all, are looked at in each step again."""
        settled, items, firsts = list(self._members if seqs is None else seqs), list[StepItem](), list[StepItem]()
        for seq in settled:
            member = self._members.pop(seq)
            request, account = member.request, member.request.account
            self._record(member)
            if self._is_simple:
                request.writable_end = len(member.pages) * self.kv.page_size
            member.since = -1  # of its entries in heaps: they are over
            self._sum_of_offsets -= member.offset
            self._accounts[account] -= 1
            if not self._accounts[account]:
                del self._accounts[account]
            if request.num_in_flight:
                item = StepItem(seq, request.row, request.num_computed - 1, 1, True, request.epoch)
                if self._firsts and request in self._firsts:
                    self._firsts.remove(request)
                    firsts.append(item)
                else:
                    items.append(item)
            if member.offset == self._longest:
                self._longest = max([member.offset for member in self._members.values()], default=0)
        if not self._members:
            self._due.clear()
            self._ends.clear()
        last, num = self.last_plan, self._num_decoding
        last.num_steady -= len(items) + len(firsts)
        last.items += firsts
        if items:
            if len(items) + num > 1:
                items = sorted(items + last.items[:num], key=self._rank_of)
            last.items[:num] = items
            self._num_decoding = len(items)

    def _rank_of(self, item: StepItem) -> tuple[Any, ...]:
        request = self.requests.get(item.seq)
        return () if request is None else request.rank  # what is gone is not looked at

    def preempt(self, request: Request, reason: str, is_lost: bool = False) -> None:
        if request.seq in self._members:
            self.settle([request.seq])
        super().preempt(request, reason, is_lost)

    def _remove(self, request: Request) -> None:
        if request.seq in self._members:
            self.settle([request.seq])
        super()._remove(request)

    def _end_commit(self, now: float, has_finished: bool) -> None:
        if self._firsts:
            self.take_first_tokens(now)
        super()._end_commit(now, has_finished)

    def take_first_tokens(self, now: float) -> None:
        for request in self._firsts:
            request.first_token_s = now
            self._emit(events.FirstToken(now, request.request_id, now - request.arrival_s))
        self._firsts.clear()

    # ---- a step

    def plan(self) -> StepPlan | None:
        if self._members:
            self._settle_ended()
            if self._members and not self._can_stay():
                self.settle()
            self._records_now = not self._records_late or self._may_find()
            if self._records_now and self._records_late:
                self.record_all()
        plan = super().plan()
        self._records_now = not self._records_late
        if plan is not None and not plan.is_empty:
            self.last_plan = plan
        return plan

    def _settle_ended(self) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self.num_made:
            _, seq, member = heappop(ends)
            if member.since >= 0:
                self.settle([seq])

    def _can_stay(self) -> bool:
        """In the next plan all of them get their token, and none of them can be preempted for a page."""
        kv, num_others = self.kv, len(self.running) - len(self._members)
        if (self.policy.prefill_first and (num_others or self.waiting.requests)) or len(self.running) > self.token_budget:
            return False
        if kv.has_windows and (num_others or self.waiting.requests):
            num_others += self.token_budget // kv.page_size + 1
        room = kv.num_free_pages // len(kv.groups) - num_others
        return room >= len(self._members) or room >= self._num_due()

    def _num_due(self) -> int:
        """That take a page in the next plan."""
        due, step = self._due, self.num_made
        if not due or due[0][0] > step:
            return 0
        return len([1 for at, _, takes, member in due if at == step and takes and member.since >= 0])

    def _plan_decode(self, plan: StepPlan, state: StepState) -> None:
        members = self._members
        if not members:
            super()._plan_decode(plan, state)
            self._num_decoding = len(plan.items)
            return
        plan.num_steady = len(members)
        state.num_left -= len(members)
        for account, num in self._accounts.items():
            account.num_served += num
        others = [request for request in self.running if request.seq not in members] if len(self.running) > len(members) else []
        while others and self._due and self._due[0][0] <= self.num_made:  # in the order in which they would have been looked at
            before = [request for request in others if request.rank < self._due[0][1]]
            self._decode(before, plan, state)
            del others[: len(before)]
            self._turn_page()
        self._decode(others, plan, state)
        self._num_decoding = len(plan.items)
        self._turn_pages(self.num_made + 1)
        self.num_made += 1

    def _prompts(self) -> list[Request]:
        return super()._prompts() if len(self.running) > len(self._members) else []

    def _turn_pages(self, end: int) -> None:
        """Turns the pages of all plans before this one, in their order."""
        due = self._due
        if not self._is_simple:
            while due and due[0][0] < end:
                self._turn_page()
            return
        takers, kv = list[list[int]](), self.kv
        size, is_ahead, records_now = kv.page_size, self.steps_ahead > 0, self._records_now
        while due:
            at, rank, takes, member = due[0]
            if at >= end:
                break
            if member.since < 0:
                heappop(due)
                continue
            if (records_now or not member.is_known) and (is_ahead or not takes):
                if takers:  # their pages may be those of equal content
                    kv.grow(takers)
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
            kv.grow(takers)

    def _turn_page(self) -> None:
        at, _, takes, member = heappop(self._due)
        if member.since < 0:
            return
        request, kv = member.request, self.kv
        if (self._records_now or not member.is_known) and (not takes or self.steps_ahead):
            self._record_page(member, at)
        if takes:
            position = len(member.pages) * kv.page_size if self._is_simple else request.writable_end
            kv.trim(request.seq, position)
            done = kv.extend(request.seq, position + 1)
            assert done is not None, "there were enough pages"
            request.writable_end = position + kv.page_size
            self._await_page(member, at + kv.page_size)

    def _record_page(self, member: _Member, at: int) -> None:
        """Known by then are the tokens before the one that this plan computes, and where none is in flight, that one."""
        request = member.request
        if num := at - member.since:  # steps that it lags behind
            request.num_computed += num
            request.tokens += [self.first_token + request.seq] * num
            self.caught_up.append((request.request_id, member.since, at))
            member.since = at
        self.kv.record(request.seq, request.tokens, len(request.tokens))
        member.is_known = True

    def _planned(self, plan: StepPlan) -> events.StepPlanned:
        if not plan.num_steady:
            return super()._planned(plan)
        named = self._members.values() if self.names_steady else ()
        tokens_of = dict.fromkeys([member.request.request_id for member in named], 1)
        num_prefilling = 0
        for item in plan.items:
            num_prefilling += item.count > 1 or not item.samples
            tokens_of[self.requests[item.seq].request_id] = item.count
        nums = len(self.running), len(self.waiting.requests), self.kv.num_free_pages
        num_decoding = len(plan.items) + plan.num_steady - num_prefilling
        return events.StepPlanned(
            self._clock.now(), plan.step, plan.num_tokens, self.token_budget, num_decoding, num_prefilling, *nums,
            tokens_of=tuple(tokens_of.items()),
        )  # fmt: skip

    # ---- many steps

    @property
    def has_new(self) -> bool:
        """The queued request that is next was not looked at: the next step may not be like the last."""
        if not self.waiting.requests or self._by_prefix:
            return False
        request = self._next_waiting()
        return request is not None and not request.deferred_because

    def most(self) -> tuple[int, float, StepItem | None]:
        """The number of steps like the last one that follow it, if they are planned before some time, and which prompt goes on in
        them; 0: none, or it is not known."""
        none, members, prompt = (0, 0.0, None), self._members, None
        num = 1 << 30
        if members:
            self._settle_ended()
            if not members:
                return none
            num = self._ends[0][0] - self.num_made  # if it has left since, that is too few
        num_others, items = len(self.running) - len(members), self.last_plan.items
        if num_others:
            if num_others != len(items):
                return none
            if not self._all_end(items):
                if num_others > 1:
                    return none
                prompt = items[0]
                num = min(num, self._num_chunks(prompt))
            elif not members or self.waiting.requests:  # which may start once they have ended
                return none
        elif not members or len(members) > self.token_budget:
            return none
        if self.names_steady and not self.is_like_last(prompt):
            num = 1 if prompt is None else 0
        if num <= 0:
            return none
        until_s = self.kv.held.next_end_s
        if self.waiting.requests:
            until_s = min(until_s, self._queue_rests_until(prompt))
            if until_s <= self._clock.now():
                return none
        num = self._num_by_pages(num) if members else num
        return (num, until_s, prompt) if num > 0 else none

    def _all_end(self, items: Iterable[StepItem]) -> bool:
        """The last token of each is under way."""
        for item in items:
            request = self.requests.get(item.seq)
            if request is None or request.epoch != item.epoch or not request.num_in_flight:
                return False
            if request.prefix_leases or request.children:
                return False
            if len(request.tokens) + request.num_in_flight - request.num_prompt < request.max_tokens:
                return False
        return True

    def has_results(self, prompt: StepItem | None) -> bool:
        """The step in flight yields a first token, or the last of a request."""
        return bool(self._firsts) or (prompt is None and bool(self.last_plan.items))

    def is_like_last(self, prompt: StepItem | None) -> bool:
        """The last plan had the same sequences: its event tells of those that follow."""
        last = self.last_plan
        if self._firsts or last.num_steady != len(self._members):
            return False
        return len(last.items) == (prompt is not None)

    def _num_chunks(self, item: StepItem) -> int:
        """The number of steps that compute as much of the prompt as this one does, and none of them its last."""
        request = self.requests.get(item.seq)
        if request is None or request.epoch != item.epoch or item.samples or self.kv.has_windows:
            return 0
        if request.cache is not None or request.in_background or item.count + len(self._members) != self.token_budget:
            return 0
        if self.policy.prefill_first and self._members:
            return 0
        return (len(request.tokens) - request.num_computed - 1) // item.count

    def _queue_rests_until(self, prompt: StepItem | None) -> float:
        """Until when no queued request can start, nor take another's place; -inf: that is not known."""
        unknown = -math.inf
        alone = self.waiting.only_tenant()
        if alone is None or self._by_prefix:
            return unknown
        request = self._next_waiting()
        if request is None or not request.deferred_because:
            return unknown
        if prompt is not None and self.requests[prompt.seq].account is not alone:
            return unknown
        if self._may_find():
            self.record_all()
        running = self.running
        state = StepState(self.token_budget, self.token_budget, len(running), len(running))
        state.num_waiting, state.num_rows = len(self.waiting.requests), self.num_rows
        if self._evict and self.policy.may_admit(state):
            if preemption.lower(running, request):
                return unknown
            if not self._free_rows and self.waiting.num_tenants(request.in_background) > 1:
                return unknown
        state.num_left -= len(self._members) + (prompt.count if prompt is not None else 0)
        if self._obstacle_stays(request, state, prompt is not None) != request.deferred_because:
            return unknown
        oldest = alone.by_age[0]
        return math.inf if oldest.is_aged else _until_aged(oldest.queued_s, self._clock.now())

    def _obstacle_stays(self, request: Request, state: StepState, has_prompt: bool) -> str:
        """The obstacle that the next plan states, if that is nothing that these steps change; else a word that it never says."""
        if obstacle := self._obstacle(request, state):
            return obstacle
        if has_prompt:  # its pages may be what the request waits for
            return "?"
        reserve = self._pages.reserve(request, self.running, to_the_end=not self._evict)
        if self._pages.num_to_start(request) + reserve > self.kv.num_free_pages and not self.kv.holds(request.seq):
            return "not enough free pages" if self._evict else "not enough free pages to run to its end"
        return "?"

    def _num_by_pages(self, num: int) -> int:
        """Steps for which there are free pages, whatever requests take."""
        kv = self.kv
        size, per_page, free = kv.page_size, len(self._members) * len(kv.groups), kv.num_free_pages
        if (num // size + 2) * per_page <= free:
            return num
        most = (free // per_page - 2) * size
        if most > 0:
            return min(num, most)
        # Within a page's length each takes at most one of each group: until there is none for the next to take one.
        room = free // len(kv.groups)
        ends = nsmallest(room + 1, [at - self.num_made for at, _, takes, member in self._due if takes and member.since >= 0])
        return min(num, size) if room >= len(ends) else min(num, ends[room], size)

    def advance(self, num: int, prompt: StepItem | None) -> StepPlan:
        """Plan and commit so many steps, none of which ends a request. Returns the last of them."""
        num_evicted, last = self.kv.num_evicted, self.last_plan
        is_named = self.names_steady and not self.is_like_last(prompt)
        for account, each in self._accounts.items():
            account.num_served += num * each
        self._turn_pages(self.num_made + num)
        if self._members:
            self.num_made += num
        if prompt is not None:
            request = self.requests[prompt.seq]
            request.num_computed += num * prompt.count
            request.account.num_served += num * prompt.count
            self.kv.record(request.seq, request.tokens, request.num_computed)
            start = prompt.start + num * prompt.count
            items = [StepItem(prompt.seq, prompt.row, start, prompt.count, False, prompt.epoch)]
            last = self.last_plan = StepPlan(last.step, items)
        elif last.items or last.new_rows:  # not committed yet; or tokens of a prompt, which nobody needs any more
            last = self.last_plan = StepPlan(last.step)
        last.step, last.num_steady, self._num_decoding = last.step + num, len(self._members), 0
        self._background.skip(num, is_alone=False, num_spent=0)
        self._step += num
        if self.kv.num_evicted > num_evicted:
            why = "least recently used, to make room"
            self._emit(events.PagesEvicted(self._clock.now(), self.kv.num_evicted - num_evicted, why, 0))
        if is_named:
            self._emit(self._planned(last))
        return last


def _until_aged(queued_s: float, now: float) -> float:
    """While the oldest request has not waited for so long, or if it has by now."""
    at = queued_s + AGEING_S
    return math.inf if now >= at else at - _EARLY_S
