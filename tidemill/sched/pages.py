"""The pages of requests: before they start, before a step writes to them, and what the runner has
not been told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidemill.kv.groups import PageChange
from tidemill.kv.manager import KVManager
from tidemill.kv.prefix import Path
from tidemill.kv.tiers import Moved
from tidemill.sched.clock import Clock
from tidemill.sched.plan import PendingUpdates, StepPlan
from tidemill.sched.request import Request
from tidemill.types import events
from tidemill.types.events import EventSink


class Pages:
    """Page tables as the runner has them: each change is noted until a plan sends it."""

    def __init__(self, kv: KVManager, clock: Clock, emit: EventSink) -> None:
        self.pending = PendingUpdates()
        self._kv = kv
        self._clock = clock
        self._emit = emit

        self._loading: dict[int, tuple[Request, float]] = {}  # by seq, and since when

    def send_with(self, plan: StepPlan) -> None:
        if not self.pending.is_empty:
            self.pending.send_with(plan, self._kv.tables)
            self.pending = PendingUpdates()
        plan.empty_pages = self._kv.take_emptied()
        plan.page_moves = self._kv.offload.take_moves()

    def moves_only(self, plan: StepPlan) -> StepPlan | None:
        """A plan that computes nothing, if there is something to move."""
        plan.page_moves = self._kv.offload.take_moves()
        if not plan.page_moves:
            return None
        self.pending.send_pages_with(plan)
        return plan

    # ---- loads

    def wait_for_loads(self, request: Request, num_host: int, num_disk: int, num_peer: int) -> None:
        """A request that has started goes on when its pages are there."""
        if self._kv.offload.is_loading(request.seq):
            self._loading[request.seq] = request, self._clock.now()
            self._emit(
                events.PagesLoading(
                    self._clock.now(), request.request_id, num_host, num_disk, num_peer
                )
            )

    def moved(self, done: Sequence[Moved]) -> list[tuple[int, str]]:
        """Returns the sequences with a page that could not be loaded, and why."""
        now = self._clock.now()
        moves, broken = self._kv.offload.moved(done)
        for tier, is_load in sorted({(move.tier, move.is_load) for move in moves}):
            own = [
                result
                for move, result in zip(moves, done, strict=True)
                if (move.tier, move.is_load) == (tier, is_load)
            ]
            moved = [result for result in own if result.num_bytes and not result.error]
            if moved:
                total = (
                    sum(result.num_bytes for result in moved),
                    sum(result.seconds for result in moved),
                )
                self._emit(events.PagesMoved(now, tier.name.lower(), is_load, len(moved), *total))
            for why, num in Counter(result.error for result in own if result.error).items():
                self._emit(events.MovesFailed(now, tier.name.lower(), is_load, num, why))
        for seq, (request, since) in list(self._loading.items()):
            if not self._kv.holds(seq) or not self._kv.offload.is_loading(seq):
                del self._loading[seq]
                if self._kv.holds(seq) and seq not in broken:
                    self._emit(events.PagesLoaded(now, request.request_id, now - since))
        why = next((result.error for result in done if result.error), "")
        return [(seq, why) for seq in broken]

    # ---- before a request starts

    def path(self, request: Request) -> Path:
        """Its tokens in the prefix cache, up to the first position that must be computed, for its
        logprobs."""
        if request.path is None:
            most = request.params.num_reusable
            most = most if request.kv_policy is None else min(most, request.kv_policy.num_reusable)
            request.path = self._kv.path(
                request.tokens, request.spec.salt, most, request.spec.segments
            )
        return request.path

    def num_to_compute(self, request: Request) -> int:
        """The number of tokens that the prefix cache does not hold."""
        if self._kv.holds(request.seq):
            return request.num_needed
        return request.num_known - self._kv.num_cached(self.path(request))

    def num_cached(self, request: Request) -> int:
        return request.num_known - self.num_to_compute(request)

    def num_to_start(self, request: Request) -> int:
        """Free pages that it would take now."""
        if self._kv.holds(request.seq):
            return self._kv.num_pages_to_go_on(request.seq, request.num_computed, request.num_known)
        return self._kv.num_pages_to_admit(request.num_known, self.path(request), request.kv_policy)

    def reserve(self, request: Request, running: Sequence[Request], to_the_end: bool) -> int:
        """Pages that must stay free when it starts: one for the growth of each that runs, if
        possible, or all that they and it will take until their ends, at most."""
        if not to_the_end:
            return min(
                len(running),
                self._kv.num_pages - self._kv.num_pages_for(request.num_known, request.kv_policy),
            )
        num = self._most_pages(request) - self._kv.num_pages_for(
            request.num_known, request.kv_policy
        )
        return num + self.num_to_the_end(running)

    def num_to_the_end(self, running: Sequence[Request]) -> int:
        """Pages that these will take until their ends, at most."""
        return sum(
            self._most_pages(request) - self._kv.num_pages_of(request.seq) for request in running
        )

    def _most_pages(self, request: Request) -> int:
        return self._kv.num_pages_for(request.num_prompt + request.max_tokens, request.kv_policy)

    def start(
        self, request: Request, reserve: int
    ) -> tuple[str, list[tuple[int, int, int]], tuple[int, int, int]] | None:
        """Pages for all its tokens, so that so many stay free. Returns what it starts from, the
        pages to copy, and how many tokens are loaded from host memory, from disk and from other
        engines; None: there are not enough."""
        if self._kv.holds(request.seq):  # forked
            if self._kv.extend(request.seq, request.num_known, windows=False) is None:
                return None
            copies = self._kv.copies_to_write(request.seq, request.num_computed, request.num_known)
            if copies is None:
                return None
            reason = f"shares pages of what it was forked from: {request.num_computed} of {request.num_known} tokens"
            return reason, copies, (0, 0, 0)
        start = self._kv.admit(
            request.seq, request.num_known, self.path(request), reserve, request.kv_policy
        )
        if start is None:
            return None
        request.num_computed = start.num_cached
        if request.started_s is None:
            request.num_cached = start.num_cached
        reason = f"prefix hit {start.num_cached} of {request.num_known}"
        if start.num_matching > start.num_cached:
            reason += f" ({start.num_matching} match)"
        if request.params.num_reusable < self._kv.page_size:
            reason = "prefix cache not used: the request asks about the whole prompt"
        for num, name in (
            (start.num_host, "host memory"),
            (start.num_disk, "disk"),
            (start.num_peer, "other engines"),
        ):
            reason += f", {num} from {name}" if num else ""
        return reason, start.copies, (start.num_host, start.num_disk, start.num_peer)

    # ---- before a step writes

    def writable_end(self, request: Request, end: int) -> int:
        """The end up to which tokens can be written once those before `end` can be."""
        size = self._kv.page_size
        return end if request.kv_policy is not None else -(-end // size) * size

    def planned(self, request: Request, start: int) -> None:
        """Its tokens from this one on are in a plan. A page can be cached once it is full of tokens
        that are known here; between two page ends there is nothing to record. What is computed
        beside drafts waits for them: if they are NaN, it may be, too."""
        end = request.num_computed
        if request.kv_policy is not None and (num := request.kv_policy.num_given_up(start, end)):
            why = f"kv_policy {request.kv_policy.kind}"
            self._emit(events.TokensEvicted(self._clock.now(), request.request_id, num, end, why))
        may_end_a_page = end - start > 1 or end % self._kv.page_size <= request.num_in_flight
        if may_end_a_page and not request.num_drafts_in_flight:
            self._kv.record(request.seq, request.tokens, end)

    def make_writable(self, request: Request, count: int) -> bool:
        """Private pages for its next `count` tokens. False: there are not enough free pages."""
        end = request.num_computed + count
        if self._kv.has_windows or request.kv_policy is not None:
            # where it goes on if they are wrong
            first = request.num_computed - request.num_drafts_in_flight
            first = min(first, request.num_prompt - 1) if request.children else first
            self.pending.update_pages(request.row, self._kv.trim(request.seq, first))
        new = self._kv.extend(request.seq, end)
        if new is None:
            return False
        self.pending.update_pages(request.row, new)
        groups = self._kv.groups
        is_simple = len(groups) == 1 and not request.kv_policy
        if is_simple and new and new[0].first_index * groups[0].page_size <= request.num_computed:
            return True  # all of them are in new pages
        copies = self._kv.copies_to_write(request.seq, request.num_computed, end)
        if copies is None:
            return False
        self.copy(request, copies)
        return True

    def copy(self, request: Request, copies: list[tuple[int, int, int]]) -> None:
        """Copies pages; `copies` is in the form of `KVManager.copies_to_write`."""
        tables = self._kv.tables(request.seq) if copies else []
        for group, index, source in copies:
            target = tables[group][index]
            self.pending.copy_page(request.row, source, target)
            self.pending.update_pages(request.row, [PageChange(group, index, [target])])
            self._emit(events.PageCopied(self._clock.now(), request.request_id, source, target))

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Give back pages past so many tokens."""
        changes = self._kv.shrink(request.seq, num_tokens)
        self.pending.update_pages(request.row, changes)
        if changes:
            request.writable_end = 0

    def take_back_drafts(self, request: Request, num_drafts: int, num_wrong: int) -> None:
        """Takes back wrong drafts: so many of the tokens computed last were wrong guesses: their
        place is written again. A step in flight that went on from them counts for nothing, and
        until it is over the pages that it writes stay the request's."""
        if not num_drafts:
            return
        if num_wrong and request.num_in_flight:
            num_lost = request.num_in_flight
            request.num_computed, request.num_in_flight, request.num_drafts_in_flight = (
                len(request.tokens) - 1,
                0,
                0,
            )
            request.epoch += 1
            self._emit(
                events.StepLost(
                    self._clock.now(),
                    request.request_id,
                    num_lost,
                    "it followed drafts that were wrong",
                )
            )
        elif not request.num_in_flight:
            request.num_computed = len(request.tokens) - 1
            self.shrink(request, len(request.tokens))
        self._kv.record(request.seq, request.tokens, len(request.tokens) - 1)
