"""The number of drafts that are worth verifying: as many as make the most tokens a second, from
what was accepted and what steps took.

A draft is right with some probability, which falls with each draft before it; every one that is
verified makes the step a little longer for all. Both are measured all the time. Where no draft is
worth its time there are none, and the step is as it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

_FADE = 0.95  # weight of older guesses with each new one
_PRIOR = 3.0  # guesses that what is known of all requests counts for, where little is known of one
# how fast measured times follow: of one number of tokens, and of all (contexts grow)
_SHAPE, _SCALE = 0.2, 0.03
_FIRST = 3  # measurements of a number of tokens, of which the least counts
_NEAR = 0.25  # a step whose tokens differ by this part tells what one takes
_TRIAL = 8  # drafts of a step, before it is known what they cost
_FORGET_AFTER = 512  # steps without drafts, after which times of steps with them are measured anew
_HOPE = 0.5  # of what a token is thought to add: beyond what was measured
_LEAST = 0.02  # a draft less likely than this is not considered
_MARGIN = 1.02  # what a gain must be at least: the estimate is not exact


@dataclass(slots=True)
class _Record:
    """Guesses that were compared with the token drawn, and those that were right; older ones weigh
    less."""

    num_right: float = 0.0
    num_tried: float = 0.0

    def add(self, num_right: int, num_tried: int, fade: float = _FADE) -> None:
        kept = fade**num_tried
        self.num_right = self.num_right * kept + num_right
        self.num_tried = self.num_tried * kept + num_tried

    def rate(self, prior: float) -> float:
        return (self.num_right + _PRIOR * prior) / (self.num_tried + _PRIOR)


class Acceptance:
    """The rates at which the drafts of each request are right."""

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
                record.num_right, record.num_tried = (
                    record.num_right * kept,
                    record.num_tried * kept,
                )

    def forget(self, seq: int) -> None:
        self._of.pop(seq, None)


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step by its number of tokens, with and without drafts (a step with drafts cannot
    be launched before the last one's result is there). `slope`: what a token adds to the time of a
    step of one, until it is measured."""

    slope: float
    _scale: float = 0.0
    _shape: dict[tuple[bool, int], float] = field(default_factory=dict)
    _num_seen: Counter[tuple[bool, int]] = field(default_factory=Counter)
    _num_with: int = 0  # steps with drafts that were measured
    _num_without: int = 0  # steps since the last with drafts
    # to what was not measured
    _nearest: dict[tuple[bool, int], tuple[bool, int] | None] = field(default_factory=dict)

    def add(self, num_tokens: int, drafted: bool, seconds: float) -> None:
        key = drafted, _bucket(num_tokens)
        found = self._shape.get(key)
        expected = self._relative(num_tokens, drafted) if drafted or found is None else found
        if not self._scale:
            self._scale = seconds / expected
        elif seconds > 8 * self._scale * expected:
            return  # something else happened
        if drafted:
            self._num_without = 0
            self._num_with += 1
        else:
            self._num_without += 1
            if self._num_without == _FORGET_AFTER:  # they may have been slow for another reason
                self._shape = {known: value for known, value in self._shape.items() if not known[0]}
                self._num_seen, self._num_with = Counter(), 0
        if self._nearest and (self._num_with <= _FIRST or found is None):
            self._nearest = {}
        self._num_seen[key] += 1
        # the first ones may be slow: something is done for the first time
        if found is None or self._num_seen[key] <= _FIRST:
            self._shape[key] = min(seconds / self._scale, math.inf if found is None else found)
            return
        self._shape[key] += _SHAPE * (seconds / self._scale - found)
        self._scale += _SCALE * (seconds / found - self._scale)

    def knows(self, num_tokens: int) -> bool:
        """A step of about so many tokens without drafts was measured: as requests end one by one,
        each number of them need not be measured anew, in steps without drafts."""
        key = False, _bucket(num_tokens)
        if key in self._shape:
            return True
        near = self._near(key)
        return near is not None and not near[0] and abs(near[1] - num_tokens) <= _NEAR * num_tokens

    def least(self, num_tokens: int) -> float:
        """The least time of a step without drafts: as long as one of fewer tokens, and its part of
        what one of more takes. 0: none was measured."""
        if self.knows(num_tokens):
            return self.of(num_tokens, False)
        known = ((num, value) for (drafted, num), value in self._shape.items() if not drafted)
        return (
            max((value * min(num_tokens / num, 1.0) for num, value in known), default=0.0)
            * self._scale
        )

    @property
    def is_believed(self) -> bool:
        """More than a few steps with drafts were measured."""
        return self._num_with >= _FIRST

    def of(self, num_tokens: int, drafted: bool) -> float:
        """In any unit: only ratios mean something before the first is measured."""
        return self._relative(num_tokens, drafted) * (self._scale or 1.0)

    def _relative(self, num_tokens: int, drafted: bool) -> float:
        """The time of a step in units of one with one token and no drafts. With drafts, the first
        few measurements are not believed: something may have been done for the first time."""
        is_believed = not drafted or self.is_believed
        key = drafted, _bucket(num_tokens)
        found = self._shape.get(key)
        if found is not None and is_believed:
            return found
        near = self._near(key)
        if near is None:
            return 1 + self.slope * (num_tokens - 1)
        if near[0] is not drafted or num_tokens < near[1]:
            return (
                self._shape[near]
                * (1 + self.slope * (num_tokens - 1))
                / (1 + self.slope * (near[1] - 1))
            )
        # Waiting takes as long for any number of drafts. More of them are tried rather than never
        # known.
        return self._shape[near] + _HOPE * self.slope * (num_tokens - near[1])

    def _near(self, key: tuple[bool, int]) -> tuple[bool, int] | None:
        """The measured key that is nearest to one that was not measured."""
        if key not in self._nearest:
            known = [
                shape for shape in self._shape if not shape[0] or (key[0] and self.is_believed)
            ]
            self._nearest[key] = min(
                known,
                key=lambda shape: (shape[0] is not key[0], abs(shape[1] - key[1])),
                default=None,
            )
        return self._nearest[key]


