"""Plans for more devices than can be tried one by one: numbers of engines by bisection, as if more of them never were worse.

One model: of each family, with the default limits, the fewest engines that attain; of the two best families then every other choice
of limits. Prefill and decode engines come in cells, a host each, with one split for all.
Several models (AlpaServe): groups of devices that are alike, and one model after the other is put onto the group where that helps
most, until it helps no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tidemill.planning.plans import Case, Evaluator, Limits, Plan, Pool, Result
from tidemill.planning.search import Floors, Found, nothing_fits
from tidemill.planning.space import Space
from tidemill.sim.cluster import BOTH, DECODE, PREFILL

_Family = Callable[[int, Limits], Plan]  # a plan of so many units


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
        families = dict(self._families())
        if not families:
            raise nothing_fits(self._case)
        best = sorted((self._fewest(name, *one, self._default, 0) for name, one in families.items()), key=_order)
        tuned = [self._tune(families[result.plan.family], result) for result in best[:2]]
        return self._found(sorted([*tuned, *best[2:]], key=_order))

    def _found(self, best: list[Result]) -> Found:
        others = [one for one in best[1:] if one.plan.family != best[0].plan.family]
        results, num = list(self._known.values()), self._evaluator.num_simulated
        return Found(best[0], others[0] if others else None, results, len(self._tried), num, False)

    # ---- one model

    def _families(self) -> Iterator[tuple[object, tuple[_Family, int, int]]]:
        """A plan of n units, the devices of a unit, and the most units there are room for."""
        case, names = self._case, tuple(self._case.models)
        most, on_host = case.num_devices, case.hardware.on_host
        for shape in self._space.shapes(case, names, most) if self._space.colocated else ():

            def colocated(num: int, limits: Limits, shape=shape) -> Plan:  # type: ignore[no-untyped-def]
                return Plan((Pool(num, shape, BOTH, limits, names),))

            yield colocated(1, self._default).family, (colocated, shape.num_devices, most // shape.num_devices)
        shapes = self._space.shapes(case, names, 1)
        if not (self._space.disaggregated and shapes and most >= on_host):
            return
        best, units = math.inf, most // on_host
        chosen = 1
        for num_prefill in range(1, on_host):  # the split that needs the fewest hosts, on one of them
            plan = self._cells(1, self._default, num_prefill)
            slice_ = Evaluator(_slice(case, units)).evaluate(plan) if units > 1 else self._evaluator.evaluate(plan)
            assert slice_ is not None
            if slice_.strain < best:
                best, chosen = slice_.strain, num_prefill
        self._progress(f"of {on_host} devices of a host, {chosen} prefill")

        def cells(num: int, limits: Limits) -> Plan:
            return self._cells(num, limits, chosen)

        yield cells(1, self._default).family, (cells, on_host, units)

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

    def _fewest(self, name: object, family: _Family, size: int, most: int, limits: Limits, below: int) -> Result:
        """The fewest units that attain; if none do, all that there are. `below`: so many are known to be too few."""
        low, high = below, max(below + 1, 1)
        while high < most and not self._attains(family(high, limits)):
            low, high = high, min(2 * high, most)
        if high == most and not self._attains(family(most, limits)):
            self._progress(f"{family(most, limits).name}: not attained")
            return self._result(family(most, limits))
        while high - low > 1:
            middle = (low + high) // 2
            if self._attains(family(middle, limits)):
                high = middle
            else:
                low = middle
        self._progress(f"{family(high, limits).name}: attained")
        return self._result(family(high, limits))

    def _tune(self, family: tuple[_Family, int, int], best: Result) -> Result:
        """Other limits, with as many units or fewer."""
        make, size, most = family
        for limits in self._space.all_limits():
            num = best.plan.num_devices // size
            if best.plan.is_disaggregated and limits.policy != self._space.policies[0]:
                continue
            plan = make(num, limits)
            if best.attains and self._attains(plan):
                fewer = num - 1
                while fewer and self._attains(make(fewer, limits)):
                    fewer -= 1
                plan = make(fewer + 1, limits)
            elif best.attains:
                continue
            best = min(best, self._result(plan), key=_order)
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
        """Of each shape of groups, what placing one model after the other comes to."""
        case, any_fits = self._case, False
        for shape in self._space.shapes(case, list(case.models)[:1], case.num_devices):
            placed: list[tuple[str, ...]] = [()] * (case.num_devices // shape.num_devices)
            best: Result | None = None
            while True:
                tries = list(self._one_more(placed, shape))
                results = [(self._result(plan), groups) for groups, plan in tries]
                if not results:
                    break
                result, groups = min(results, key=lambda one: (_placed_last(one[0]), _order(one[0])))
                if best is not None and _placed_last(best) <= _placed_last(result) and _order(best) <= _order(result):
                    break
                best, placed = result, groups
            if best is not None and best.strain < math.inf:
                any_fits = True
                yield best
        if not any_fits:
            raise nothing_fits(case)

    def _one_more(self, placed: list[tuple[str, ...]], shape: object) -> Iterator[tuple[list[tuple[str, ...]], Plan]]:
        """Placements with one model in one more group. Groups that are alike are one choice."""
        for name in self._case.models:
            for group in sorted(set(placed)):
                if name not in group:
                    groups = [*placed]
                    groups[groups.index(group)] = tuple(sorted((*group, name), key=list(self._case.models).index))
                    plan = self._plan(groups, shape)
                    if all(map(self._case.fits, plan.pools)):
                        yield groups, plan

    def _plan(self, groups: list[tuple[str, ...]], shape) -> Plan:  # type: ignore[no-untyped-def]
        kinds = sorted({group for group in groups if group})
        return Plan(tuple(Pool(groups.count(kind), shape, BOTH, self._default, kind) for kind in kinds))


def _placed_last(result: Result) -> bool:
    return result.strain == math.inf


def _order(result: Result) -> tuple[float, ...]:
    return (0, result.plan.num_devices, result.strain) if result.attains else (1, result.strain, result.plan.num_devices)


def _middle(space: Space) -> Limits:
    found = [limits for limits in space.all_limits() if limits.policy == space.policies[0]]
    return found[len(found) // 2]


def _slice(case: Case, num: int) -> Case:
    """Every num-th job."""
    return replace(case, jobs=case.jobs[::num])
