"""Drafters: they guess the next tokens of running requests, and a step verifies the guesses.

What a request outputs never depends on them: a step draws the target's own token in the place of
every draft, and a draft counts only if it is that token. With rejection acceptance (acceptance.py)
only the distribution of the output does not depend on them. A new drafter is a file here and a line
in `DRAFTERS` (registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload, runtime_checkable

import numpy as np

from tidemill.types.sampling import SamplingParams

# What a further token adds to the time of a step of one, before it is measured; by device.
SLOPES = {"cpu": 0.35, "cuda": 0.005}


class Ask(NamedTuple):
    """A request that may have drafts."""

    seq: int
    row: int
    tokens: Sequence[int]  # all that are known
    num_prompt: int
    params: SamplingParams
    most: int  # drafts that can be used
    salt: str = ""  # what is learned from a request serves others with the same salt only
    # ids of the prompt that stand for no text, which are no drafts
    placeholders: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Drawn(Sequence[int]):
    """Drafts that were drawn at random, each from a row of `probs_DV` (float32), which rejection
    acceptance makes use of. Whether a draft is among them must not depend on which token it is."""

    tokens: Sequence[int]
    probs_DV: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.tokens[index]


class Drafter(Protocol):
    name: str
    # a guess costs next to nothing, so it is made before it is decided whether it is worth
    # verifying
    is_free: bool

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        """The tokens that may follow, for each request; none where there is no guess. Those of a
        drafter that samples may be `Drawn`."""
        ...

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        """The request has ended, or has left its row."""
        ...


@runtime_checkable
class KnowsChances(Protocol):
    """A drafter whose drafts are not a chain of equals."""

    def chances(self, params: SamplingParams, most: int) -> Sequence[float] | None:
        """The chance of each of so many drafts to be right, never more than the one before it;
        None: as in a chain."""
        ...
