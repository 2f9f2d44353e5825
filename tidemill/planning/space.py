"""The possible plans for a number of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.planning.cluster import BOTH, DECODE, PREFILL
from tidemill.planning.hardware import Shape
from tidemill.planning.plans import Case, Limits, Plan, Pool

_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Space:
    """The space of plans that is searched. Prefill and decode engines have the same limits, as
    those of one server have."""

    policies: Sequence[str] = ("continuous", "prefill-first")
    token_budgets: Sequence[int] = (512, 2048, 8192)
    max_requests: Sequence[int] = (64, 256)
    disaggregated: bool = True
    colocated: bool = True
    unbuilt: bool = False  # also what the engine does not have on this hardware

    def shapes(self, case: Case, models: Sequence[str], most: int) -> list[Shape]:
        """Those that these models can share, the smallest first."""
        stages = _SIZES if self.unbuilt or case.hardware.has_pipelines else (1,)
        found = [
            Shape(tensor, num)
            for tensor in _SIZES
            for num in stages
            if tensor * num <= min(most, case.hardware.on_engine)
        ]
        # large steps hold more of what windows see
        limits = Limits(token_budget=max(self.token_budgets))
        fitting = [
            shape
            for shape in found
            if case.fits(Pool(1, shape, limits=limits, models=tuple(models)))
        ]
        return sorted(fitting, key=lambda shape: (shape.num_devices, shape.stages))

    def all_limits(self) -> list[Limits]:
        found = [
            Limits(*values)
            for values in itertools.product(self.policies, self.token_budgets, self.max_requests)
        ]
        return [limits for limits in found if limits.max_requests <= limits.token_budget]

    def role_limits(self) -> list[Limits]:
        return [limits for limits in self.all_limits() if limits.policy == self.policies[0]]

    def plans(self, case: Case, num: int) -> list[Plan]:
        """The plans for exactly so many devices."""
        if len(case.models) > 1:
            return list(self._multiplexed(case, num))
        names = tuple(case.models)
        shapes = self.shapes(case, names, num)
        plans = list(self._colocated(shapes, names, num)) if self.colocated else []
        if self.disaggregated and num <= case.hardware.on_host:
            plans += self._disaggregated(
                shapes if self.unbuilt else shapes[: shapes[:1] == [Shape()]], names, num
            )
        return plans

    def _colocated(
        self, shapes: Sequence[Shape], names: tuple[str, ...], num: int
    ) -> Iterator[Plan]:
        for shape in shapes:
            if num % shape.num_devices == 0:
                for limits in self.all_limits():
                    yield Plan((Pool(num // shape.num_devices, shape, BOTH, limits, names),))

    def _disaggregated(
        self, shapes: Sequence[Shape], names: tuple[str, ...], num: int
    ) -> Iterator[Plan]:
        for first, second in itertools.product(shapes, shapes):
            for num_first in range(first.num_devices, num, first.num_devices):
                if (num - num_first) % second.num_devices == 0:
                    for limits in self.role_limits():
                        prefill = Pool(
                            num_first // first.num_devices,
                            first,
                            PREFILL,
                            _for_prompts(limits),
                            names,
                        )
                        yield Plan(
                            (
                                prefill,
                                Pool(
                                    (num - num_first) // second.num_devices,
                                    second,
                                    DECODE,
                                    limits,
                                    names,
                                ),
                            )
                        )

    def _multiplexed(self, case: Case, num: int) -> Iterator[Plan]:
        """Groups of devices, each with some of the models, so that each model is somewhere."""
        names = tuple(case.models)
        subsets = [
            subset
            for size in range(1, len(names) + 1)
            for subset in itertools.combinations(names, size)
        ]
        groups = [(shape, subset) for subset in subsets for shape in self.shapes(case, subset, num)]
        for chosen in _multisets(groups, num):
            if {name for (_, subset), _ in chosen for name in subset} == set(names):
                for limits in self.all_limits():
                    yield Plan(
                        tuple(
                            Pool(count, shape, BOTH, limits, subset)
                            for (shape, subset), count in chosen
                        )
                    )


def _for_prompts(limits: Limits) -> Limits:
    """A prefill engine has few requests at a time: pools that differ in that alone are one."""
    return Limits(limits.policy, limits.token_budget, min(limits.token_budget, 256))


_Group = tuple[Shape, tuple[str, ...]]


def _multisets(groups: Sequence[_Group], num: int) -> Iterator[list[tuple[_Group, int]]]:
    """The multisets of groups: how often each group is taken, so that they have so many devices in
    all."""
    if num == 0:
        yield []
    elif groups:
        size = groups[0][0].num_devices
        for count in range(num // size, -1, -1):
            for rest in _multisets(groups[1:], num - count * size):
                yield [(groups[0], count), *rest] if count else rest
