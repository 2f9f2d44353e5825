"""Times of each request, measured or simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request's times, in seconds since the run began."""

    due_s: float  # when it should have been sent
    sent_s: float = 0.0
    started_s: float | None = None  # when the engine admitted it, where that is known
    # when text came; several tokens may come at once
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0  # when the response ended; its last tokens may have no text
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.num_output < 2:
            return None
        return (self.end_s - self.token_times_s[0]) / (self.num_output - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: an observed value, never an average of two."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else math.nan


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Percentiles; empty without values."""
    if not values:
        return {}
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
