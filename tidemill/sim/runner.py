"""SimRunner: a runner that computes nothing and takes as long as a cost model says, on a virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.runner.base import StepResult
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepPlan
from tidemill.sim.cost import CostModel

if TYPE_CHECKING:
    import torch

    from tidemill.layers.lora import Loras
    from tidemill.runner.page_moves import PageMover


FIRST_TOKEN = 2**30  # of outputs; prompts have smaller ones


class SimRunner:
    """Steps run one after the other. Where several may be in flight, the next begins when the one before it ends."""

    fallback = ""
    mover: PageMover | None = None
    loras: Loras | None = None

    def __init__(self, cost: CostModel, clock: VirtualClock, steps_ahead: int = 0) -> None:
        self._cost, self._clock, self.steps_ahead = cost, clock, steps_ahead
        self._host_s: float = getattr(cost, "host_s", 0.0)
        self._free_s = 0.0  # when all that was launched is done
        self.times: list[tuple[float, float]] = []  # of each step: its begin and end

    @property
    def cache(self) -> torch.Tensor:
        raise NotImplementedError("nothing is stored")

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self._clock.advance(self._host_s)
        begin = max(self._clock.now(), self._free_s)
        self._free_s = begin + self._cost.step_s(plan)
        self.times.append((begin, self._free_s))
        return plan, self._free_s

    def change_pages(self, plan: StepPlan) -> None:
        """That costs nothing here."""

    def collect(self, launched: tuple[StepPlan, float]) -> StepResult:
        """A sequence has one token of its own, again and again: no two outputs are found as one in the prefix cache."""
        plan, done_s = launched
        self._clock.advance_to(done_s)
        return StepResult({item.row: [FIRST_TOKEN + item.seq] for item in plan.items if item.samples})
