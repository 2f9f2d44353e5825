"""Plans for more devices than can be tried one by one: numbers of engines by bisection, as if more
of them never were worse.

One model: of each family, with the default limits, the fewest engines that attain; of the two best
families then every other choice of limits. Prefill and decode engines come in cells, a host each,
with one split for all. Several models (AlpaServe): groups of devices that are alike, and one model
after the other is put onto the group where that helps most, until it helps no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tidemill.planning.cluster import BOTH, DECODE, PREFILL
from tidemill.planning.hardware import Shape
from tidemill.planning.plans import Case, Evaluator, Limits, Plan, Pool, Result
from tidemill.planning.search import Floors, Found, nothing_fits
from tidemill.planning.space import Space


@dataclass(frozen=True)
class _Units:
    """Plans of a number of units that are alike: engines, or hosts. `size`: devices of one. `most`:
    as many as there can be."""

    make: Callable[[int, Limits], Plan]
    size: int
    most: int


class Scaled:
    def __init__(self, case: Case, space: Space, progress: Callable[[str], None]) -> None:
        self._case, self._space, self._progress = case, space, progress
        self._evaluator, self._floors = Evaluator(case), Floors(case)
        self._known: dict[Plan, Result] = {}
        self._not: set[Plan] = set()  # plans that do not attain
        self._tried: set[Plan] = set()
        self._default = _middle(space)

    def search(self) -> Found:
        if len(self._case.models) > 1:
            return self._found(sorted(self._multiplexed(), key=_order))
        families = self._colocated()
        best = sorted(map(self._fewest, families.values()), key=_order)
        if best or not self._space.colocated:
            more = self._disaggregated(best[0].plan.num_devices if best else self._case.num_devices)
            families |= more
            best = sorted([*best, *map(self._fewest, more.values())], key=_order)
        if not best:
            raise nothing_fits(self._case)
        tuned = [self._tune(families[result.plan.family], result) for result in best[:2]]
        return self._found(sorted([*tuned, *best[2:]], key=_order))

    def _found(self, best: list[Result]) -> Found:
        others = [result for result in best[1:] if result.plan.family != best[0].plan.family]
        results, num = list(self._known.values()), self._evaluator.num_simulated
        return Found(best[0], others[0] if others else None, results, len(self._tried), num, False)

    # ---- one model

    def _colocated(self) -> dict[object, _Units]:
        """The engines for both phases, by shape."""
        case, names = self._case, tuple(self._case.models)
        if not self._space.colocated:
            return {}

        def units(shape: Shape) -> _Units:
            def make(num: int, limits: Limits) -> Plan:
                return Plan((Pool(num, shape, BOTH, limits, names),))

            return _Units(make, shape.num_devices, case.num_devices // shape.num_devices)

        all_units = map(units, self._space.shapes(case, names, case.num_devices))
        return {each.make(1, self._default).family: each for each in all_units}

    def _disaggregated(self, num_devices: int) -> dict[object, _Units]:
        """Hosts, with the split that is best under the load of one if these are enough devices."""
        case, on_host = self._case, self._case.hardware.on_host
        shapes = self._space.shapes(case, tuple(case.models), 1)
        most = case.num_devices // on_host
        if not (self._space.disaggregated and shapes and most and on_host > 1):
            return {}
        of_host = Evaluator(replace(case, jobs=case.jobs[:: max(1, round(num_devices / on_host))]))
        strains = {}
        for num in range(1, on_host):
            result = of_host.evaluate(self._cells(1, self._default, num))
            assert result is not None
            strains[num] = result.strain
        num_prefill = min(strains, key=lambda num: strains[num])
        self._progress(f"of {on_host} devices of a host, {num_prefill} for prefill")

        def make(num: int, limits: Limits) -> Plan:
            return self._cells(num, limits, num_prefill)

        return {make(1, self._default).family: _Units(make, on_host, most)}

    def _cells(self, num: int, limits: Limits, num_prefill: int) -> Plan:
        names, on_host = tuple(self._case.models), self._case.hardware.on_host
        shape = self._space.shapes(self._case, names, 1)[0]
        prefill = Limits(limits.policy, limits.token_budget, min(limits.token_budget, 256))
        return Plan(
            (
                Pool(num * num_prefill, shape, PREFILL, prefill, names, num),
                Pool(num * (on_host - num_prefill), shape, DECODE, limits, names, num),
            )
        )

    def _fewest(self, units: _Units) -> Result:
        """The fewest units that attain; if none do, all that there are."""

        def plan(num: int) -> Plan:
            return units.make(num, self._default)

        low, high = 0, 1
        while high < units.most and not self._attains(plan(high)):
            low, high = high, min(2 * high, units.most)
        if not self._attains(plan(high)):
            self._progress(f"{plan(high).name}: not attained")
            return self._result(plan(high))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._attains(plan(middle)) else (middle, high)
        self._progress(f"{plan(high).name}: attained")
        return self._result(plan(high))

    def _tune(self, units: _Units, best: Result) -> Result:
        """Other limits, with as many units or fewer."""
        for limits in self._space.all_limits():
            num = best.plan.num_devices // units.size
            if best.plan.is_disaggregated and limits.policy != self._space.policies[0]:
                continue
            if best.attains and not self._attains(units.make(num, limits)):
                continue
            while best.attains and num > 1 and self._attains(units.make(num - 1, limits)):
                num -= 1
            best = min(best, self._result(units.make(num, limits)), key=_order)
        return best

    def _attains(self, plan: Plan) -> bool:
        if plan in self._known:
            return self._known[plan].attains
        self._tried.add(plan)
        if plan in self._not or self._floors.strain(plan) > 1:
            return False
        result = self._evaluator.evaluate(plan, 1.0)
        if result is None:
            self._not.add(plan)
            return False
        self._known[plan] = result
        return result.attains

    def _result(self, plan: Plan) -> Result:
        if plan not in self._known:
            self._tried.add(plan)
            result = self._evaluator.evaluate(plan)
            assert result is not None
            self._known[plan] = result
        return self._known[plan]

    # ---- several models

    def _multiplexed(self) -> Iterator[Result]:
        """The results of placing one model after the other, for groups of each shape."""
        case, any_fits = self._case, False
        for shape in self._space.shapes(case, list(case.models)[:1], case.num_devices):
            placed: list[tuple[str, ...]] = [()] * (case.num_devices // shape.num_devices)
            best: Result | None = None
            while True:
                tries = list(self._one_more(placed, shape))
                results = [(self._result(plan), groups) for groups, plan in tries]
                if not results:
                    break
                result, groups = min(
                    results, key=lambda found: (_placed_last(found[0]), _order(found[0]))
                )
                if (
                    best is not None
                    and _placed_last(best) <= _placed_last(result)
                    and _order(best) <= _order(result)
                ):
                    break
                best, placed = result, groups
            if best is not None and best.strain < math.inf:
                any_fits = True
                yield best
        if not any_fits:
            raise nothing_fits(case)

    def _one_more(
        self, placed: list[tuple[str, ...]], shape: Shape
    ) -> Iterator[tuple[list[tuple[str, ...]], Plan]]:
        """Placements with one model in one more group. Groups that are alike are one choice."""
        for name in self._case.models:
            for group in sorted(set(placed)):
                if name not in group:
                    groups = [*placed]
                    groups[groups.index(group)] = tuple(
                        sorted((*group, name), key=list(self._case.models).index)
                    )
                    plan = self._plan(groups, shape)
                    if all(map(self._case.fits, plan.pools)):
                        yield groups, plan

    def _plan(self, groups: list[tuple[str, ...]], shape: Shape) -> Plan:
        kinds = sorted({group for group in groups if group})
        return Plan(
            tuple(Pool(groups.count(kind), shape, BOTH, self._default, kind) for kind in kinds)
        )


def _placed_last(result: Result) -> bool:
    return result.strain == math.inf


def _order(result: Result) -> tuple[float, ...]:
    return (
        (0, result.plan.num_devices, result.strain)
        if result.attains
        else (1, result.strain, result.plan.num_devices)
    )


def _middle(space: Space) -> Limits:
    found = [limits for limits in space.all_limits() if limits.policy == space.policies[0]]
    return found[len(found) // 2]
