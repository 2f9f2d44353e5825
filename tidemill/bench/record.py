"""Times of each request, and statistics of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Record:
    """One request's times, in seconds since the run began."""

    due_s: float  # when it should have been sent
    sent_s: float = 0.0
    started_s: float | None = None  # when the engine admitted it, where that is known
    token_times_s: list[float] = field(default_factory=list)  # when text came; several tokens may come at once
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


def summarize(records: Sequence[Record], *, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> dict[str, Any]:
    """Everything a table shows. Failures are counted, never averaged in."""
    good = [record for record in records if record.error is None and record.token_times_s]
    duration = max((record.end_s for record in good), default=0.0) - min((r.sent_s for r in good), default=0.0)
    per_second = 1 / duration if duration > 0 else 0.0
    summary: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "duration_s": duration,
        "requests_per_s": len(good) * per_second,
        "input_tokens_per_s": sum(record.num_prompt for record in good) * per_second,
        "output_tokens_per_s": sum(record.num_output for record in good) * per_second,
        "cached_tokens": sum(record.num_cached for record in good),
        "ttft_s": spread_of([record.ttft_s for record in good]),
        "tpot_s": spread_of([tpot for record in good if (tpot := record.tpot_s) is not None]),
        "itl_s": spread_of([gap for record in good for gap in record.gaps_s]),
        "e2e_s": spread_of([record.e2e_s for record in good]),
        "lateness_s": spread_of([record.sent_s - record.due_s for record in records]),
    }
    if slo_ttft_s is not None or slo_tpot_s is not None:
        met = [
            record
            for record in good
            if (slo_ttft_s is None or record.ttft_s <= slo_ttft_s)
            and (slo_tpot_s is None or (record.tpot_s or 0.0) <= slo_tpot_s)
        ]
        summary["goodput_requests_per_s"] = len(met) * per_second
        summary["slo_met"] = len(met) / len(records) if records else 0.0
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    if errors:
        summary["errors"] = errors
    return summary
