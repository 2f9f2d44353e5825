"""Shard: which part of something that is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    size: int = 1  # ranks
    axis: str = ""  # of a grid of ranks: which of its groups they are; empty: all ranks

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size

    def range(self, num: int, unit: int = 1) -> range:
        """The range of `num` things, in units that stay whole, that belongs to this rank:
        neighbours, as many as others have, or one unit more."""
        units = -(-num // unit)
        begin, end = (units * i // self.size * unit for i in (self.rank, self.rank + 1))
        return range(min(begin, num), min(end, num))


WHOLE = Shard()
