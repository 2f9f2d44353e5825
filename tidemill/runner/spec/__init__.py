"""Drafters: they guess the next tokens of running requests, and a step verifies the guesses.

What a request outputs never depends on them: a step draws the target's own token in the place of every draft, and a draft counts
only if it is that token. A new drafter is a file here and a line in `DRAFTERS` (registry.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidemill.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that may have drafts."""

    seq: int
    row: int
    tokens: Sequence[int]  # all that are known
    num_prompt: int
    params: SamplingParams
    most: int  # drafts that can be used
    salt: str = ""  # what is learned from a request serves others with the same salt only


class Drafter(Protocol):
    name: str
    is_free: bool  # a guess costs next to nothing, so it is made before it is decided whether it is worth verifying

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        """For each, tokens that may follow; none where there is no guess."""
        ...

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        """The request has ended, or has left its row."""
        ...
