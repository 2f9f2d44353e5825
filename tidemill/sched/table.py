"""RequestTable: every live request, its row and its pages; how requests come, fork, lose their
pages and leave."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Moved
from tidemill.sched.clock import Clock
from tidemill.sched.encoding import EncoderOutputs
from tidemill.sched.pages import Pages
from tidemill.sched.plan import StepPlan, TokenWrite
from tidemill.sched.queue import WaitingQueue
from tidemill.sched.request import Request, RowSpec, Status
from tidemill.sched.retention import Retention
from tidemill.types import events
from tidemill.types.events import EventSink
from tidemill.types.kv_policy import CachePolicy
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Resumed, Submit


class RequestTable:
    """Owns every live request, its row and (through the KV manager) its pages."""

    def __init__(
        self,
        kv: KVManager,
        *,
        num_rows: int,
        max_context: int,
        clock: Clock,
        emit: EventSink,
        evict: bool = True,
        input_rows: int = 0,
        input_budget: int = 0,
    ) -> None:
        """`evict`: False: only what can run to its end is admitted, and none is preempted.
        `input_rows`: rows of embeddings that the runner holds, of which a step makes
        `input_budget`."""
        self.kv = kv
        self.num_rows = num_rows
        self.max_context = max_context
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by rank
        self._clock = clock
        self._emit = emit
        self.requests: dict[int, Request] = {}
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.pages = Pages(kv, clock, emit)
        self.inputs = EncoderOutputs(input_rows, input_budget, self.pages)
        self.forked: list[Request] = []  # queued samples that hold pages of their prompt, by place
        self._evict = evict
        self.retention = Retention(kv, clock, emit, evict)
        self._next_seq = 0
        self.committed = -1  # the last step whose results were taken

    def add(
        self,
        spec: Submit,
        *,
        adapter: int = -1,
        cache: CachePolicy | None = None,
        max_context: int | None = None,
    ) -> list[Request]:
        """Queue a request: one `Request` per sample, or per one that is resumed, which is computed
        like a preempted one. Samples after the first wait for its prompt and then share its pages.
        `adapter`: the slot of its LoRA adapter. `cache`: which tokens stay in its pages.
        `max_context`: its own, if it has one."""
        now, max_context = self._clock.now(), max_context or self.max_context
        num_prompt, n = len(spec.prompt_ids), spec.params.n
        assert 0 < num_prompt <= max_context, "checked by the engine"
        room = max(max_context - num_prompt, 1)  # a prompt that is pooled may fill the context
        most = room if spec.params.max_tokens is None else min(spec.params.max_tokens, room)
        eos, samples = frozenset(spec.eos_token_ids), list[Request]()
        for each in (
            [Resumed(index, []) for index in range(n)] if spec.resumed is None else spec.resumed
        ):
            num_output = len(each.output_ids)
            goes_on = spec.hands_over and num_output + 1 < most
            request = Request(
                request_id=spec.request_id if n == 1 else f"{spec.request_id}:{each.index}",
                seq=self._next_seq,
                tokens=[*spec.prompt_ids, *each.output_ids],
                spec=spec,
                row_spec=RowSpec(
                    spec.params.sample(each.index), num_prompt, eos, adapter, cache, spec.segments
                ),
                max_tokens=num_output + 1 if goes_on else most,
                arrival_s=now,
                parent=samples[0] if samples and spec.resumed is None else None,
                prefix_leases=() if samples else spec.prefix_leases,
                hands_over=goes_on,
            )
            self._next_seq += 1
            self.requests[request.seq] = request
            if request.parent is not None:
                request.parent.children.append(request)
            if spec.resumed is None:
                num_beams = spec.params.beams.width if spec.params.beams else 1
                self._emit(
                    events.Submitted(
                        now, request.request_id, num_prompt, spec.priority, spec.tenant, num_beams
                    )
                )
            else:
                request.first_token_s = now if num_output else None
                self._emit(events.Resumed(now, request.request_id, num_prompt, num_output))
            samples.append(request)
            self.waiting.join(request)
            self.waiting.push(request, now)
        return samples

    def fork(
        self, request: Request, request_id: str, params: SamplingParams | None = None
    ) -> Request:
        """Another request with the same tokens, at any point of a request's life. It shares the
        pages of what is computed, and each copies a shared page before it writes to it. It ranks
        right behind its source. If it is decoding and there is a row, it takes it at once; else it
        is queued. Where pages cannot be shared (states, windows that have moved on, a source that
        was preempted), it starts from what the prefix cache has. `params`: its own, the same as the
        source's if not given."""
        now, tokens = self._clock.now(), request.tokens
        child = request.fork(request_id, self._next_seq, params or request.params)
        self._next_seq += 1
        self.requests[child.seq] = child
        self.waiting.join(child)
        if child.parent is not None:
            child.parent.children.append(child)
        start, num_pages = min(request.num_computed, len(tokens) - 1), 0
        if start and self.kv.holds(request.seq) and self.kv.can_fork_at(request.seq, start):
            request.writable_end = 0
            child.num_computed = start
            num_pages = self.kv.fork(request.seq, child.seq, start)
        self._emit(events.Forked(now, request_id, request.request_id, num_pages))
        if (
            num_pages
            and child.num_needed == 1
            and request.status is Status.RUNNING
            and self.free_rows
        ):
            self.take_row(child)
            self.pages.pending.fork(
                child, request.row, self.kv.entries_beyond(request.seq, child.seq)
            )
            return child
        self.waiting.push(child, now)
        if num_pages:
            insort(self.forked, child, key=_place)
        return child

    def fork_children(self, request: Request, now: float) -> None:
        """The prompt is computed: its other samples share the pages of all but its last token,
        which each computes for itself. Where a page is a state, they start from the last one that
        the prefix cache has; where none is preempted, likewise: there queued samples hold no
        pages."""
        request.writable_end = 0  # not its own any more
        for child in request.children:
            can_share = self.kv.can_fork_from(request.seq) and self._evict
            num_shared = request.num_prompt - 1 if can_share else 0
            child.parent = None
            child.num_computed = child.num_cached = num_shared
            self.waiting.make_ready(child, now)
            if num_shared:
                num_pages = self.kv.fork(request.seq, child.seq, request.num_prompt)
                insort(self.forked, child, key=_place)
                self._emit(events.Forked(now, child.request_id, request.request_id, num_pages))
        request.children.clear()

    def choose(self, request: Request, token: int) -> None:
        """Chooses the latest token of a held request; the request goes on with it."""
        request.tokens[-1] = token
        request.path = None
        request.awaiting_choice = False
        if request.status is Status.RUNNING:
            self.pages.pending.token_writes[request.row] = TokenWrite(
                request.row, len(request.tokens) - 1, token
            )
        elif request.parent is None:
            self.waiting.make_ready(request, self._clock.now())

    def drop(self, request: Request) -> None:
        """Forget a fork that is not continued, while others of its family are: without an event of
        its own."""
        self._remove(request)

    def abort(self, request: Request, reason: str) -> None:
        """Forget a request at any moment; its row and pages are free at once."""
        if request.status is Status.FINISHED:
            return
        self._remove(request)
        now = self._clock.now()
        self._emit(events.Aborted(now, request.request_id, reason, request.num_output))
        self.tell_what_is_left(now)

    def discard(self, request: Request, reason: str) -> None:
        """Abort a request whose KV holds NaN: its pages are cleared before another sequence uses
        them."""
        self.clear(request)
        self.abort(request, reason)

    def clear(self, request: Request) -> None:
        """Take its pages from a request that ends, because they hold NaN."""
        if request.status is not Status.FINISHED and self.kv.holds(request.seq):
            pages = self.kv.discard(request.seq)
            self.pages.pending.page_zeroes += pages
            for row in self.pages.pending.rows_that_copy(pages):
                self.preempt(self.pages.pending.rows[row], "the page that it was to copy holds NaN")

    def compute_again(self, request: Request, reason: str) -> None:
        """Start over without drafts, on cleared pages: one of its drafts was NaN, which may have
        spread to what comes before it in the same step."""
        self.clear(request)
        self.preempt(request, reason)
        request.takes_drafts = False

    def finish(self, request: Request, reason: str) -> None:
        """End a request that has all it needs, between steps."""
        now = self._clock.now()
        self.end(request, reason, now)
        self.tell_what_is_left(now)

    def holders(self) -> list[Request]:
        """Requests that hold pages, in the order in which they came."""
        return [request for request in self.requests.values() if self.kv.holds(request.seq)]

    def take_row(self, request: Request) -> None:
        if self.running and self.running[-1].rank > request.rank:
            insort(self.running, request, key=_rank)
        else:
            self.running.append(request)
        request.row = self.free_rows.pop()
        request.status = Status.RUNNING

    def _leave_row(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.pages.pending.forget(request.row)
        if request.kv_policy is not None:
            self.pages.pending.left_rows.append(request.row)
        self.inputs.release(request.seq)
        request.row = -1

    def preempt(self, request: Request, reason: str, is_lost: bool = False) -> None:
        """Take away pages and row; the request returns to its old place in the queue and is
        computed again, as far as its pages are not found in the prefix cache or behind it.
        `is_lost`: they will not be."""
        now = self._clock.now()
        drafted = self._pages_with_drafts(request)
        leaving = self.kv.preempt(request.seq, is_lost) if self.kv.holds(request.seq) else None
        self.pages.pending.page_zeroes += self.kv.unused(drafted)
        reason_and_swap = ("", False) if leaving is None else (leaving.reason, leaving.is_swap)
        self._emit(
            events.Preempted(
                now, request.request_id, request.num_computed, reason, *reason_and_swap
            )
        )
        request.num_computed = 0
        request.num_in_flight = request.num_drafts_in_flight = 0
        request.drafts = ()
        request.writable_end = 0
        request.path = None
        request.epoch += 1
        if request.status is Status.RUNNING:
            self._leave_row(request)
            request.status = Status.WAITING
            self.waiting.push(request, now)
        else:
            self.forked.remove(request)

    def _pages_with_drafts(self, request: Request) -> list[int]:
        """That a step in flight writes. If it gives them up now, nobody will look whether the
        drafts are NaN: they are cleared after that step, before another sequence has them."""
        if request.drafted_step <= self.committed or not self.kv.holds(request.seq):
            return []
        first, tables = len(request.tokens) - 1, self.kv.tables(request.seq)
        return [
            page
            for group, table in zip(self.kv.groups, tables, strict=True)
            for page in table[first // group.page_size :]
        ]

    def drop_computed(self, reason: str, lost: Iterable[StepPlan] = ()) -> None:
        """Nothing that was computed can be trusted: all requests start over, with an empty prefix
        cache. `lost`: plans of which the runner may know nothing: what they were to clear and which
        rows they were to end is told again."""
        for plan in lost:
            self.pages.pending.page_zeroes += plan.page_zeroes
            self.pages.pending.left_rows += plan.left_rows
        for request in [*self.running, *self.waiting]:
            if self.kv.holds(request.seq):
                self.preempt(request, reason, is_lost=True)
        self.retention.clear(reason)
        self.kv.clear_prefixes()
        self.kv.offload.fail_moves()
        self.inputs.clear()

    def moved(self, done: Sequence[Moved]) -> None:
        """Page moves are over. Requests whose pages are there can go on; where a load has failed,
        they are computed again."""
        for seq, why in self.pages.moved(done):
            self.preempt(self.requests[seq], f"a page could not be loaded: {why}")
        if any(result.error for result in done):
            self.retention.loads_failed()

    def end(self, request: Request, reason: str, now: float) -> None:
        if request.prefix_leases and self.kv.holds(request.seq):
            self.retention.take(request, has_ended=True)
        self._remove(request)
        counts = (request.num_prompt, request.num_output, request.num_cached)
        self._emit(events.Finished(now, request.request_id, reason, *counts, *request.spans(now)))

    def _remove(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
            if request in self.forked:
                self.forked.remove(request)
        if self.kv.holds(request.seq):
            drafted = self._pages_with_drafts(request)
            self.kv.release(request.seq)
            self.pages.pending.page_zeroes += self.kv.unused(drafted)
        self.kv.offload.is_gone(request.seq)
        if heir := request.leave_family():
            self.waiting.make_ready(heir, self._clock.now())
        request.status = Status.FINISHED
        self.waiting.leave(request)
        del self.requests[request.seq]

    def tell_what_is_left(self, now: float) -> None:
        self._emit(
            events.RequestsLeft(
                now, len(self.running), len(self.waiting.requests), self.kv.num_free_pages
            )
        )

    def check_integrity(self) -> None:
        """Rows, queues and pages agree."""
        self.kv.check_integrity()
        self.inputs.check_integrity()
        assert self.running == sorted(self.running, key=_rank)
        self.waiting.check_integrity()
        assert self.forked == [r for r in self.waiting if self.kv.holds(r.seq)]
        assert {r.seq for r in self.running} | {r.seq for r in self.waiting} == set(self.requests)
        rows = [r.row for r in self.running]
        assert sorted(rows + self.free_rows) == list(range(self.num_rows)), (
            "a row is lost or taken twice"
        )
        self.pages.pending.check_integrity(rows)
        assert not any(
            request.awaiting_choice and request.num_in_flight for request in self.running
        )
        for request in self.running:
            assert self.kv.holds(request.seq)
            for group, pages in zip(self.kv.groups, self.kv.tables(request.seq), strict=True):
                num_slots, policy = request.num_computed, request.kv_policy
                num_slots = num_slots if policy is None else policy.num_slots(num_slots)
                assert group.num_pages_for(num_slots) <= len(pages)
                assert all(pages[group.first_needed(request.num_computed) :]), (
                    "a page that is needed was given back"
                )
        assert self.kv.sequences <= self.requests.keys(), "pages leaked"


def _rank(request: Request) -> tuple[bool, bool, int, int, int]:
    return request.rank


def _place(request: Request) -> tuple[int, int, int]:
    return request.place
