"""Policies: what varies between ways of batching. The scheduler and its mechanics are the same
under all of them.

A new policy is a class here and a line in POLICIES.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.config import extensions
from tidemill.errors import ConfigError


@dataclass(slots=True)
class StepState:
    """The state of a step while it is being filled, by which a policy decides."""

    budget: int
    num_left: int  # of the budget
    num_running: int
    num_running_before: int  # when the step began
    num_background_left: int = 0  # of the budget, what the background may have
    num_prefill_tokens: int = 0  # given out in this step so far
    num_prefilling: int = 0  # requests that got them
    # of the budget, what no request needs for its next token; None: nobody asked so far
    num_drafts_left: int | None = None
    num_waiting: int = 0  # when the step began
    num_queued: int = 0  # of these, not in the background
    # whether part of the prompt in question may be taken beside another prompt
    may_fill: bool = True
    num_rows: int = 1
    waited_s: float = 0.0  # by the request that was queued first, when the step began
    num_evicted: int = 0  # pages so far, when the step began
    num_stored: int = 0  # of these, stored in another tier


class Policy:
    """Continuous batching with stall-free chunked prefill: the default, and the base of the others.

    Running requests get their next token first; what is left of the budget computes prompts, in
    order of arrival, cut to fit. A prompt is cut as the first one of a step. Part of a second would
    lengthen this step for all that wait for its tokens, and save those that are queued what a step
    costs whatever it computes: it is taken where that is more.
    """

    name = "continuous"
    prefill_first = False  # prompts before running requests, in steps of their own
    window_s = 0.0  # for which a batch may form
    step_cost = 0  # of a step with hardly any tokens, as so many tokens of a full one

    def may_admit(self, state: StepState) -> bool:
        """May one more waiting request start in this step (rows and pages permitting)?"""
        return state.num_left > 0

    def chunk(self, num_needed: int, state: StepState) -> int:
        """The number of a prompt's remaining tokens to compute in this step; 0 to leave it for a
        later one."""
        if (
            num_needed > state.num_left
            and state.num_prefill_tokens > 0
            and not self._pays_to_fill(state)
        ):
            return 0
        return min(num_needed, state.num_left)

    def _pays_to_fill(self, state: StepState) -> bool:
        return state.may_fill and self.step_cost * state.num_queued > state.num_left * max(
            state.num_running_before, 1
        )


class SplitFuse(Policy):
    """A constant budget: every step is filled to the last token, long prompts split, short ones
    fused."""

    name = "splitfuse"

    def chunk(self, num_needed: int, state: StepState) -> int:
        return min(num_needed, state.num_left)


class PrefillFirst(Policy):
    """Prompts as soon as they arrive, in steps of their own; running requests wait meanwhile. A
    prompt is cut only where it exceeds the budget: no runner has memory for larger steps."""

    name = "prefill-first"
    prefill_first = True

    def _pays_to_fill(self, state: StepState) -> bool:
        return False


class Static(SplitFuse):
    """A batch starts together and the next one waits until its longest member has ended."""

    name = "static"

    def may_admit(self, state: StepState) -> bool:
        return state.num_running_before == 0


class Dynamic(Static):
    """The static policy, but a batch forms until it is full or its first request has waited for the
    window."""

    name = "dynamic"

    def may_admit(self, state: StepState) -> bool:
        is_formed = state.num_waiting >= state.num_rows or state.waited_s >= self.window_s
        return super().may_admit(state) and is_formed


class NoBatching(Policy):
    """One request at a time."""

    name = "none"

    def may_admit(self, state: StepState) -> bool:
        return state.num_running == 0


POLICIES: dict[str, type[Policy]] = {
    cls.name: cls for cls in (Policy, SplitFuse, PrefillFirst, Static, Dynamic, NoBatching)
}


def make_policy(name: str, window_s: float = 0.0, step_cost: int = 0) -> Policy:
    """`window_s`: of a policy that forms batches. `step_cost`: in tokens, see `Policy`."""
    kind = POLICIES.get(name) or extensions.load(extensions.POLICIES, name)
    if kind is None:
        known = ", ".join((*POLICIES, *extensions.names_of(extensions.POLICIES)))
        raise ConfigError(f"There is no scheduling policy {name!r}.", fix=f"Choose one of {known}.")
    policy: Policy = kind()
    policy.window_s, policy.step_cost = window_s, step_cost
    return policy
