"""Which plans there are for a number of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.planning.hardware import Shape
from tidemill.planning.plans import Case, Limits, Plan, Pool
from tidemill.sim.cluster import BOTH, DECODE, PREFILL

_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Space:
    """What is tried. Decode engines compute no prompts, so that their budget does not matter; prefill engines hold few requests."""

    policies: Sequence[str] = ("continuous", "prefill-first")
    token_budgets: Sequence[int] = (512, 2048, 8192)
    max_requests: Sequence[int] = (64, 256)
    disaggregated: bool = True
    colocated: bool = True
    pipelines: bool = False

    def shapes(self, case: Case, models: Sequence[str], most: int) -> list[Shape]:
        """Those that these models can share, the smallest first."""
        stages = _SIZES if self.pipelines else (1,)
        found = [Shape(tensor, num) for tensor in _SIZES for num in stages if tensor * num <= min(most, case.hardware.on_engine)]
        fitting = [shape for shape in found if case.fits(Pool(1, shape, models=tuple(models)))]
        return sorted(fitting, key=lambda shape: (shape.num_devices, shape.stages))

    def all_limits(self) -> list[Limits]:
        return [Limits(*one) for one in itertools.product(self.policies, self.token_budgets, self.max_requests)]

    def prefill_limits(self) -> list[Limits]:
        return [Limits(self.policies[0], budget, self.max_requests[-1]) for budget in self.token_budgets]

    def decode_limits(self) -> list[Limits]:
        return [Limits(self.policies[0], min(self.token_budgets), num) for num in self.max_requests]

    def plans(self, case: Case, num: int) -> list[Plan]:
        """Of exactly so many devices."""
        if len(case.models) > 1:
            return list(self._multiplexed(case, num))
        names = tuple(case.models)
        shapes = self.shapes(case, names, num)
        made = list(self._colocated(shapes, names, num)) if self.colocated else []
        return made + (list(self._disaggregated(shapes, names, num)) if self.disaggregated else [])

    def _colocated(self, shapes: Sequence[Shape], names: tuple[str, ...], num: int) -> Iterator[Plan]:
        for shape in shapes:
            if num % shape.num_devices == 0:
                for limits in self.all_limits():
                    yield Plan((Pool(num // shape.num_devices, shape, BOTH, limits, names),))

    def _disaggregated(self, shapes: Sequence[Shape], names: tuple[str, ...], num: int) -> Iterator[Plan]:
        for first, second in itertools.product(shapes, shapes):
            for num_first in range(first.num_devices, num, first.num_devices):
                if (num - num_first) % second.num_devices == 0:
                    for limits, others in itertools.product(self.prefill_limits(), self.decode_limits()):
                        prefill = Pool(num_first // first.num_devices, first, PREFILL, limits, names)
                        yield Plan((prefill, Pool((num - num_first) // second.num_devices, second, DECODE, others, names)))

    def _multiplexed(self, case: Case, num: int) -> Iterator[Plan]:
        """Groups of devices, each with some of the models, so that each model is somewhere."""
        names = tuple(case.models)
        subsets = [subset for size in range(1, len(names) + 1) for subset in itertools.combinations(names, size)]
        groups = [(shape, subset) for subset in subsets for shape in self.shapes(case, subset, num)]
        for chosen in _multisets(groups, num):
            if {name for (_, subset), _ in chosen for name in subset} == set(names):
                for limits in self.all_limits():
                    yield Plan(tuple(Pool(count, shape, BOTH, limits, subset) for (shape, subset), count in chosen))


_Group = tuple[Shape, tuple[str, ...]]


def _multisets(groups: Sequence[_Group], num: int) -> Iterator[list[tuple[_Group, int]]]:
    """How often each group is taken, so that they have so many devices in all."""
    if num == 0:
        yield []
    elif groups:
        size = groups[0][0].num_devices
        for count in range(num // size, -1, -1):
            for rest in _multisets(groups[1:], num - count * size):
                yield [(groups[0], count), *rest] if count else rest
