"""How long a step would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidemill.sched.plan import StepPlan


class CostModel(Protocol):
    def step_s(self, plan: StepPlan) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A fixed part, a part per token computed, and a part per token of context read."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_context_token_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        context = sum(item.start + item.count for item in plan.items)
        return self.fixed_s + self.per_token_s * plan.num_tokens + self.per_context_token_s * context
