"""DraftCapacity: the drafts that fit in a step. Nobody else's token, page or output limit is touched for a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.kv.manager import KVManager
from tidemill.sched.pages import Pages
from tidemill.sched.plan import StepPlan
from tidemill.sched.policies import StepState
from tidemill.sched.queue import WaitingQueue
from tidemill.sched.request import Request
from tidemill.sched.tree import Tree


class DraftCapacity:
    def __init__(
        self,
        kv: KVManager,
        pages: Pages,
        requests: Mapping[int, Request],
        running: Sequence[Request],
        waiting: WaitingQueue,
        *,
        num_rows: int,
        token_budget: int,
        max_draws: int,
    ) -> None:
        self._kv, self._pages = kv, pages
        self._requests, self._running, self._waiting = requests, running, waiting
        self._num_rows, self._token_budget, self._max_draws = num_rows, token_budget, max_draws

    @property
    def most(self) -> int:
        """Draws that no request needs for a token of its own, those that may start in this step included;
        while prompts are to be computed, half of the budget stays theirs."""
        num = self._max_draws - min(self._num_rows, len(self._requests))
        left = self._token_budget - len(self._running)
        has_prompts = bool(self._waiting) or any(request.num_needed > 1 for request in self._running)
        return max(min(num, left // 2 if has_prompts else left), 0)

    def take(self, request: Request, state: StepState) -> Sequence[int]:
        """The drafts of the request that fit, with pages for them."""
        if not request.drafts:
            return ()
        drafts, request.drafts = request.drafts, ()
        if state.num_drafts_left is None:
            state.num_drafts_left = self.most
        num_to_come = request.max_tokens - (request.num_known - request.num_prompt)
        drafts = drafts[: max(min(num_to_come - 1, state.num_drafts_left), 0)]
        end = request.num_computed + 1 + len(drafts)
        if end > request.writable_end:
            num_pages = (len(self._running) + len(drafts) // self._kv.page_size + 1) * len(self._kv.groups)
            if self._kv.num_free_pages < num_pages:  # others need theirs in this step
                return ()
            if not self._pages.make_writable(request, 1 + len(drafts)):
                self._pages.shrink(request, request.num_computed + 1)
                return ()
            request.writable_end = self._pages.writable_end(request, end)
        state.num_drafts_left -= len(drafts)
        return drafts

    def put(self, request: Request, drafts: Sequence[int], plan: StepPlan) -> int:
        """Puts the drafts into a plan. Returns how many there are."""
        if drafts or request.num_drafts_in_flight:
            request.drafted_step = plan.step
        if drafts:
            request.had_drafts = True
            plan.drafts[request.row] = list(drafts)
            if isinstance(drafts, Tree):
                plan.trees[request.row] = list(drafts.parents)
        return len(drafts)

    def drafts_of(self, plan: StepPlan) -> tuple[tuple[str, int], ...]:
        """The number of drafts of each request that has some."""
        items = plan.items if plan.drafts else ()
        return tuple((self._requests[item.seq].request_id, item.num_drafts) for item in items if item.num_drafts)
