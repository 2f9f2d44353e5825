"""Speculation without a model: drafts that are right as often as is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.runner.spec import Ask
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepItem

FIRST_TOKEN = 2**30  # of outputs; prompts have smaller ones
_WRONG = 2**29  # added to the token of a sequence: another one


def token_of(seq: int) -> int:
    """A sequence has one token of its own, again and again: no two outputs are found as one in the
    prefix cache."""
    return FIRST_TOKEN + seq


@dataclass(frozen=True, slots=True)
class Speculation:
    """`acceptance`: how likely a draft is right if those before it are. `draft_s`: what the drafter
    takes for one more draft of all sequences; 0: it is free, as one that looks into the text is."""

    acceptance: float
    max_drafts: int = 8
    draft_s: float = 0.0
    adaptive: bool = True  # as many are verified as are worth it


class SimDrafter:
    name = "simulated"

    def __init__(self, speculation: Speculation, clock: VirtualClock) -> None:
        self._how, self._clock, self.is_free = speculation, clock, speculation.draft_s == 0.0

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        if asks and not self.is_free:
            self._clock.advance(self._how.draft_s * max(ask.most for ask in asks))
        return [[token_of(ask.seq)] * ask.most for ask in asks]

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        """It knows nothing."""


def drawn(item: StepItem, acceptance: float) -> list[int]:
    """The tokens of a sequence that a step draws: its own for as long as drafts are right, then
    another."""
    token, first = token_of(item.seq), item.start + item.count - item.num_drafts
    num_right = 0
    while num_right < max(item.num_drafts, 1) and _chance(item.seq, first + num_right) < acceptance:
        num_right += 1
    if item.num_drafts and num_right == item.num_drafts:
        return [token] * (num_right + 1)
    return [token] if num_right and not item.num_drafts else [token] * num_right + [token + _WRONG]


def _chance(seq: int, position: int) -> float:
    """From 0 to 1, the same whenever it is asked for."""
    mixed = (seq * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (
        2**64 - 1
    )
    mixed = ((mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93) & (2**64 - 1)
    return (mixed ^ (mixed >> 32)) / 2**64
