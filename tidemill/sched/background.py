"""The part of a step that requests in the background get."""

from __future__ import annotations


class Background:
    """Alone, the background has a budget of its own. Beside other requests it gets a few tokens a
    step, on average."""

    def __init__(self, tokens: float, budget: int, most_saved: float) -> None:
        """`tokens`: a step, on average, beside others. `budget`: a step, alone. `most_saved`: what
        it may have in one step when it got none for a while."""
        self.budget = budget
        self._tokens = tokens
        self._most_saved = most_saved
        self._saved = 0.0  # tokens that it may have and has not had

    def allow(self, is_alone: bool) -> int:
        """Tokens of the next step."""
        self._saved = (
            float(self.budget) if is_alone else min(self._saved + self._tokens, self._most_saved)
        )
        return max(int(self._saved), 0)

    def skip(self, num_steps: int, is_alone: bool, num_spent: int) -> None:
        """Counts so many steps at once, each with as many tokens."""
        if self._saved == self._most_saved and not is_alone and not num_spent:
            return
        for _ in range(num_steps):
            before = self._saved
            self.allow(is_alone)
            self.spend(num_spent)
            if self._saved == before:
                break

    def spend(self, num_tokens: int) -> None:
        self._saved -= num_tokens
