"""Drafts that are a tree: several guesses of one token, each with guesses of what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Tree(Sequence[int]):
    """The first drafts of a tree are a tree, too: a parent comes before its children."""

    tokens: Sequence[int]
    # by draft, the number of the one before it; -1: it follows the last known token
    parents: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Tree: ...
    def __getitem__(self, index: int | slice) -> int | Tree:
        if isinstance(index, int):
            return self.tokens[index]
        assert index.start in (None, 0)
        return Tree(self.tokens[index], self.parents[index])

    @property
    def depth(self) -> int:
        return max(depths_of(self.parents), default=0)


def depths_of(parents: Sequence[int]) -> list[int]:
    """By draft, how many tokens it is after the last known one."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def ancestors_of(parents: Sequence[int], draft: int) -> list[int]:
    """Drafts, from the first to this one."""
    path = []
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


def right_path(tokens: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The drafts that are right, one after the other. `drawn`: the token after the last known one,
    and those after each draft."""
    path, at = list[int](), -1
    while True:
        token = drawn[at + 1]
        found = next(
            (i for i in range(at + 1, len(tokens)) if parents[i] == at and tokens[i] == token), None
        )
        if found is None:
            return path
        path.append(found)
        at = found
