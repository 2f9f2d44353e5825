"""World: how the ranks of a group divide a model. Ints only.

Ranks of one stage (pipeline parallel) share its layers (tensor parallel): rank = stage * tensor +
place within the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.distributed.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Stage:
    """Neighbouring layers of a model. The first stage has the embedding, the last the final norm
    and the head."""

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
class Part:
    """The part that a rank has of the layers it shares with others."""

    shard: Shard = WHOLE  # of heads and inner values
    hidden: Shard = WHOLE  # of the hidden size, which is cut as well if this is a part
    rows: Shard = WHOLE  # of a step's tokens: ranks gather the weights of a layer as they need it

    @property
    def tables(self) -> Shard:
        """The shard of the rows of tables: all ranks have some."""
        if self.rows.size > 1:
            return self.rows
        if self.hidden.size == 1:
            return self.shard
        return Shard(
            self.shard.rank * self.hidden.size + self.hidden.rank,
            self.shard.size * self.hidden.size,
        )


@dataclass(frozen=True, slots=True)
class World:
    """`layout`: how ranks that share layers do: 1d, 2d (by a grid of `grid` parts of the hidden
    size), gathered, or phased (parts as 1d has them)."""

    tensor: int
    stage_ends: tuple[int, ...]  # of each stage: the number of the layer after its last
    layout: str = "1d"
    grid: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.stage_ends)

    @property
    def size(self) -> int:
        return self.tensor * self.num_stages

    def shard(self, rank: int) -> Shard:
        return Shard(rank % self.tensor, self.tensor)

    def part(self, rank: int) -> Part:
        shard = self.shard(rank)
        if self.layout == "gathered":
            return Part(rows=shard)
        if self.grid == 1:
            return Part(shard)
        row, column = divmod(shard.rank, self.grid)
        return Part(
            Shard(row, self.tensor // self.grid, f"column {column}"),
            Shard(column, self.grid, f"row {row}"),
        )

    def axes(self, rank: int) -> list[tuple[Shard, list[int]]]:
        """Groups in which ranks that share layers exchange something, in an order that all know:
        all of them; of a grid, its rows and its columns. The shard of this rank in each that it is
        in, and their ranks."""
        first, grid = self.stage_ranks(rank).start, self.grid
        groups = [("", [*self.stage_ranks(rank)])]
        if grid > 1:
            rows = self.tensor // grid
            groups += [
                (f"row {row}", [first + row * grid + i for i in range(grid)]) for row in range(rows)
            ]
            groups += [
                (f"column {column}", [first + column + i * grid for i in range(rows)])
                for column in range(grid)
            ]
        return [
            (Shard(ranks.index(rank) if rank in ranks else 0, len(ranks), axis), ranks)
            for axis, ranks in groups
        ]

    def stage(self, rank: int) -> Stage | None:
        """None: there is one, with all layers."""
        number = rank // self.tensor
        if self.num_stages == 1:
            return None
        return Stage(
            number,
            self.num_stages,
            self.stage_ends[number - 1] if number else 0,
            self.stage_ends[number],
        )

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
    costs: list[int],
    num_stages: int,
    last: int = 0,
    fits: Callable[[int, int], bool] = lambda begin, end: True,
    first: int = 0,
) -> tuple[int, ...] | None:
    """Ends of stages such that the most expensive costs least. `first`, `last`: what these stages
    compute besides their layers. `fits`: whether a stage may have the layers from `begin` to `end`;
    None: so they cannot be divided."""
    num, never = len(costs), sum(costs) + first + last + 1
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # Of one stage that ends there.
    best: list[tuple[int, tuple[int, ...]]] = [
        (first + sums[end] if fits(0, end) else never, (end,)) for end in range(num + 1)
    ]
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
