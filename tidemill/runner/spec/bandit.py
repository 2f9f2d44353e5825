"""The exit at which a chain of drafts leaves the model: Thompson sampling over the exits, for each
draft of the chain.

How often a draft is right, by its number in the chain and its exit, has a Beta posterior. Each
proposal draws from all of them and plans the chain that would give the most tokens a second if the
draws were true: a deeper exit is right more often, and costs more. What was hardly tried draws
widely, so it is tried again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_FADE = 0.995  # weight of older results with each new one: texts change
_LONGEST = 8  # drafts of a chain: all chains are looked at
_LEAST = 0.02  # a chain less likely than this to be right is not made longer


@dataclass(slots=True)
class Beta:
    """Drafts that were right and wrong, and one of each before any was tried."""

    right: float = 0.0
    wrong: float = 0.0

    def draw(self, noise: random.Random) -> float:
        return noise.betavariate(1.0 + self.right, 1.0 + self.wrong)

    def add(self, is_right: bool) -> None:
        self.right, self.wrong = self.right * _FADE + is_right, self.wrong * _FADE + (not is_right)

    @property
    def mean(self) -> float:
        return (1.0 + self.right) / (2.0 + self.right + self.wrong)


class ExitBandit:
    """Exits are numbered from the first to the deepest. A draft leaves no deeper than the one
    before it: the keys and values that it needs are those that were computed for the drafts
    before."""

    def __init__(
        self, draft_costs: Sequence[float], step_costs: Sequence[float], seed: int = 0
    ) -> None:
        """`draft_costs`: of a draft by each exit. `step_costs`: of a step of 1, 2, ... tokens; in
        the same unit."""
        self._draft_costs = list(draft_costs)
        self._step_costs = list(step_costs)
        self._noise = random.Random(seed)
        self._posteriors: list[list[Beta]] = []  # by number of the draft, by exit

    def posterior(self, number: int, exit_: int) -> Beta:
        while len(self._posteriors) <= number:
            self._posteriors.append([Beta() for _ in self._draft_costs])
        return self._posteriors[number][exit_]

    def add(self, number: int, exit_: int, is_right: bool) -> None:
        """The draft of this number was compared with the token drawn; those before it were right."""
        self.posterior(number, exit_).add(is_right)

    def plan(self, most: int) -> list[int]:
        """The exits of a chain of drafts; none: no draft is worth its time."""
        exits = range(len(self._draft_costs))
        most = min(most, _LONGEST)
        chances = [
            [self.posterior(number, exit_).draw(self._noise) for exit_ in exits]
            for number in range(most)
        ]
        best, best_rate = list[int](), 1.0 / self._step_costs[0]
        # chains: exits, chance that all are right, tokens, time
        open_ = [(list[int](), 1.0, 1.0, self._step_costs[0])]
        while open_:
            chain, chance, tokens, seconds = open_.pop()
            number = len(chain)
            for exit_ in exits[: chain[-1] + 1] if chain else exits:
                right = chance * chances[number][exit_]
                one = (
                    [*chain, exit_],
                    right,
                    tokens + right,
                    seconds + self._draft_costs[exit_] + self._more(number),
                )
                if one[2] / one[3] > best_rate:
                    best, best_rate = one[0], one[2] / one[3]
                if number + 1 < most and right > _LEAST:
                    open_.append(one)
        return best

    def _more(self, number: int) -> float:
        """The time that one more draft than this many adds to a step. Past what was measured, as
        the last."""
        if len(self._step_costs) < 2:
            return 0.0
        at = min(number, len(self._step_costs) - 2)
        return max(self._step_costs[at + 1] - self._step_costs[at], 0.0)
