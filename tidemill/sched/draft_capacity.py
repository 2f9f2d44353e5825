"""DraftCapacity: the drafts that fit in a step. Nobody else's token, page or output limit is
touched for a guess."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.sched.plan import StepPlan
from tidemill.sched.policies import StepState
from tidemill.sched.request import Request
from tidemill.sched.table import RequestTable
from tidemill.sched.tree import Tree


class DraftCapacity:
    def __init__(self, table: RequestTable, token_budget: int, max_draws: int) -> None:
        """`max_draws`: how many tokens the runner can sample in a step, drafts included."""
        self._table, self._token_budget, self._max_draws = table, token_budget, max_draws

    @property
    def most(self) -> int:
        """Draws that no request needs for a token of its own, those that may start in this step
        included; while prompts are to be computed, half of the budget stays theirs."""
        table = self._table
        num = self._max_draws - min(table.num_rows, len(table.requests))
        left = self._token_budget - len(table.running)
        has_prompts = bool(table.waiting) or any(
            request.num_needed > 1 for request in table.running
        )
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
            kv, pages = self._table.kv, self._table.pages
            num_pages = (len(self._table.running) + len(drafts) // kv.page_size + 1) * len(
                kv.groups
            )
            if kv.num_free_pages < num_pages:  # others need theirs in this step
                return ()
            if not pages.make_writable(request, 1 + len(drafts)):
                pages.shrink(request, request.num_computed + 1)
                return ()
            request.writable_end = pages.writable_end(request, end)
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
        return tuple(
            (self._table.requests[item.seq].request_id, item.num_drafts)
            for item in items
            if item.num_drafts
        )
