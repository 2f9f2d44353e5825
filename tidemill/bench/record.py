"""Statistics of the times of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.planning.records import PERCENTILES, Record, percentile, spread_of

__all__ = ["PERCENTILES", "Record", "percentile", "spread_of", "summarize"]


def summarize(
    records: Sequence[Record], *, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None
) -> dict[str, Any]:
    """Everything a table shows. Failures are counted, never averaged in."""
    good = [record for record in records if record.error is None and record.token_times_s]
    duration = max((record.end_s for record in good), default=0.0) - min(
        (r.sent_s for r in good), default=0.0
    )
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
