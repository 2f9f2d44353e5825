"""Steps that only repeat the one before: how many will be planned like it, and all of them at once.

While every running request decodes, but one that may go on with its prompt by equal chunks, and none can start, end or lose its
pages, a step differs from the next in nothing but the positions. `Repeats` says for how many steps that holds and makes them in
one go, with the same pages taken in the same order. It may say less than there are, never more: equal to planning and committing
each. Simulations use it.
"""

from __future__ import annotations

import math

from tidemill import events
from tidemill.sched import preemption
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.policies import StepState
from tidemill.sched.queue import AGEING_S
from tidemill.sched.request import Request
from tidemill.sched.scheduler import Scheduler

_EARLY_S = 1e-6  # before a moment at which the queue's order changes: sums of times are not exact
_LEAST = 2  # steps that are worth it


class Repeats:
    """Of a scheduler whose last plan is committed, or in flight as the only one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        kv = scheduler.kv
        windows = [group.window for group in kv.groups if group.window]
        # What a page loses by moving on must not be what the same repeats have filled.
        self._most_by_window = min(windows) - 2 * max(group.page_size for group in kv.groups) if windows else 1 << 30
        self._is_possible = kv.tiers is None and not kv.has_states and self._most_by_window >= _LEAST

    def most(self, plan: StepPlan) -> tuple[int, float]:
        """How many steps like this one follow it, if they are planned before some time; 0: none, or it is not known."""
        table = self._scheduler
        running = table.running
        if not self._is_possible or len(plan.items) != len(running) or not running:
            return 0, 0.0
        num, prompt = self._most_by_window, None
        for item, request in zip(plan.items, map(table._requests.get, [item.seq for item in plan.items]), strict=True):
            if item.count > 1 and prompt is None:
                prompt, left = item, self._num_chunks(item)
            elif (
                request is None
                or request.first_token_s is None  # nor are those that wait for its prompt forked
                or request.epoch != item.epoch
                or item.count != 1
                or not item.samples
                or request.waits_for_tokens
                or request.cache is not None
                or request.writable_end < request.num_computed
                or request.drafts
            ):
                return 0, 0.0
            else:  # as long as it does not end
                left = request.max_tokens - len(request.tokens) + request.num_prompt - 1
            if left < num:
                num = left
                if num < _LEAST:
                    return 0, 0.0
        until_s = table.kv.held.next_end_s
        if table.waiting:
            until_s = min(until_s, self._queue_rests_until(plan, prompt))
        num = min(num, self._num_by_pages(num))
        return (num, until_s) if num >= _LEAST and self._is_one_class() else (0, 0.0)

    def _num_chunks(self, item: StepItem) -> int:
        """Of a prompt: steps that compute as much of it as this one, and none of them the last."""
        request = self._scheduler._requests.get(item.seq)
        if request is None or request.epoch != item.epoch or item.samples or self._scheduler.kv.has_windows:
            return 0
        if (
            request.cache is not None
            or request.in_background
            or item.count + self._num_decoding() != self._scheduler.token_budget
        ):
            return 0
        return (len(request.tokens) - request.num_computed - 1) // item.count

    def _num_decoding(self) -> int:
        return len(self._scheduler.running) - 1

    def _is_one_class(self) -> bool:
        """The background beside others gets varying parts of steps; alone, the same, unless others wait."""
        running = self._scheduler.running
        if running[0].in_background:
            return not self._scheduler.waiting
        return not running[-1].in_background

    def _queue_rests_until(self, plan: StepPlan, prompt: StepItem | None) -> float:
        """Until when no queued request can start, nor take another's place; -inf: that is not known."""
        table, unknown = self._scheduler, -math.inf
        alone = table.waiting.only_tenant()
        if alone is None or table._by_prefix:
            return unknown
        request = table._next_waiting()
        if request is None or (prompt is not None and table._requests[prompt.seq].account is not alone):
            return unknown
        running = table.running
        state = StepState(table.token_budget, table.token_budget, len(running), len(running))
        state.num_waiting, state.num_rows = len(table.waiting), table.num_rows
        if table._evict and table.policy.may_admit(state):
            if preemption.lower(running, request):
                return unknown
            if not table._free_rows and table.waiting.num_tenants(request.in_background) > 1:
                return unknown
        state.num_left -= plan.num_tokens
        if self._obstacle(request, state, prompt is not None) != request.deferred_because:
            return unknown
        oldest = alone.by_age[0]
        return math.inf if oldest.is_aged else _until_aged(oldest.queued_s, table._clock.now())

    def _obstacle(self, request: Request, state: StepState, has_prompt: bool) -> str:
        """What the next plan says, if that is nothing that these steps change; else a word that it never says."""
        table = self._scheduler
        if obstacle := table._obstacle(request, state):
            return obstacle
        if has_prompt:  # its pages may be what the request waits for
            return "?"
        reserve = table._pages.reserve(request, table.running, to_the_end=not table._evict)
        if table._pages.num_to_start(request) + reserve > table.kv.num_free_pages and not table.kv.holds(request.seq):
            return "not enough free pages" if table._evict else "not enough free pages to run to its end"
        return "?"

    def _num_by_pages(self, num: int) -> int:
        """Steps for which there are free pages, whatever requests take."""
        table = self._scheduler
        running, kv = table.running, table.kv
        size, per_page = kv.page_size, len(running) * len(kv.groups)
        free = kv.num_free_pages
        if (num // size + 2) * per_page <= free:
            return num
        most = (free // per_page - 2) * size
        if most > 0:
            return min(num, most)
        # Within a page's length each takes at most one of each group: until there is none for the next to take one.
        ends = sorted(request.writable_end - request.num_computed for request in running)
        room = free // len(kv.groups)
        return min(num, size) if room >= len(ends) else min(num, ends[room], size)

    def advance(self, plan: StepPlan, num: int, first_token: int) -> list[StepItem]:
        """Plan and commit so many steps, none of which ends a request. Each sequence draws the token with its number after
        `first_token`. Returns the items of the last of them."""
        table = self._scheduler
        kv, requests = table.kv, table._requests
        size = kv.page_size
        num_evicted = kv.num_evicted
        self._take_pages(plan, num)
        items = []
        for item in plan.items:
            seq = item.seq
            request = requests[seq]
            if item.count > 1:
                items.append(self._go_on(request, item, num))
                continue
            request.num_computed = num_computed = request.num_computed + num
            tokens = request.tokens
            tokens += [first_token + seq] * num
            request.account.num_served += num
            num_known = len(tokens) - 1  # when the last of these steps was planned
            if num_known // size > (num_known - num) // size:
                kv.record(seq, tokens, min(num_computed, num_known))
            items.append(StepItem(seq, item.row, item.start + num, 1, True, item.epoch))
        is_alone = table.running[0].in_background
        table._background.skip(num, is_alone, len(items) if is_alone else 0)
        table._step += num
        if kv.num_evicted > num_evicted:
            why = "least recently used, to make room"
            table._emit(events.PagesEvicted(table._clock.now(), kv.num_evicted - num_evicted, why, 0))
        return items

    def _go_on(self, request: Request, item: StepItem, num: int) -> StepItem:
        """With a prompt, so many times as far."""
        request.num_computed += num * item.count
        request.account.num_served += num * item.count
        self._scheduler.kv.record(request.seq, request.tokens, request.num_computed)
        return StepItem(item.seq, item.row, item.start + num * item.count, item.count, False, item.epoch)

    def _take_pages(self, plan: StepPlan, num: int) -> None:
        """In the order of the steps, and in each in that of its items."""
        table, size = self._scheduler, self._scheduler.kv.page_size
        taken = []
        for i, item in enumerate(plan.items):
            if item.count > 1:
                continue  # it has its pages
            request = table._requests[item.seq]
            first = request.writable_end - request.num_computed  # of the steps, the first that writes beyond
            if first < num:
                taken += [(step, i, request) for step in range(first, num, size)]
        taken.sort(key=_by_step)
        kv = table.kv
        is_simple = len(kv.groups) == 1 and not kv.has_windows
        if is_simple:
            kv.grow([request.seq for _, _, request in taken])
        for step, _, request in taken:
            request.writable_end += size
            if not is_simple:
                at = request.num_computed + step
                kv.trim(request.seq, at)
                done = kv.extend(request.seq, at + 1)  # the plans that told the runner of it are over
                assert done is not None, "there were enough pages"


def _by_step(entry: tuple[int, int, Request]) -> tuple[int, int]:
    return entry[0], entry[1]


def _until_aged(queued_s: float, now: float) -> float:
    """While the oldest request has not waited for so long, or if it has by now."""
    at = queued_s + AGEING_S
    return math.inf if now >= at else at - _EARLY_S
