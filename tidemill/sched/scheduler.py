"""The phase-free scheduler: each step gives each chosen request n more tokens to compute until
`num_computed` catches up.

Chunked prefill, prefix hits, preemption and drafts of tokens to come are all this one rule.
`plan()` decides a step, `commit()` takes its results; between the two another step may be planned,
since `num_computed` is advanced by the plan. For a request whose drafts are being verified, that
step takes them to be right: if one is not, what it computes counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from tidemill.kv.manager import KVManager
from tidemill.sched import preemption
from tidemill.sched.background import Background
from tidemill.sched.clock import Clock
from tidemill.sched.draft_capacity import DraftCapacity
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.policies import Policy, StepState
from tidemill.sched.progress import Progress, append
from tidemill.sched.request import Request, Status
from tidemill.sched.table import RequestTable
from tidemill.types import events
from tidemill.types.events import EventSink


class Scheduler:
    """Plans steps for the requests of its table."""

    def __init__(
        self,
        kv: KVManager,
        *,
        num_rows: int,
        token_budget: int,
        max_context: int,
        policy: Policy,
        clock: Clock,
        emit: EventSink,
        background_tokens: float = 1.0,
        background_budget: int | None = None,
        whole_prompts: bool = False,
        max_draws: int | None = None,
        order: str = "arrival",
        evict: bool = True,
        policy_bytes: int = 0,
        input_rows: int = 0,
    ) -> None:
        """`background_tokens`: how many tokens a step, on average, background requests get beside
        others. `background_budget`: how many alone; it is smaller than `token_budget`, since a
        request that arrives waits for the step to end. `whole_prompts`: a prompt is computed in one
        step, never cut; the budget holds the longest. `max_draws`: how many tokens the runner can
        draw in a step, drafts included. `order`: of queued requests, one of `queue.ORDERS`.
        `evict`: False: only what can run to its end is admitted, and none is preempted.
        `policy_bytes`: what rows may keep beside their pages, where that is counted. `input_rows`:
        rows of embeddings that the runner holds."""
        table = RequestTable(
            kv,
            num_rows=num_rows,
            max_context=max_context,
            clock=clock,
            emit=emit,
            evict=evict,
            input_rows=input_rows,
            input_budget=token_budget,
        )
        self.table, self.kv, self.num_rows = table, kv, num_rows
        self.requests, self.running, self.waiting = table.requests, table.running, table.waiting
        self.retention, self.inputs, self._pages = table.retention, table.inputs, table.pages
        self._clock, self._emit, self._evict = clock, emit, evict
        self.policy = policy
        self.token_budget = token_budget
        self.draft_capacity = DraftCapacity(table, token_budget, max_draws or token_budget)
        most_saved = token_budget if whole_prompts else max(background_tokens, 1.0)
        self._background = Background(
            background_tokens, background_budget or token_budget, most_saved
        )
        self._whole_prompts = whole_prompts
        self._by_prefix = order == "prefix"
        self._policy_bytes = policy_bytes
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting.requests)

    # ---- a step

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None if nothing can run. It has no items if pages are to be
        moved and nothing can run."""
        if not self.has_work:
            return self.plan_moves()
        plan, state = self.begin_plan()
        self._fill(plan, state)
        if plan.is_empty and not any(request.num_in_flight for request in self.running):
            # no other request can use this step
            state.num_background_left = self._background.budget
            self._fill(plan, state)
            self._make_undecided_yield(plan, state)
        return self.end_plan(plan, state)

    def begin_plan(self) -> tuple[StepPlan, StepState]:
        """A step without items, once queued requests have preempted what they may."""
        self.kv.begin_step(self._step)
        self.inputs.begin_step()
        if self.kv.held.next_end_s < math.inf:
            self.retention.expire()
        plan = StepPlan(self._step)
        num_running, num_waiting = len(self.running), len(self.waiting.requests)
        state = StepState(self.token_budget, self.token_budget, num_running, num_running)
        state.num_evicted, state.num_stored = self.kv.num_evicted, self.kv.offload.num_stored
        self._fetch_announced()
        state.num_waiting, state.num_rows = num_waiting, self.num_rows
        state.waited_s = self._waited_s()
        state.num_queued = self.waiting.num_waiting(in_background=False)
        is_alone = not self._others_run_or_come(state)
        state.num_background_left = self._background.allow(is_alone)
        if num_waiting and self._evict:
            self._make_way(state)
        return plan, state

    def end_plan(self, plan: StepPlan, state: StepState) -> StepPlan | None:
        """The plan with the changes of rows and pages that go with it; None if it has nothing."""
        num_evicted = self.kv.num_evicted - state.num_evicted
        if num_evicted:
            num_stored = self.kv.offload.num_stored - state.num_stored
            why = "least recently used, to make room"
            self._emit(events.PagesEvicted(self._clock.now(), num_evicted, why, num_stored))
        if plan.is_empty:
            return self._pages.moves_only(plan)
        self._step += 1
        self._pages.send_with(plan)
        self._emit(self._planned(plan, state.num_prefilling))
        return plan

    def skip(self, num_steps: int) -> None:
        """Count steps that were made without a plan, none of them for the background alone."""
        self._step += num_steps
        self._background.skip(num_steps, is_alone=False, num_spent=0)

    @property
    def idle_s(self) -> float:
        """After a plan of nothing: how long until one may have something, if no request comes,
        because a batch is forming."""
        return (
            0.0
            if self.running or not self.waiting
            else max(self.policy.window_s - self._waited_s(), 0.0)
        )

    def _waited_s(self) -> float:
        """By the request that was queued first, if it matters."""
        return self.waiting.waited_s(self._clock.now()) if self.policy.window_s else 0.0

    def plan_moves(self) -> StepPlan | None:
        """A step that computes nothing, if there are pages to move."""
        self._fetch_announced()
        return self._pages.moves_only(StepPlan(self._step))

    def _fetch_announced(self) -> None:
        """Fetches announced pages of other engines. Where no request is preempted, they do not go
        into pages that are promised to those that run."""
        self.kv.offload.fetch_announced(
            lambda: 0 if self._evict else self._pages.num_to_the_end(self.running)
        )

    def _planned(self, plan: StepPlan, num_prefilling: int) -> events.StepPlanned:
        requests, items = self.requests, plan.items
        names, counts = (
            [requests[item.seq].request_id for item in items],
            [item.count for item in items],
        )
        num_tokens = dict(zip(names, counts, strict=True))
        if len(num_tokens) < len(names):  # beams have the same name
            num_tokens = dict.fromkeys(names, 0)
            for name, count in zip(names, counts, strict=True):
                num_tokens[name] += count
        return events.StepPlanned(
            self._clock.now(),
            plan.step,
            sum(counts),
            self.token_budget,
            num_decoding=len(items) - num_prefilling,
            num_prefilling=num_prefilling,
            num_running=len(self.running),
            num_waiting=len(self.waiting.requests),
            num_free_pages=self.kv.num_free_pages,
            tokens_of=tuple(num_tokens.items()),
            drafts_of=self.draft_capacity.drafts_of(plan),
        )

    def _fill(self, plan: StepPlan, state: StepState) -> None:
        if self.policy.prefill_first:
            self.prefill(self._prompts(), plan, state)
            if plan.is_empty:
                self.decode(list(self.running), plan, state)
            return
        self.decode(list(self.running), plan, state)
        all_decode = len(plan.items) == len(self.running)
        self.prefill([] if all_decode else self._prompts(), plan, state)

    def _make_undecided_yield(self, plan: StepPlan, state: StepState) -> None:
        """Nothing runs but requests that are held: until others, on which they wait, get their rows
        and pages, take theirs."""
        while not plan.items and (
            undecided := [request for request in self.running if request.awaiting_choice]
        ):
            self.table.preempt(
                undecided[-1], "held, and those that it waits for have no slot or pages"
            )
            state.num_running = state.num_running_before = len(self.running)
            self._fill(plan, state)

    def commit(self, plan: StepPlan, sampled: Mapping[int, list[int]]) -> list[Progress]:
        """Take a step's results: of each row that samples, the drafts that were right and the token
        drawn after them. Requests that end leave at once."""
        now, self.table.committed = self._clock.now(), plan.step
        self.kv.offload.trust(plan.step + 1)
        progress: list[Progress] = []
        requests, has_finished = self.requests, False
        for item in plan.items:
            request = requests.get(item.seq)
            if request is None or request.epoch != item.epoch:
                continue  # aborted or preempted since the step was planned
            is_first = request.first_token_s is None
            if is_first and request.num_computed >= request.num_prompt:
                if request.children:
                    self.table.fork_children(request, now)
                if request.prefix_leases:
                    self.retention.take(request, has_ended=False)
            if not item.samples:
                continue
            own, kept, has_several = request.tokens, sampled[item.row], item.count > 1
            request.num_in_flight -= 1
            if has_several:
                request.num_in_flight -= item.num_drafts
                request.num_drafts_in_flight -= item.num_drafts
            if request.waits_for_tokens:
                request.awaiting_choice = request.params.beams is not None
            reason = None
            if (
                len(kept) == 1
                and kept[0] not in request.ends
                and len(own) - request.num_prompt < request.max_tokens - 1
            ):
                own.append(kept[0])  # nearly all: it goes on
            else:
                kept, reason = append(request, kept)
            if is_first:
                request.first_token_s = now
                self._emit(events.FirstToken(now, request.request_id, now - request.arrival_s))
            if reason:
                has_finished = True
                self.table.end(request, reason, now)
            elif has_several:
                self._pages.take_back_drafts(
                    request, item.num_drafts, item.num_drafts + 1 - len(kept)
                )
            progress.append(Progress(request, kept, reason, item.num_drafts))
        if has_finished:
            self.table.tell_what_is_left(now)
        return progress

    def _others_run_or_come(self, state: StepState) -> bool:
        """Requests that are not in the background."""
        if self.running and not self.running[0].in_background:
            return True
        return self.waiting.num_waiting(in_background=False) > 0 and self.policy.may_admit(state)

    # ---- running requests: one more token each

    def decode(self, requests: Iterable[Request], plan: StepPlan, state: StepState) -> None:
        """One more token for each. Most need nothing but a line in the plan: theirs is written
        here, as `_schedule` does it."""
        page_size, is_loading, running, items = (
            self.kv.page_size,
            self.kv.offload.num_loading > 0,
            Status.RUNNING,
            plan.items,
        )
        for request in requests:
            if state.num_left == 0 or (request.in_background and state.num_background_left <= 0):
                break
            start, num_in_flight = request.num_computed, request.num_in_flight
            end = num_known = len(request.tokens) + num_in_flight
            if num_known - start != 1 or request.status is not running:
                continue
            if num_known - request.num_prompt >= request.max_tokens:
                continue  # its last token is under way
            if request.awaiting_choice or (num_in_flight and request.waits_for_tokens):
                continue  # what comes next depends on the one under way
            if is_loading and self.kv.offload.is_loading(request.seq):
                continue
            if not request.is_plain:
                self._decode_further(request, plan, state)
                continue
            if end > request.writable_end:
                # A victim of preemption ranks after all that are scheduled so far, so it is not in
                # the plan yet.
                if not self._make_writable(request, 1):
                    continue
                request.writable_end = -(-end // page_size) * page_size
            request.account.num_served += 1
            items.append(StepItem(request.seq, request.row, start, 1, True, request.epoch))
            state.num_left -= 1
            request.num_computed = end
            request.num_in_flight = num_in_flight = num_in_flight + 1
            if end % page_size <= num_in_flight:
                self.kv.record(request.seq, request.tokens, end)

    def _decode_further(self, request: Request, plan: StepPlan, state: StepState) -> None:
        """One more token of a request that needs more than a line in the plan, and its drafts."""
        drafts = self.draft_capacity.take(request, state)
        end = request.num_computed + 1 + len(drafts)
        if end > request.writable_end:
            if not self._make_writable(request, 1 + len(drafts)):
                return
            request.writable_end = self._pages.writable_end(request, end)
        self._schedule(request, 1, plan, state, drafts)

    def _make_writable(self, request: Request, count: int, planned: Collection[int] = ()) -> bool:
        """Private pages for the next `count` tokens, preempting the lowest-ranked if there are
        none. False: that was itself, or one of those that are `planned` already."""
        while not self._pages.make_writable(request, count):
            victim = self._victim()
            if victim is self.running[0] and self.retention.give_up_a_pin(request):
                continue  # it runs alone
            if victim.seq in planned:
                return False
            self.table.preempt(victim, f"no free page for {request.request_id}")
            if victim is request:
                return False
        return True

    # ---- prompts: started ones first, then waiting ones while there is room

    def prefill(self, prompts: list[Request], plan: StepPlan, state: StepState) -> None:
        """Go on with these prompts, then start queued requests. The background comes last, within
        what it is allowed; while others wait, none of it starts."""
        if not prompts and not self.waiting.requests:
            return
        self._continue_prompts(prompts, plan, state, in_background=False)
        none_waits = self._start_waiting(plan, state, in_background=False)
        num_left, state.num_left = state.num_left, min(state.num_left, state.num_background_left)
        num_kept = num_left - state.num_left
        self._continue_prompts(prompts, plan, state, in_background=True)
        if none_waits and self.waiting.requests:
            self._start_waiting(plan, state, in_background=True)
        state.num_left += num_kept

    def _prompts(self) -> list[Request]:
        """The running requests with more than one token to compute."""
        return [
            request
            for request in self.running
            if len(request.tokens) + request.num_in_flight - request.num_computed > 1
        ]

    def _continue_prompts(
        self, prompts: list[Request], plan: StepPlan, state: StepState, in_background: bool
    ) -> None:
        for started in prompts:
            if state.num_left <= 0:
                return
            if started.status is Status.RUNNING and started.in_background is in_background:
                if self.kv.offload.is_loading(started.seq):
                    continue
                kept = self._kept_for_others(started, state)
                state.num_left -= kept
                count = self._chunk(started, started.num_needed, state)
                state.num_left += kept
                if count == 0:
                    return
                count = self._until_cut(started, count)
                if count and self._make_room_for_chunk(started, count, plan):
                    self._schedule(started, count, plan, state)

    def _kept_for_others(self, started: Request, state: StepState) -> int:
        """The tokens that a prompt of several steps leaves to others in each step: a short prompt
        of another tenant need not wait for its end."""
        if started.num_needed < state.num_left or not self.table.free_rows:
            return 0
        other = self.next_waiting()
        if (
            other is None
            or other.account is started.account
            or other.in_background is not started.in_background
        ):
            return 0
        num = self._pages.num_to_compute(other)
        return num if 2 * num <= state.num_left else 0

    def next_waiting(self) -> Request | None:
        """The request that starts next. Prefixes are compared only while one could start."""
        if not self.waiting.requests:
            return None
        return self.waiting.first(
            self._clock.now(),
            self._pages.num_cached if self._by_prefix and self.table.free_rows else None,
        )

    def _start_waiting(self, plan: StepPlan, state: StepState, in_background: bool) -> bool:
        """False: a request has to wait on."""
        while (
            request := self.next_waiting()
        ) is not None and request.in_background is in_background:
            obstacle = self.obstacle(request, state)
            if obstacle:
                self._defer(request, obstacle)
                return False
            if not self._admit(request):
                forked = self.table.forked
                nothing_goes_on = (
                    not self.running and not forked and not self.kv.offload.num_loading
                )
                if nothing_goes_on and self.retention.give_up_a_pin(request):
                    continue
                if self.running or not forked:
                    self._defer(
                        request,
                        "not enough free pages"
                        if self._evict
                        else "not enough free pages to run to its end",
                    )
                    return False
                # Else no request could ever run.
                self.table.preempt(forked[-1], f"no free page for {request.request_id}")
                continue
            state.num_running += 1
            count = self._chunk(request, request.num_needed, state) if state.num_left > 0 else 0
            if count and not self.kv.offload.is_loading(request.seq):
                count = self._until_cut(request, count)
                if not self._make_room_for_chunk(request, count, plan):
                    return False
                if count:
                    self._schedule(request, count, plan, state)
        return True

    def _until_cut(self, request: Request, count: int) -> int:
        """The number of a prompt's next tokens, of so many, after which it may be cut; 0: it waits
        for rows of embeddings."""
        count = self.kv.until_stop(request.seq, request.num_computed, count)
        return self.inputs.until(request, count) if request.spec.segments else count

    def _make_room_for_chunk(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Pages of the groups that take them as a prompt is computed; the others were taken when it
        was admitted. Preempts what ranks after it and is not in the plan. False: it has to wait for
        a later step, or was preempted itself."""
        return not (self.kv.has_windows or request.kv_policy) or self._make_writable(
            request, count, {item.seq for item in plan.items}
        )

    def obstacle(self, request: Request, state: StepState) -> str:
        """The reason, other than pages, why a queued request cannot start in this step; empty:
        there is none."""
        if not self.table.free_rows:
            return f"all {self.num_rows} slots are taken"
        if not self.policy.may_admit(state):
            return f"policy {self.policy.name}: no admission in this step"
        if self._lacks_bytes(request):
            return f"KV policies have {self._policy_bytes:,} bytes, of which too many are taken"
        if (
            state.num_left > 0
            and self._chunk(request, self._pages.num_to_compute(request), state) == 0
        ):
            what = (
                "what the background may compute beside others"
                if request.in_background
                else "the rest of this step's budget"
            )
            return f"does not fit {what}"
        return ""

    def _lacks_bytes(self, request: Request, leaving: Collection[Request] = ()) -> bool:
        """Tells if the bytes that it keeps beside its pages do not fit, also without those that
        leave."""
        if not request.extra_bytes:
            return False
        gone = {other.seq for other in leaving}
        taken = sum(other.extra_bytes for other in self.running if other.seq not in gone)
        return taken + request.extra_bytes > self._policy_bytes

    def _chunk(self, request: Request, num_needed: int, state: StepState) -> int:
        """The number of a prompt's tokens in this step. With a KV policy, a request that starts
        would not find the pages that this step computes: it starts in the next one, with all of
        them."""
        state.may_fill = not request.in_background and request.kv_policy is None
        count = self.policy.chunk(num_needed, state)
        return 0 if self._whole_prompts and count < num_needed else count

    def _admit(self, request: Request) -> bool:
        """Give a waiting request pages for all its tokens and a row. One page per running request
        is kept back for growth."""
        now = self._clock.now()
        forked = self.kv.holds(request.seq)
        start = self._pages.start(
            request, self._pages.reserve(request, self.running, to_the_end=not self._evict)
        )
        if start is None:
            return False
        reason, copies, by_tier = start
        if why_now := self.waiting.take(request, now):
            reason += f"; {why_now}"
        if forked:
            self.table.forked.remove(request)
        self.table.take_row(request)
        request.deferred_because = ""
        queued_s = now - request.arrival_s
        if request.started_s is None:
            request.started_s = now
        numbers = request.row, request.num_computed, request.num_known, queued_s
        self._emit(events.Admitted(now, request.request_id, *numbers, reason, *by_tier))
        self._pages.wait_for_loads(request, *by_tier)
        self._pages.copy(request, copies)
        self._pages.pending.rows[request.row] = request
        return True

    def _defer(self, request: Request, reason: str) -> None:
        if request.deferred_because != reason:
            request.deferred_because = reason
            self._emit(events.Deferred(self._clock.now(), request.request_id, reason))

    def _schedule(
        self,
        request: Request,
        count: int,
        plan: StepPlan,
        state: StepState,
        drafts: Sequence[int] = (),
    ) -> None:
        start = request.num_computed
        num_needed = len(request.tokens) + request.num_in_flight - start
        samples = count == num_needed
        if num_needed > 1:
            state.num_prefill_tokens += count
            state.num_prefilling += 1
        count += self.draft_capacity.put(request, drafts, plan)
        request.account.num_served += count
        if request.in_background:
            state.num_background_left -= count
            self._background.spend(count)
        plan.items.append(
            StepItem(request.seq, request.row, start, count, samples, request.epoch, len(drafts))
        )
        state.num_left -= count
        request.num_computed = start + count
        request.num_in_flight += samples + len(drafts)
        request.num_drafts_in_flight += len(drafts)
        self._pages.planned(request, start)

    # ---- making room

    def _make_way(self, state: StepState) -> None:
        """A waiting request may preempt running ones of strictly lower priority, or of a tenant
        with more than its part of the slots."""
        request = self.next_waiting() if self.policy.may_admit(state) else None
        if request is None:
            return
        lower, reason = preemption.lower(self.running, request), f"has priority {request.priority}"
        if not lower and not self.table.free_rows:
            num_tenants = self.waiting.num_tenants(request.in_background)
            lower = preemption.beyond_their_part(self.running, request, num_tenants, self.num_rows)
            reason = "is of a tenant with fewer slots"
        if not lower:
            return
        num_others = len(self.running) - len(lower)
        most = self.kv.num_free_pages + self.kv.num_freed_by([r.seq for r in lower])
        if self._pages.num_to_start(request) + num_others > most or self._lacks_bytes(
            request, lower
        ):
            return  # it would not fit even then
        while lower and not (
            self.table.free_rows
            and self._pages.num_to_start(request) + num_others + len(lower)
            <= self.kv.num_free_pages
            and not self._lacks_bytes(request)
        ):
            self.table.preempt(lower.pop(), f"{request.request_id} {reason}")

    def _victim(self) -> Request:
        """The request to preempt: queued samples that hold pages, then the running request of
        lowest priority that came last."""
        return self.table.forked[-1] if self.table.forked else self.running[-1]
