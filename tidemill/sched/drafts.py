"""How many drafts are worth verifying: as many as make the most tokens a second, from what was accepted and what steps took.

A draft is right with some probability, which falls with each draft before it; every one that is verified makes the step a little
longer for all. Both are measured all the time. Where no draft is worth its time there are none, and the step is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

_FADE = 0.9  # weight of older guesses with each new one
_PRIOR = 1.0  # guesses that what is known of all requests counts for, where little is known of one
_SHAPE, _SCALE = 0.2, 0.3  # how fast the measured times follow
_LEAST = 0.02  # a draft less likely than this is not considered
_MARGIN = 1.02  # what a gain must be at least: the estimate is not exact


@dataclass(slots=True)
class _Record:
    """Guesses that were compared with the token drawn, and those that were right; older ones weigh less."""

    num_right: float = 0.0
    num_tried: float = 0.0

    def add(self, num_right: int, num_tried: int, fade: float = _FADE) -> None:
        kept = fade**num_tried
        self.num_right = self.num_right * kept + num_right
        self.num_tried = self.num_tried * kept + num_tried

    def rate(self, prior: float) -> float:
        return (self.num_right + _PRIOR * prior) / (self.num_tried + _PRIOR)


class Acceptance:
    """How often the drafts of each request are right."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._all = _Record()
        self._of: dict[int, _Record] = {}

    def rate(self, seq: int) -> float:
        general = self._all.rate(self._prior)
        return self._of[seq].rate(general) if seq in self._of else general

    def add(self, seq: int, num_drafts: int, num_right: int) -> None:
        """A step compared the drafts up to the first wrong one."""
        num_tried = min(num_right + 1, num_drafts)
        self._of.setdefault(seq, _Record()).add(num_right, num_tried)
        self._all.add(num_right, num_tried, 0.99)

    def fade(self, seq: int) -> None:
        """It got a token without drafts: after some time it is tried again."""
        for record, kept in ((self._all, 0.998), (self._of.get(seq), 0.98)):
            if record is not None:
                record.num_right, record.num_tried = record.num_right * kept, record.num_tried * kept

    def forget(self, seq: int) -> None:
        self._of.pop(seq, None)


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step by its number of tokens, with and without drafts (a step with drafts cannot be launched before the last
    one's result is there). `slope`: what a token adds to the time of a step of one, until it is measured."""

    slope: float
    _scale: float = 0.0
    _shape: dict[tuple[bool, int], float] = field(default_factory=dict)

    def add(self, num_tokens: int, drafted: bool, seconds: float) -> None:
        key = drafted, _bucket(num_tokens)
        expected = self._relative(num_tokens, drafted)
        if not self._scale:
            self._scale = seconds / expected
        elif seconds > 8 * self._scale * expected:
            return  # something else happened
        else:
            self._scale += _SCALE * (seconds / expected - self._scale)
        found = self._shape.get(key)
        self._shape[key] = seconds / self._scale if found is None else found + _SHAPE * (seconds / self._scale - found)

    def of(self, num_tokens: int, drafted: bool) -> float:
        """In any unit: only ratios mean something before the first is measured."""
        return self._relative(num_tokens, drafted) * (self._scale or 1.0)

    def _relative(self, num_tokens: int, drafted: bool) -> float:
        found = self._shape.get((drafted, _bucket(num_tokens)))
        if found is not None:
            return found
        near = min(self._shape, key=lambda key: (key[0] is not drafted, abs(key[1] - num_tokens)), default=None)
        line = 1 + self.slope * (num_tokens - 1)
        return line if near is None else self._shape[near] * line / (1 + self.slope * (near[1] - 1))


def _bucket(num_tokens: int) -> int:
    """Exact for few tokens, within an eighth for many."""
    step = 1 << max(num_tokens.bit_length() - 4, 0)
    return num_tokens // step * step


def allot(rates: Mapping[int, float], most: Mapping[int, int], num_tokens: int, room: int, times: StepTimes) -> dict[int, int]:
    """By request, how many drafts: of all numbers of drafts in the step, that with the most expected tokens a second.

    `rates`: how likely each draft is right if those before it were. `most`: drafts there are. `num_tokens`: of the step without
    drafts, each of which yields one. `room`: drafts that fit."""
    heap = [(-rate, seq, 1) for seq, rate in rates.items() if most.get(seq)]
    heapify(heap)
    order, best, expected = list[int](), 0, float(num_tokens)
    best_rate = _MARGIN * num_tokens / times.of(num_tokens, False)
    while heap and len(order) < room and heap[0][0] < -_LEAST:
        chance, seq, number = heappop(heap)
        order.append(seq)
        expected -= chance
        rate = expected / times.of(num_tokens + len(order), True)
        if rate > best_rate:
            best, best_rate = len(order), rate
        if number < most[seq]:
            heappush(heap, (chance * rates[seq], seq, number + 1))
    given: dict[int, int] = {}
    for seq in order[:best]:
        given[seq] = given.get(seq, 0) + 1
    return given
