"""A search's result in words, and for programs."""

from __future__ import annotations

import math
from typing import Any

from tidemill.planning.plans import Case, Result
from tidemill.planning.search import Found

SIMULATED = "simulated"


def why(case: Case, found: Found) -> list[str]:
    """Sentences on the winner and the runner-up."""
    winner, other = found.winner, found.runner_up
    lines = []
    if found.attains:
        lines.append(
            f"Chosen: {winner.plan.name}: the fewest devices that keep the SLOs, and of those plans the one with the most room."
        )
    else:
        lines.append(
            f"Not attainable with {case.num_devices} x {case.hardware.name}. "
            f"Nearest is {winner.plan.name}: {_missed(case, winner)}."
        )
    if other is None:
        lines.append("There is no runner-up: no other kind of plan fits.")
    else:
        lines.append(f"Runner-up: {other.plan.name}: {_compared(case, winner, other)}.")
    return lines


def _compared(case: Case, winner: Result, other: Result) -> str:
    if other.attains and other.plan.num_devices > winner.plan.num_devices:
        return f"it keeps the SLOs too, with {other.plan.num_devices} devices instead of {winner.plan.num_devices}"
    if other.attains:
        return f"it keeps the SLOs too, with less room: {_binding(case, other)}, where the winner's strain is {winner.strain:.2f}"
    return _missed(case, other)


def _missed(case: Case, result: Result) -> str:
    if result.scale <= 1:
        return f"it keeps the SLOs, but takes {result.gpu_hours:.3g} GPU hours per million tokens, of {case.budget:.3g} allowed"
    return f"{result.attainment:.1%} of the requests keep the SLOs, of {case.slo.attainment:.0%}; {_binding(case, result)}"


def _binding(case: Case, result: Result) -> str:
    slo = case.slo
    ttft, tpot = result.parts
    what, scale, limit = (
        ("time to first token", ttft, slo.ttft_s)
        if ttft >= tpot
        else ("time per output token", tpot, slo.tpot_s)
    )
    if scale == math.inf:
        return "a model has no place"
    return f"the {what} that {slo.attainment:.0%} keep is {1000 * scale * limit:,.4g} ms, {scale:.2f} times the limit"


def as_dict(case: Case, found: Found, commands: list[str], source: str) -> dict[str, Any]:
    """The report as the dictionary that --json prints."""
    return {
        "source": source,
        "devices": f"{case.num_devices}x{case.hardware.name}",
        "slo": {
            "ttft_s": case.slo.ttft_s,
            "tpot_s": case.slo.tpot_s,
            "attainment": case.slo.attainment,
        },
        "requests": len(case.jobs),
        "attains": found.attains,
        "winner": result_dict(found.winner),
        "runner_up": None if found.runner_up is None else result_dict(found.runner_up),
        "why": why(case, found),
        "commands": commands,
        "search": {
            "plans": found.num_plans,
            "simulations": found.num_simulated,
            "exact": found.is_exact,
        },
        "results": [result_dict(result) for result in found.results],
    }


def result_dict(result: Result) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return round(value, 6) if math.isfinite(value) else None

    return {
        "plan": result.plan.name,
        "devices": result.plan.num_devices,
        "pools": [
            {
                "role": pool.role,
                "engines": pool.num,
                "tensor_parallel": pool.shape.tensor,
                "pipeline_parallel": pool.shape.stages,
                "models": list(pool.models),
                "policy": pool.limits.policy,
                "token_budget": pool.limits.token_budget,
                "max_requests": pool.limits.max_requests,
            }
            for pool in result.plan.pools
        ],
        "attainment": round(result.attainment, 6),
        "strain": finite(result.strain),
        "ttft_p50_s": finite(result.ttft_s[0]),
        "ttft_p99_s": finite(result.ttft_s[1]),
        "tpot_p50_s": finite(result.tpot_s[0]),
        "tpot_p99_s": finite(result.tpot_s[1]),
        "gap_p99_s": finite(result.gap_s[1]),
        "output_tokens_per_s_per_device": finite(result.throughput),
        "goodput_requests_per_s_per_device": finite(result.goodput),
        "gpu_hours_per_million_output_tokens": finite(result.gpu_hours),
        "transfer_hidden": finite(result.hidden),
    }
