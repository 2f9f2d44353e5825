"""The phase-free scheduler: each step gives each chosen request n more tokens to compute until `num_computed` catches up.

Chunked prefill, prefix hits, preemption and drafts of tokens to come are all this one rule. `plan()` decides a step,
`commit()` takes its results; between the two another step may be planned, since `num_computed` is advanced by the plan. Only a
request whose drafts are being verified waits for the result: how many tokens it will have is not known before.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence

from tidemill import events
from tidemill.events import EventSink
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Moved
from tidemill.kv_policy import CachePolicy
from tidemill.sampling import SamplingParams
from tidemill.sched import preemption
from tidemill.sched.background import Background
from tidemill.sched.clock import Clock
from tidemill.sched.pages import Pages
from tidemill.sched.plan import StepItem, StepPlan, TokenWrite
from tidemill.sched.policies import Policy, StepState
from tidemill.sched.progress import Progress, append
from tidemill.sched.queue import WaitingQueue
from tidemill.sched.request import Request, Status
from tidemill.sched.retention import Retention
from tidemill.sched.tree import Tree
from tidemill.wire import Hold


class Scheduler:
    """Owns every live request, its row and (through the KV manager) its pages."""

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
    ) -> None:
        """`background_tokens`: how many tokens a step, on average, background requests get beside others. `background_budget`:
        how many alone; it is smaller than `token_budget`, since a request that arrives waits for the step to end.
        `whole_prompts`: a prompt is computed in one step, never cut; the budget holds the longest. `max_draws`: how many tokens
        the runner can draw in a step, drafts included. `order`: of queued requests, one of `queue.ORDERS`. `evict`: False: only
        what can run to its end is admitted, and none is preempted."""
        self.kv = kv
        self.policy = policy
        self.num_rows = num_rows
        self.token_budget = token_budget
        self.max_context = max_context
        self.max_draws = max_draws or token_budget
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by rank
        self._clock = clock
        self._emit = emit
        self._requests: dict[int, Request] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._pages = Pages(kv, clock, emit)
        self._forked: list[Request] = []  # queued samples that hold pages of their prompt, by place
        most_saved = token_budget if whole_prompts else max(background_tokens, 1.0)
        self._background = Background(background_tokens, background_budget or token_budget, most_saved)
        self._whole_prompts = whole_prompts
        self._by_prefix = order == "prefix"
        self._evict = evict
        self.retention = Retention(kv, clock, emit, evict)
        self._next_seq = 0
        self._step = 0

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        salt: str = "",
        arrival_s: float | None = None,
        tenant: str = "",
        adapter: int = -1,
        cache: CachePolicy | None = None,
        max_context: int | None = None,
        resumed: Mapping[int, Sequence[int]] | None = None,
        holds: Sequence[Hold] = (),
    ) -> list[Request]:
        """Queue a request: one `Request` per sample. Samples after the first wait for its prompt and then share its pages.
        `resumed`: only these samples, each from the output it has; they are computed like preempted ones. `cache`: which tokens
        stay in its pages. `max_context`: its own, if it has one. `holds`: of prefixes of the first sample."""
        now, max_context = self._clock.now(), max_context or self.max_context
        assert 0 < len(prompt_ids) <= max_context, "checked by the engine"
        room = max_context - len(prompt_ids)
        made: list[Request] = []
        for index in range(params.n) if resumed is None else resumed:
            request = Request(
                request_id=request_id if params.n == 1 else f"{request_id}:{index}",
                seq=self._next_seq,
                tokens=list(prompt_ids),
                params=params.sample(index),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                arrival_s=now if arrival_s is None else arrival_s,
                eos_token_ids=eos_token_ids,
                priority=priority,
                salt=salt,
                tenant=tenant,
                adapter=adapter,
                cache=cache,
                parent=made[0] if made and resumed is None else None,
                holds=() if made else holds,
            )
            self._next_seq += 1
            self._requests[request.seq] = request
            if made and resumed is None:
                made[0].children.append(request)
            if resumed is None:
                num_beams = params.beams.width if params.beams else 1
                self._emit(events.Submitted(now, request.request_id, request.num_prompt, priority, tenant, num_beams))
            else:
                request.tokens += resumed[index]
                request.first_token_s = now if resumed[index] else None
                self._emit(events.Resumed(now, request.request_id, request.num_prompt, request.num_output))
            made.append(request)
            self.waiting.join(request)
            self.waiting.push(request, now)
        return made

    def fork(self, request: Request, request_id: str, params: SamplingParams | None = None) -> Request:
        """Another request with the same tokens, at any point of a request's life. It shares the pages of what is computed, and
        each copies a shared page before it writes to it. It ranks right behind its source. If it is decoding and there is a row,
        it takes it at once; else it is queued. Where pages cannot be shared (states, windows that have moved on, a source that
        was preempted), it starts from what the prefix cache has.
        `params`: its own, the same as the source's if not given."""
        now, tokens = self._clock.now(), request.tokens
        child = request.fork(request_id, self._next_seq, params or request.params)
        self._next_seq += 1
        self._requests[child.seq] = child
        self.waiting.join(child)
        if child.parent is not None:
            child.parent.children.append(child)
        start, num_pages = min(request.num_computed, len(tokens) - 1), 0
        if start and self.kv.holds(request.seq) and self.kv.can_fork_at(request.seq, start):
            request.writable_end = 0
            child.num_computed = start
            num_pages = self.kv.fork(request.seq, child.seq, start)
        self._emit(events.Forked(now, request_id, request.request_id, num_pages))
        if num_pages and child.num_needed == 1 and request.status is Status.RUNNING and self._free_rows:
            self._take_row(child)
            self._pages.unsent.fork(child, request.row, self.kv.entries_beyond(request.seq, child.seq))
            return child
        self.waiting.push(child, now)
        if num_pages:
            insort(self._forked, child, key=_place)
        return child

    def choose(self, request: Request, token: int) -> None:
        """What the latest token of a held request is to be; it goes on with it."""
        request.tokens[-1] = token
        request.path = None
        request.is_held = False
        if request.status is Status.RUNNING:
            self._pages.unsent.token_writes[request.row] = TokenWrite(request.row, len(request.tokens) - 1, token)
        elif request.parent is None:
            self.waiting.make_ready(request, self._clock.now())

    def drop(self, request: Request) -> None:
        """Forget a fork that is not continued, while others of its family are: without an event of its own."""
        self._remove(request)

    def abort(self, request: Request, reason: str) -> None:
        """Forget a request at any moment; its row and pages are free at once."""
        if request.status is Status.FINISHED:
            return
        self._remove(request)
        now = self._clock.now()
        self._emit(events.Aborted(now, request.request_id, reason, request.num_output))
        self._emit_what_is_left(now)

    def discard(self, request: Request, reason: str) -> None:
        """Abort a request whose KV holds NaN: its pages are cleared before another sequence uses them."""
        self.clear(request)
        self.abort(request, reason)

    def clear(self, request: Request) -> None:
        """Take its pages from a request that ends, because they hold NaN."""
        if request.status is not Status.FINISHED and self.kv.holds(request.seq):
            pages = self.kv.discard(request.seq)
            self._pages.unsent.page_zeroes += pages
            for row in self._pages.unsent.rows_that_copy(pages):
                self._preempt(self._pages.unsent.rows[row], "the page that it was to copy holds NaN")

    def compute_again(self, request: Request, reason: str) -> None:
        """Start over without drafts, on cleared pages: one of its drafts was NaN, which may have spread to what comes before it
        in the same step."""
        self.clear(request)
        self._preempt(request, reason)
        request.takes_drafts = False

    def finish(self, request: Request, reason: str) -> None:
        """End a request that has all it needs, between steps."""
        now = self._clock.now()
        self._finish(request, reason, now)
        self._emit_what_is_left(now)

    @property
    def room_for_drafts(self) -> int:
        """Draws that no request needs for a token of its own, those that may start in this step included; while prompts are to be
        computed, half of the budget stays theirs."""
        room = self.max_draws - min(self.num_rows, len(self._requests))
        left = self.token_budget - len(self.running)
        has_prompts = bool(self.waiting) or any(request.num_needed > 1 for request in self.running)
        return max(min(room, left // 2 if has_prompts else left), 0)

    def holders(self) -> list[Request]:
        """Requests that hold pages, in the order in which they came."""
        return [request for request in self._requests.values() if self.kv.holds(request.seq)]

    # ---- a step

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None if nothing can run. It has no items if pages are to be moved and nothing can run."""
        if not self.has_work:
            return self.plan_moves()
        self.kv.begin_step(self._step)
        self.retention.expire()
        plan = StepPlan(self._step)
        evicted_before, stored_before = self.kv.num_evicted, self.kv.num_stored
        state = StepState(self.token_budget, self.token_budget, len(self.running), len(self.running))
        state.num_waiting, state.num_rows, state.waited_s = len(self.waiting), self.num_rows, self._waited_s()
        state.num_background_left = self._background.allow(is_alone=not self._others_run_or_come(state))
        if self._evict:
            self._make_way(state)
        self._fill(plan, state)
        if not plan.items and not any(request.num_in_flight for request in self.running):
            state.num_background_left = self._background.budget  # no other request can use this step
            self._fill(plan, state)
            self._make_held_yield(plan, state)
        num_evicted = self.kv.num_evicted - evicted_before
        if num_evicted:
            num_stored = self.kv.num_stored - stored_before
            self._emit(events.PagesEvicted(self._clock.now(), num_evicted, "least recently used, to make room", num_stored))
        if not plan.items:
            return self._pages.moves_only(plan)
        self._step += 1
        self._pages.send_with(plan)
        self._emit(self._planned(plan))
        return plan

    @property
    def idle_s(self) -> float:
        """After a plan of nothing: how long until one may have something, if no request comes, because a batch is forming."""
        return 0.0 if self.running or not self.waiting else max(self.policy.window_s - self._waited_s(), 0.0)

    def _waited_s(self) -> float:
        """By the request that was queued first, if it matters."""
        return self.waiting.waited_s(self._clock.now()) if self.policy.window_s else 0.0

    def plan_moves(self) -> StepPlan | None:
        """A step that computes nothing, if there are pages to move."""
        return self._pages.moves_only(StepPlan(self._step))

    def _planned(self, plan: StepPlan) -> events.StepPlanned:
        num_prefilling = sum(1 for item in plan.items if item.count > item.num_drafts + 1 or not item.samples)
        num_tokens: dict[str, int] = {}  # by request id; beams have the same
        for item in plan.items:
            request_id = self._requests[item.seq].request_id
            num_tokens[request_id] = num_tokens.get(request_id, 0) + item.count
        return events.StepPlanned(
            self._clock.now(),
            plan.step,
            plan.num_tokens,
            self.token_budget,
            num_decoding=len(plan.items) - num_prefilling,
            num_prefilling=num_prefilling,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_pages=self.kv.num_free_pages,
            tokens_of=tuple(num_tokens.items()),
            drafts_of=tuple((self._requests[i.seq].request_id, i.num_drafts) for i in plan.items if i.num_drafts),
        )

    def _fill(self, plan: StepPlan, state: StepState) -> None:
        if self.policy.prefill_first:
            self._plan_prefill(plan, state)
            if not plan.items:
                self._plan_decode(plan, state)
        else:
            self._plan_decode(plan, state)
            self._plan_prefill(plan, state)

    def _make_held_yield(self, plan: StepPlan, state: StepState) -> None:
        """Nothing runs but requests that are held: until others, on which they wait, get their rows and pages, take theirs."""
        while not plan.items and (held := [request for request in self.running if request.is_held]):
            self._preempt(held[-1], "held, and those that it waits for have no slot or pages")
            state.num_running = state.num_running_before = len(self.running)
            self._fill(plan, state)

    def commit(self, plan: StepPlan, sampled: Mapping[int, Sequence[int]]) -> list[Progress]:
        """Take a step's results: of each row that samples, the drafts that were right and the token drawn after them. Requests
        that end leave at once."""
        now = self._clock.now()
        self.kv.trust(plan.step + 1)
        progress: list[Progress] = []
        for item in plan.items:
            request = self._requests.get(item.seq)
            if request is None or request.epoch != item.epoch:
                continue  # aborted or preempted since the step was planned
            if request.children and request.num_computed >= request.num_prompt:
                self._fork_children(request, now)
            if request.holds and request.first_token_s is None and request.num_computed >= request.num_prompt:
                self.retention.take(request, has_ended=False)
            if not item.samples:
                continue
            request.num_in_flight -= 1
            request.is_held = request.params.beams is not None
            kept, reason = append(request, sampled[item.row])
            if request.first_token_s is None:
                request.first_token_s = now
                self._emit(events.FirstToken(now, request.request_id, now - request.arrival_s))
            if reason:
                self._finish(request, reason, now)
            elif item.num_drafts:
                self._pages.take_back_drafts(request)
            progress.append(Progress(request, kept, reason, item.num_drafts))
        if any(done.finish_reason for done in progress):
            self._emit_what_is_left(now)
        return progress

    def _others_run_or_come(self, state: StepState) -> bool:
        """Requests that are not in the background."""
        if self.running and not self.running[0].in_background:
            return True
        return self.waiting.num_waiting(in_background=False) > 0 and self.policy.may_admit(state)

    # ---- running requests: one more token each

    def _plan_decode(self, plan: StepPlan, state: StepState) -> None:
        """One more token for each. Most need nothing but a line in the plan, so this loop does little else."""
        page_size = self.kv.page_size
        for request in list(self.running):
            if state.num_left == 0 or (state.num_background_left <= 0 and request.in_background):
                break
            if request.status is not Status.RUNNING or request.num_needed != 1:
                continue
            if request.num_output + request.num_in_flight >= request.max_tokens:
                continue  # its last token is under way
            if request.is_held or (request.num_in_flight and request.params.waits_for_tokens):
                continue  # what comes next depends on the one under way
            if self.kv.is_loading(request.seq):
                continue
            drafts = self._drafts_of(request, state) if request.drafts else ()
            end = request.num_computed + 1 + len(drafts)
            if end > request.writable_end:
                # A victim of preemption ranks after all that are scheduled so far, so it is not in the plan yet.
                if not self._make_writable(request, 1 + len(drafts)):
                    continue
                request.writable_end = -(-end // page_size) * page_size if request.cache is None else end
            self._schedule(request, 1, plan, state, drafts)

    def _drafts_of(self, request: Request, state: StepState) -> Sequence[int]:
        """As many as fit: nobody else's token, page or output limit is touched for a guess."""
        drafts, request.drafts = request.drafts, ()
        if request.num_in_flight:
            return ()  # they follow a token that is not known yet
        if state.num_drafts_left is None:
            state.num_drafts_left = self.room_for_drafts
        drafts = drafts[: max(min(request.max_tokens - request.num_output - 1, state.num_drafts_left), 0)]
        end = request.num_computed + 1 + len(drafts)
        if end > request.writable_end:
            num_pages = (len(self.running) + len(drafts) // self.kv.page_size + 1) * len(self.kv.groups)
            if self.kv.num_free_pages < num_pages:  # others need theirs in this step
                return ()
            if not self._pages.make_writable(request, 1 + len(drafts)):
                self._pages.shrink(request, request.num_computed + 1)
                return ()
        state.num_drafts_left -= len(drafts)
        return drafts

    def _make_writable(self, request: Request, count: int, planned: Collection[int] = ()) -> bool:
        """Private pages for the next `count` tokens, preempting the lowest-ranked if there are none. False: that was itself, or
        one of those that are `planned` already."""
        while not self._pages.make_writable(request, count):
            victim = self._victim()
            if victim is self.running[0] and self.retention.give_up_a_pin(request):
                continue  # it runs alone
            if victim.seq in planned:
                return False
            self._preempt(victim, f"no free page for {request.request_id}")
            if victim is request:
                return False
        return True

    # ---- prompts: started ones first, then waiting ones while there is room

    def _plan_prefill(self, plan: StepPlan, state: StepState) -> None:
        """The background comes last, within what it is allowed; while others wait, none of it starts."""
        self._continue_prompts(plan, state, in_background=False)
        none_waits = self._start_waiting(plan, state, in_background=False)
        num_left, state.num_left = state.num_left, min(state.num_left, state.num_background_left)
        num_kept = num_left - state.num_left
        self._continue_prompts(plan, state, in_background=True)
        if none_waits:
            self._start_waiting(plan, state, in_background=True)
        state.num_left += num_kept

    def _continue_prompts(self, plan: StepPlan, state: StepState, in_background: bool) -> None:
        for started in list(self.running):
            if state.num_left <= 0:
                return
            if started.status is Status.RUNNING and started.num_needed > 1 and started.in_background is in_background:
                if self.kv.is_loading(started.seq):
                    continue
                kept = self._kept_for_others(started, state)
                state.num_left -= kept
                count = self._chunk(started.num_needed, state)
                state.num_left += kept
                if count == 0:
                    return
                count = self.kv.until_stop(started.seq, started.num_computed, count)
                if self._make_room_for_chunk(started, count, plan):
                    self._schedule(started, count, plan, state)

    def _kept_for_others(self, started: Request, state: StepState) -> int:
        """What a prompt that takes several steps leaves of each: a short prompt of another tenant need not wait for its end."""
        if started.num_needed < state.num_left or not self._free_rows:
            return 0
        other = self._next_waiting()
        if other is None or other.account is started.account or other.in_background is not started.in_background:
            return 0
        num = self._pages.num_to_compute(other)
        return num if 2 * num <= state.num_left else 0

    def _next_waiting(self) -> Request | None:
        """The request that starts next. Prefixes are compared only while one could start."""
        return self.waiting.first(self._clock.now(), self._pages.num_cached if self._by_prefix and self._free_rows else None)

    def _start_waiting(self, plan: StepPlan, state: StepState, in_background: bool) -> bool:
        """False: a request has to wait on."""
        while (request := self._next_waiting()) is not None and request.in_background is in_background:
            obstacle = self._obstacle(request, state)
            if obstacle:
                self._defer(request, obstacle)
                return False
            if not self._admit(request):
                if not self.running and not self._forked and not self.kv.num_loading and self.retention.give_up_a_pin(request):
                    continue
                if self.running or not self._forked:
                    self._defer(request, "not enough free pages" if self._evict else "not enough free pages to run to its end")
                    return False
                self._preempt(self._forked[-1], f"no free page for {request.request_id}")  # else no request could ever run
                continue
            state.num_running += 1
            count = self._chunk(request.num_needed, state) if state.num_left > 0 else 0
            if count and not self.kv.is_loading(request.seq):
                count = self.kv.until_stop(request.seq, request.num_computed, count)
                if not self._make_room_for_chunk(request, count, plan):
                    return False
                self._schedule(request, count, plan, state)
        return True

    def _make_room_for_chunk(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Pages of the groups that take them as a prompt is computed; the others were taken when it was admitted. Preempts what
        ranks after it and is not in the plan. False: it has to wait for a later step, or was preempted itself."""
        return not (self.kv.has_windows or request.cache) or self._make_writable(
            request, count, {item.seq for item in plan.items}
        )

    def _obstacle(self, request: Request, state: StepState) -> str:
        if not self._free_rows:
            return f"all {self.num_rows} slots are taken"
        if not self.policy.may_admit(state):
            return f"policy {self.policy.name}: no admission in this step"
        if state.num_left > 0 and self._chunk(self._pages.num_to_compute(request), state) == 0:
            return "does not fit the rest of this step's budget"
        return ""

    def _chunk(self, num_needed: int, state: StepState) -> int:
        count = self.policy.chunk(num_needed, state)
        return 0 if self._whole_prompts and count < num_needed else count

    def _admit(self, request: Request) -> bool:
        """Give a waiting request pages for all its tokens and a row. One page per running request is kept back for growth."""
        now = self._clock.now()
        forked = self.kv.holds(request.seq)
        start = self._pages.start(request, self._pages.reserve(request, self.running, to_the_end=not self._evict))
        if start is None:
            return False
        reason, copies, by_tier = start
        if why_now := self.waiting.take(request, now):
            reason += f"; {why_now}"
        if forked:
            self._forked.remove(request)
        self._take_row(request)
        request.deferred_because = ""
        queued_s = now - request.arrival_s
        if request.started_s is None:
            request.started_s = now
        numbers = request.row, request.num_computed, request.num_known, queued_s
        self._emit(events.Admitted(now, request.request_id, *numbers, reason, *by_tier))
        self._pages.wait_for_loads(request, *by_tier)
        self._pages.copy(request, copies)
        self._pages.unsent.rows[request.row] = request
        return True

    def _take_row(self, request: Request) -> None:
        insort(self.running, request, key=_rank)
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING

    def _defer(self, request: Request, reason: str) -> None:
        if request.deferred_because != reason:
            request.deferred_because = reason
            self._emit(events.Deferred(self._clock.now(), request.request_id, reason))

    def _schedule(self, request: Request, count: int, plan: StepPlan, state: StepState, drafts: Sequence[int] = ()) -> None:
        samples = count == request.num_needed
        if request.num_needed > 1:
            state.num_prefill_tokens += count
        if drafts:
            request.had_drafts = True
            plan.drafts[request.row] = list(drafts)
            if isinstance(drafts, Tree):
                plan.trees[request.row] = list(drafts.parents)
            count += len(drafts)
        request.account.num_served += count
        if request.in_background:
            state.num_background_left -= count
            self._background.spend(count)
        plan.items.append(StepItem(request.seq, request.row, request.num_computed, count, samples, request.epoch, len(drafts)))
        state.num_left -= count
        if request.cache is not None and (num := request.cache.num_given_up(request.num_computed, request.num_computed + count)):
            end, why = request.num_computed + count, f"kv_policy {request.cache.kind}"
            self._emit(events.TokensEvicted(self._clock.now(), request.request_id, num, end, why))
        request.num_computed += count
        request.num_in_flight += samples
        # A page can be cached once it is full of tokens that are known here; between two page ends there is nothing to record.
        if count > 1 or request.num_computed % self.kv.page_size <= request.num_in_flight:
            self.kv.record(request.seq, request.tokens, request.num_computed)

    # ---- samples of one prompt

    def _fork_children(self, request: Request, now: float) -> None:
        """The prompt is computed: its other samples share the pages of all but its last token, which each computes for itself.
        Where a page is a state, they start from the last one that the prefix cache has; where none is preempted, likewise: there
        queued samples hold no pages."""
        request.writable_end = 0  # not its own any more
        for child in request.children:
            can_share = self.kv.can_fork_from(request.seq) and self._evict
            num_shared = request.num_prompt - 1 if can_share else 0
            child.parent = None
            child.num_computed = child.num_cached = num_shared
            self.waiting.make_ready(child, now)
            if num_shared:
                num_pages = self.kv.fork(request.seq, child.seq, request.num_prompt)
                insort(self._forked, child, key=_place)
                self._emit(events.Forked(now, child.request_id, request.request_id, num_pages))
        request.children.clear()

    # ---- making room

    def _make_way(self, state: StepState) -> None:
        """A waiting request may preempt running ones of strictly lower priority, or of a tenant with more than its part of the
        slots."""
        request = self._next_waiting() if self.policy.may_admit(state) else None
        if request is None:
            return
        lower, reason = preemption.lower(self.running, request), f"has priority {request.priority}"
        if not lower and not self._free_rows:
            num_tenants = self.waiting.num_tenants(request.in_background)
            lower = preemption.beyond_their_part(self.running, request, num_tenants, self.num_rows)
            reason = "is of a tenant with fewer slots"
        if not lower:
            return
        num_others = len(self.running) - len(lower)
        most = self.kv.num_free_pages + self.kv.num_freed_by([r.seq for r in lower])
        if self._pages.num_to_start(request) + num_others > most:
            return  # it would not fit even then
        while lower and not (
            self._free_rows and self._pages.num_to_start(request) + num_others + len(lower) <= self.kv.num_free_pages
        ):
            self._preempt(lower.pop(), f"{request.request_id} {reason}")

    def _victim(self) -> Request:
        """What to preempt: queued samples that hold pages, then the running request of lowest priority that came last."""
        return self._forked[-1] if self._forked else self.running[-1]

    def _preempt(self, request: Request, reason: str, is_lost: bool = False) -> None:
        """Take away pages and row; the request returns to its old place in the queue and is computed again, as far as its pages
        are not found in the prefix cache or behind it. `is_lost`: they will not be."""
        now = self._clock.now()
        leaving = self.kv.preempt(request.seq, is_lost) if self.kv.holds(request.seq) else None
        how = ("", False) if leaving is None else (leaving.reason, leaving.is_swap)
        self._emit(events.Preempted(now, request.request_id, request.num_computed, reason, *how))
        request.num_computed = 0
        request.num_in_flight = 0
        request.drafts = ()
        request.writable_end = 0
        request.path = None
        request.epoch += 1
        if request.status is Status.RUNNING:
            self._leave_row(request)
            request.status = Status.WAITING
            self.waiting.push(request, now)
        else:
            self._forked.remove(request)

    def _leave_row(self, request: Request) -> None:
        self.running.remove(request)
        self._free_rows.append(request.row)
        self._pages.unsent.forget(request.row)
        request.row = -1

    def drop_computed(self, reason: str, page_zeroes: Iterable[int] = ()) -> None:
        """Nothing that was computed can be trusted: all requests start over, with an empty prefix cache. `page_zeroes`: pages
        that plans were to clear and that may not have been."""
        self._pages.unsent.page_zeroes += page_zeroes
        for request in [*self.running, *self.waiting]:
            if self.kv.holds(request.seq):
                self._preempt(request, reason, is_lost=True)
        self.retention.clear(reason)
        self.kv.clear_prefixes()
        self.kv.fail_moves()

    def moved(self, done: Sequence[Moved]) -> None:
        """Page moves are over. Requests whose pages are there can go on; where a load has failed, they are computed again."""
        for seq, why in self._pages.moved(done):
            self._preempt(self._requests[seq], f"a page could not be loaded: {why}")

    # ---- the end

    def _finish(self, request: Request, reason: str, now: float) -> None:
        if request.holds and self.kv.holds(request.seq):
            self.retention.take(request, has_ended=True)
        self._remove(request)
        counts = (request.num_prompt, request.num_output, request.num_cached)
        self._emit(events.Finished(now, request.request_id, reason, *counts, *request.spans(now)))

    def _remove(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
            if request in self._forked:
                self._forked.remove(request)
        if self.kv.holds(request.seq):
            self.kv.release(request.seq)
        self.kv.is_gone(request.seq)
        if heir := request.leave_family():
            self.waiting.make_ready(heir, self._clock.now())
        request.status = Status.FINISHED
        self.waiting.leave(request)
        del self._requests[request.seq]

    def _emit_what_is_left(self, now: float) -> None:
        self._emit(events.RequestsLeft(now, len(self.running), len(self.waiting), self.kv.num_free_pages))

    def check_integrity(self) -> None:
        """Rows, queues and pages agree."""
        self.kv.check_integrity()
        assert self.running == sorted(self.running, key=_rank)
        self.waiting.check_integrity()
        assert self._forked == [r for r in self.waiting if self.kv.holds(r.seq)]
        assert {r.seq for r in self.running} | {r.seq for r in self.waiting} == set(self._requests)
        rows = [r.row for r in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.num_rows)), "a row is lost or taken twice"
        self._pages.unsent.check_integrity(rows)
        assert not any(request.is_held and request.num_in_flight for request in self.running)
        for request in self.running:
            assert self.kv.holds(request.seq)
            for group, pages in zip(self.kv.groups, self.kv.tables(request.seq), strict=True):
                num_slots = request.num_computed if request.cache is None else request.cache.num_slots(request.num_computed)
                assert group.num_pages_for(num_slots) <= len(pages)
                assert all(pages[group.first_needed(request.num_computed) :]), "a page that is needed was given back"
        if not self._requests:
            num_owned = self.kv.num_loading + self.kv.held.num_pinned
            assert self.kv.num_free_pages + num_owned == self.kv.num_pages, "pages leaked"


def _rank(request: Request) -> tuple[bool, bool, int, int, int]:
    return request.rank


def _place(request: Request) -> tuple[int, int, int]:
    return request.place
