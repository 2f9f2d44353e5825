"""SimRunner: a runner that computes nothing and takes as long as a cost model says, on a virtual
clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.planning.cost import COLD, CostModel, Heat, Shapes, Steady, StepShape
from tidemill.planning.drafter import FIRST_TOKEN, drawn, token_of
from tidemill.planning.moves import SimMover
from tidemill.runner.base import StepResult
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from tidemill.layers.lora import Loras
    from tidemill.runner.page_moves import PageMover

__all__ = ["FIRST_TOKEN", "SimRunner", "token_of"]


@dataclass(slots=True)
class SimDevice:
    """Steps run one after the other, whichever engine launched them."""

    free_s: float = 0.0  # when all that was launched is done
    heat: Heat | None = None  # by whatever ran on it


class SimRunner:
    """A runner that simulates. Where several steps may be in flight, the next begins when the one
    before it ends."""

    fallback = ""
    mover: PageMover | None = None  # if there are tiers: a SimMover
    acceptance: float | None = None  # of drafts, if there are any
    loras: Loras | None = None
    steady: Steady | None = None  # if plans leave out what only decodes

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        steps_ahead: int = 0,
        page_size: int = 1,
        shared: SimDevice | None = None,
    ) -> None:
        """`shared`: with other engines, so that steps do not just repeat each other."""
        self._shapes = Shapes(
            page_size, getattr(cost, "shared_unit", 0), getattr(cost, "first_pays", False)
        )
        self._shape = StepShape(0, 0, 0, 0, 0, 0, 0)  # of the last step
        self._cost, self._clock, self.steps_ahead = cost, clock, steps_ahead
        self._host_s: float = getattr(cost, "host_s", 0.0)
        self._starting_s: Callable[[int], float] = getattr(cost, "starting_s", _nothing)
        self._shape_s: Callable[[StepShape], float] | None = getattr(cost, "shape_s", None)
        self._rest_s: Callable[[StepShape], float] = getattr(cost, "rest_s", _nothing)
        heat: tuple[float, float, float] = getattr(cost, "heat", (0.0, 0.0, 0.0))
        decay_s, self._decode_rise, self._mixed_rise = heat
        self._line: Callable[[int], tuple[float, float, float]] | None = getattr(
            cost, "decode_line", None
        )
        self._lines: dict[int, tuple[float, float, float]] = {}  # by the number that decodes
        self.device, self._is_shared = shared or SimDevice(), shared is not None
        if decay_s and self.device.heat is None:
            self.device.heat = Heat(decay_s)
        self._heat = self.device.heat if decay_s else None
        # begin and end of a step (0), or of so many like it that follow
        self.times: list[tuple[float, float, int]] = []

    @property
    def cache(self) -> torch.Tensor:
        raise NotImplementedError("nothing is stored")

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self.change_pages(plan)
        host_s = self._host_s
        if plan.new_rows:
            host_s += self._starting_s(sum([len(row.token_ids) for row in plan.new_rows]))
        self._clock.advance(host_s)
        begin = max(self._clock.now(), self.device.free_s)
        if self._shape_s is not None:
            self._shape = self._shapes.of(plan, self.steady)
            end = begin + self._warm_s(begin, self._shape, self._shape_s(self._shape))
        else:
            end = begin + self._cost.step_s(plan)
        self.device.free_s = end
        self.times.append((begin, end, 0))
        return plan, end

    def change_pages(self, plan: StepPlan) -> None:
        """Moves between tiers begin. The rest costs nothing here."""
        if plan.page_moves and isinstance(self.mover, SimMover):
            self.mover.begin(plan.page_moves)

    def collect(self, launched: tuple[StepPlan, float]) -> StepResult:
        plan, done_s = launched
        self._clock.advance_to(done_s)
        return self.results(plan)

    def results(self, plan: StepPlan) -> StepResult:
        if self.acceptance is not None:
            return StepResult(
                {item.row: drawn(item, self.acceptance) for item in plan.items if item.samples}
            )
        return StepResult(
            {item.row: [FIRST_TOKEN + item.seq] for item in plan.items if item.samples}
        )

    def _warm_s(self, begin_s: float, shape: StepShape, seconds: float) -> float:
        """The time of a step that would take so long in a cold machine."""
        if self._heat is None:
            return seconds
        if not shape.num_prompt:
            return seconds * (1 + self._decode_rise * self._heat.level(begin_s))
        seconds *= 1 + self._mixed_rise * self._heat.level(begin_s)
        self._heat.add(begin_s, begin_s + seconds, shape.num_decoding + shape.num_prompt)
        return seconds

    @property
    def can_repeat(self) -> bool:
        """The cost model tells how steps like the last differ from it, and no other engine's come
        between."""
        return self._line is not None and self._shape_s is not None and not self._is_shared

    def repeat(
        self, num_decoding: int, goes_on: bool, most: int, until_s: float
    ) -> tuple[list[float], float]:
        """Launch and collect the steps that follow the last one, in which so many decode or, if
        `goes_on`, as many as in that one and a prompt goes on: at most so many steps, and as long
        as they are planned before some time. Returns when the tokens of each came, and when the
        last was planned. The clock stays where it is."""
        first_s, host_s, now = self.device.free_s, self._host_s, self._clock.now()
        planned_s, free_s, times = now, first_s, list[float]()
        if not goes_on:
            times, free_s = self._repeat_decodes(num_decoding, most, until_s)
            planned_s = times[-2] if len(times) > 1 else now
        while goes_on and len(times) < most and now < until_s:
            planned_s = now
            now = max(now + host_s, free_s)
            free_s = now + self._goes_on_s(now)
            now = now if self.steps_ahead else free_s
            times.append(now)
        if times:
            self.device.free_s = free_s
            self.times.append((first_s, free_s, len(times)))
        return times, planned_s

    def _repeat_decodes(self, num: int, most: int, until_s: float) -> tuple[list[float], float]:
        """Repeats decode steps; same as `repeat`. Returns when the tokens of each came, and when
        the last one ends."""
        fixed_s, context_s, longest_s, rest_s, seen, most_seen = self._decodes(num)
        level, hot_s, decay_s = (0.0, 0.0, 1.0) if self._heat is None else self._heat.state
        rise, host_s, exp, cold = self._decode_rise, self._host_s, math.exp, -float(COLD)
        now, free_s, is_ahead, times = (
            self._clock.now(),
            self.device.free_s,
            self.steps_ahead > 0,
            list[float](),
        )
        append, contexts = times.append, range(seen + num, seen + num * most + 1, num)
        for context, longest in zip(
            contexts, range(most_seen + 1, most_seen + most + 1), strict=True
        ):
            if now >= until_s:  # a step is a turn of this loop and little else
                break
            now += host_s
            if free_s > now:
                now = free_s
            seconds = fixed_s + context_s * context + longest_s * longest + rest_s
            if level:
                age = (hot_s - now) / decay_s
                if age > cold:
                    seconds *= 1 + rise * (level * exp(age))
                else:
                    level = 0.0
            free_s = now + seconds
            if not is_ahead:
                now = free_s
            append(now)  # what comes as it begins, where the one before was in flight
        return times, free_s

    def _goes_on_s(self, begin_s: float) -> float:
        """The time of the next step, if it goes on with a prompt."""
        assert self._shape_s is not None
        self._shape = self._shape.next()
        return self._warm_s(begin_s, self._shape, self._shape_s(self._shape))

    def _decodes(self, num: int) -> tuple[float, float, float, float, int, int]:
        """The times of steps in which so many decode: what each takes, per token of context and of
        the longest as well, and the rest; and how much context the last step had, and the
        longest."""
        assert self._line is not None
        assert self.steady is not None
        line = self._lines.get(num)
        if line is None:
            line = self._lines[num] = self._line(num)
        shape = self._shapes.of_steady(num, self.steady)
        return *line, self._rest_s(shape), shape.decode_context, shape.longest


def _nothing(of: object) -> float:
    return 0.0