def _bucket(num_tokens: int) -> int:
    """Exact for few tokens, within an eighth for many."""
    step = 1 << max(num_tokens.bit_length() - 4, 0)
    return num_tokens // step * step


def _bucket_end(num_tokens: int) -> int:
    """The last number that is counted as this one."""
    return _bucket(num_tokens) + (1 << max(num_tokens.bit_length() - 4, 0)) - 1


@dataclass(slots=True)
class Trust:
    """Drafts that were right over those expected: who is chosen among many was often just lucky
    before."""

    value: float = 1.0
    _expected: float = 0.0
    _right: float = 0.0

    def add(self, num_expected: float, num_right: int) -> None:
        self._expected, self._right = (
            0.9 * self._expected + num_expected,
            0.9 * self._right + num_right,
        )
        self.value = min(max((self._right + 1.0) / (self._expected + 1.0), 0.1), 1.0)

    def fade(self) -> None:
        """A step without drafts: after some time there may be some again."""
        self._expected, self._right = 0.99 * self._expected, 0.99 * self._right
        self.value = min(max((self._right + 1.0) / (self._expected + 1.0), 0.1), 1.0)


def allot(
    rates: Mapping[int, float | Sequence[float]],
    most: Mapping[int, int],
    num_tokens: int,
    room: int,
    times: StepTimes,
    trust: float = 1.0,
) -> tuple[dict[int, int], float]:
    """By request, how many drafts: of all numbers of drafts in the step, that with the most
    expected tokens a second. And how many of them are expected to be right, at full trust.

    `rates`: how likely each draft is right if those before it were, or how likely each is right,
    the likelier ones first. `most`: drafts there are. `num_tokens`: of the step without drafts,
    each of which yields one. `room`: drafts that fit."""
    if not (least_s := times.least(num_tokens)):
        return {}, 0.0  # what drafts are to be compared with is measured first
    heap = [(-_chance(rate, 0), seq, 1) for seq, rate in rates.items() if most.get(seq)]
    heapify(heap)
    order, best, num_right, best_right = list[int](), 0, 0.0, 0.0
    best_rate = _MARGIN * num_tokens / least_s
    if not times.is_believed:
        # what steps with drafts take is found out with few
        room = min(room, max(_TRIAL, num_tokens // 4))
    end = 0
    while heap and len(order) < room and heap[0][0] < -_LEAST:
        chance, seq, number = heappop(heap)
        order.append(seq)
        num_right -= chance
        if number < most[seq]:
            heappush(heap, (-_chance(rates[seq], number), seq, number + 1))
        num_all = num_tokens + len(order)
        end = end if num_all <= end else _bucket_end(num_all)
        if num_all < end and heap and len(order) < room and heap[0][0] < -_LEAST:
            continue  # one more takes no longer
        rate = (num_tokens + trust * num_right) / times.of(num_all, True)
        if rate > best_rate:
            best, best_rate, best_right = len(order), rate, num_right
    return Counter(order[:best]), best_right


def _chance(rate: float | Sequence[float], number: int) -> float:
    """That a draft is right, and all that come before it in a chain."""
    if isinstance(rate, float):
        return rate ** (number + 1)
    return rate[number] if number < len(rate) else 0.0
