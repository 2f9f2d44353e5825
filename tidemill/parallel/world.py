"""World: how the ranks of a group divide a model. Ints only.

Ranks of one stage (pipeline parallel) share its layers (tensor parallel): rank = stage * tensor + place within the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Stage:
    """Neighbouring layers of a model. The first stage has the embedding, the last the final norm and the head."""

    number: int
    num_stages: int
    first: int  # of its layers
    end: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end


@dataclass(frozen=True, slots=True)
class World:
    tensor: int
    stage_ends: tuple[int, ...]  # of each stage: the number of the layer after its last

    @property
    def num_stages(self) -> int:
        return len(self.stage_ends)

    @property
    def size(self) -> int:
        return self.tensor * self.num_stages

    def shard(self, rank: int) -> Shard:
        return Shard(rank % self.tensor, self.tensor)

    def stage(self, rank: int) -> Stage | None:
        """None: there is one, with all layers."""
        number = rank // self.tensor
        if self.num_stages == 1:
            return None
        return Stage(number, self.num_stages, self.stage_ends[number - 1] if number else 0, self.stage_ends[number])

    def stage_ranks(self, rank: int) -> range:
        """Those that share the layers of this one."""
        first = rank // self.tensor * self.tensor
        return range(first, first + self.tensor)

    def before(self, rank: int) -> int | None:
        """From which it gets hidden states."""
        return rank - self.tensor if rank >= self.tensor else None

    def after(self, rank: int) -> int | None:
        return rank + self.tensor if rank + self.tensor < self.size else None

    @property
    def sampler(self) -> int:
        """The rank whose tokens count."""
        return self.size - self.tensor


def split_layers(
    costs: list[int], num_stages: int, last: int = 0, fits: Callable[[int, int], bool] = lambda begin, end: True
) -> tuple[int, ...] | None:
    """Ends of stages such that the most expensive costs least. `last`: what the last stage computes besides its layers. `fits`:
    whether a stage may have the layers from `begin` to `end`; None: so they cannot be divided."""
    num, never = len(costs), sum(costs) + last + 1
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # Of one stage that ends there.
    best: list[tuple[int, tuple[int, ...]]] = [(sums[end] if fits(0, end) else never, (end,)) for end in range(num + 1)]
    for stage in range(1, num_stages):
        extra = last if stage == num_stages - 1 else 0
        best = [
            min(
                (
                    (max(best[begin][0], sums[end] - sums[begin] + extra), (*best[begin][1], end))
                    for begin in range(stage, end)
                    if fits(begin, end)
                ),
                default=(never, (0,)),
            )
            for end in range(num + 1)
        ]
    return best[num][1] if best[num][0] < never else None
