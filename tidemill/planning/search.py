"""The search: the fewest devices with which the SLOs are kept, and among those plans the one with
the most room.

Plans are compared by the devices they need if they attain the SLOs, and then by their strain; those
that do not, by strain alone. What is left out cannot be the winner or the runner-up: numbers of
devices beyond the first that attain; plans of which even a request alone takes too long;
simulations in which too many requests have been late already; decode pools behind a prefill pool
that is too slow alone. So the result is that of simulating everything (`exhaustive`), which tests
compare.

Beyond `EXACT` devices, numbers of replicas are found by bisection, as if more never were worse, and
batch limits afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.errors import ConfigError
from tidemill.planning.cluster import BLOCK, BOTH, DECODE, PREFILL, Job, num_short
from tidemill.planning.hardware import Shape
from tidemill.planning.plans import Case, Evaluator, Plan, Result
from tidemill.planning.space import Space

EXACT = 8  # devices
SEVERAL = 4  # the same, if there are several models


@dataclass(frozen=True)
class Found:
    winner: Result
    runner_up: Result | None  # the best of another family
    results: list[Result]  # of all plans that were simulated to their end
    num_plans: int
    num_simulated: int
    is_exact: bool

    @property
    def attains(self) -> bool:
        return self.winner.attains


def search(
    case: Case,
    space: Space,
    how: str = "pruned",
    progress: Callable[[str], None] = lambda text: None,
) -> Found:
    """`how`: pruned or exhaustive."""
    if how not in ("pruned", "exhaustive"):
        raise ConfigError(f"--search {how!r} is not known.", fix="Choose pruned or exhaustive.")
    is_exact = how == "exhaustive" or case.num_devices <= (
        EXACT if len(case.models) == 1 else SEVERAL
    )
    if not is_exact:
        from tidemill.planning.scale import Scaled

        return Scaled(case, space, progress).search()
    levels = {num: space.plans(case, num) for num in range(1, case.num_devices + 1)}
    if not any(levels.values()):
        raise nothing_fits(case)
    if how == "exhaustive":
        return exhaustive(case, levels)
    return Levels(case, levels, progress).search()


def exhaustive(case: Case, levels: Mapping[int, Sequence[Plan]]) -> Found:
    """Simulate every plan to its end, then compare."""
    evaluator = Evaluator(case)
    results = [
        result
        for plans in levels.values()
        for plan in plans
        if (result := evaluator.evaluate(plan)) is not None
    ]
    winner = min(
        results,
        key=lambda result: (
            (0, result.plan.num_devices, result.strain)
            if result.attains
            else (1, result.strain, result.plan.num_devices)
        ),
    )
    others = [result for result in results if result.plan.family != winner.plan.family]
    if winner.attains and others:
        own = winner.plan.num_devices
        nums = {result.plan.num_devices for result in others}
        nearest = min((num for num in nums if num >= own), default=max(nums))
        others = [result for result in others if result.plan.num_devices == nearest]
    runner_up = min(
        others, key=lambda result: (result.strain, result.plan.num_devices), default=None
    )
    return Found(winner, runner_up, results, len(results), evaluator.num_simulated, True)


def nothing_fits(case: Case) -> ConfigError:
    names, hardware = " and ".join(filter(None, case.models)) or "the model", case.hardware
    most = max(case.longest.values())
    return ConfigError(
        f"{names} does not fit {case.num_devices} x {hardware.name}: weights, and the KV cache of a request of {most:,} tokens.",
        fix="Give more devices, or requests that are shorter.",
    )


class Levels:
    """All plans, by their number of devices."""

    def __init__(
        self,
        case: Case,
        levels: Mapping[int, Sequence[Plan]],
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._levels, self._progress = levels, progress
        self._evaluator = Evaluator(case)
        self._floors = Floors(case)
        self._known: dict[Plan, Result] = {}
        self._least: dict[Plan, float] = {}  # plans whose strain is larger than this

    def search(self) -> Found:
        for num, plans in self._levels.items():
            if self._attained(plans):
                self._progress(f"{num} devices: attained")
                best = self._best(plans)
                return self._found(best[0], best[1] if len(best) > 1 else self._next_to(num))
            if plans:
                self._progress(f"{num} devices: not attained, {len(plans)} plans")
        best = self._best([plan for plans in self._levels.values() for plan in plans])
        return self._found(best[0], best[1] if len(best) > 1 else None)

    def _next_to(self, num: int) -> Result | None:
        """All plans of the winner's number of devices are of its family: the best of another one
        with more devices, or fewer."""
        winner = self._best(self._levels[num])[0]
        for other in (*range(num + 1, max(self._levels) + 1), *range(num - 1, 0, -1)):
            if left := [plan for plan in self._levels[other] if plan.family != winner.plan.family]:
                return self._best(left)[0]
        return None

    def _found(self, winner: Result, runner_up: Result | None) -> Found:
        num = sum(map(len, self._levels.values()))
        return Found(
            winner, runner_up, list(self._known.values()), num, self._evaluator.num_simulated, True
        )

    def _attained(self, plans: Sequence[Plan]) -> bool:
        """Tells if any of them attains."""
        return any(
            self._floor(plan) <= 1 and self._simulate(plan, 1.0) is not None
            for plan in sorted(plans, key=self._floor)
        )

    def _best(self, plans: Sequence[Plan]) -> list[Result]:
        """The best plan, and the best one of another family, if there is any."""
        place = {plan: i for i, plan in enumerate(plans)}
        best: list[Result] = []

        def key(result: Result) -> tuple[float, int, int]:
            return result.strain, result.plan.num_devices, place[result.plan]

        for plan in sorted(
            plans, key=lambda plan: (plan not in self._known, self._floor(plan), place[plan])
        ):
            limit = math.inf
            if best and plan.family == best[0].plan.family:
                limit = best[0].strain
            elif len(best) > 1:
                limit = best[1].strain
            if self._floor(plan) <= limit and (result := self._simulate(plan, limit)) is not None:
                best = _two(sorted([*best, result], key=key))
        return best

    def _floor(self, plan: Plan) -> float:
        known = self._known.get(plan)
        return known.strain if known else max(self._floors.strain(plan), self._least.get(plan, 0.0))

    def _simulate(self, plan: Plan, limit: float) -> Result | None:
        if plan in self._known:
            return self._known[plan]
        if self._least.get(plan, -1.0) >= limit:
            return None
        result = self._evaluator.evaluate(plan, limit)
        if result is None:
            self._least[plan] = limit
        else:
            self._known[plan] = result
        return result


def _two(results: Sequence[Result]) -> list[Result]:
    """The two best results: the best, and the first of another family."""
    others = [result for result in results[1:] if result.plan.family != results[0].plan.family]
    return [results[0], *others[:1]]


class Floors:
    """Below which a plan's strain cannot be: every request alone in an idle engine, with the best
    prefix cache there could be."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._num_known = _known_tokens(case.jobs)
        self._scales: dict[object, list[float]] = {}

    def strain(self, plan: Plan) -> float:
        parts = [
            self._of_pool(pool.role, pool.shape, pool.limits.token_budget, pool.models)
            for pool in plan.pools
        ]
        if plan.is_disaggregated:
            scales = [max(pair) for pair in zip(*parts, strict=True)]
        else:
            scales = [min(each) for each in zip(*parts, strict=True)]
        return sorted(scales)[self._case.slo.num_needed(len(scales)) - 1] * _ROUNDING

    def _of_pool(self, role: str, shape: Shape, budget: int, models: Iterable[str]) -> list[float]:
        """The floor of each job; infinite if its model is not there."""
        key = role, shape, budget if role != DECODE else 0, tuple(models)
        if key not in self._scales:
            self._scales[key] = [
                self._of_job(role, shape, budget, job, key[-1]) for job in self._case.jobs
            ]
        return self._scales[key]

    def _of_job(
        self, role: str, shape: Shape, budget: int, job: Job, models: Sequence[str]
    ) -> float:
        if job.model not in models:
            return math.inf
        cost, slo = self._case.cost(job.model, shape), self._case.slo
        scale = 0.0
        prefill, decode = (
            getattr(cost, "prefill_floor_s", None),
            getattr(cost, "decode_floor_s", None),
        )
        may_be_elsewhere = role == PREFILL and job.num_prompt <= num_short(budget)
        if role in (BOTH, PREFILL) and prefill is not None and not may_be_elsewhere:
            start = min(self._num_known[job.number], job.num_prompt - 1)
            scale = prefill(start, job.num_prompt, budget) / slo.ttft_s
        if role in (BOTH, DECODE) and decode is not None and job.num_output > 1:
            scale = max(scale, decode(job.num_prompt) / slo.tpot_s)
        return scale


def _known_tokens(jobs: Sequence[Job]) -> dict[int, int]:
    """The number of leading tokens of each job's prompt that an earlier one began with."""
    seen: set[tuple[str, int]] = set()
    found = {}
    for job in jobs:
        num = next(
            (i for i, block in enumerate(job.blocks) if (job.model, block) not in seen),
            len(job.blocks),
        )
        found[job.number] = num * BLOCK
        seen.update((job.model, block) for block in job.blocks)
    return found


_ROUNDING = 1 - 1e-9
