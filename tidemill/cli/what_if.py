"""The output of `tidemill simulate --what-if`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tidemill.cli.simulate_case import RecordedCase
from tidemill.errors import ConfigError
from tidemill.planning.what_if import Answer, Case, Search, Slo, Times, Tried, lines_of


def ask(
    case: RecordedCase, slo: Slo, most_engines: int, seconds: float, scales: tuple[float, float]
) -> Answer:
    """`scales`: of times and of lengths."""
    if slo.ttft_s is None and slo.tpot_s is None:
        raise ConfigError(
            "--what-if needs an SLO.",
            fix="Give --slo-ttft-ms, --slo-tpot-ms, or both.",
            param="what_if",
        )
    console = Console(stderr=True, highlight=False)
    progress = (
        (lambda text: console.print(f"  {text}", markup=False))
        if console.is_terminal
        else (lambda text: None)
    )
    recorded = case.recorded if scales == (1.0, 1.0) else (lambda rows: [])
    wanted = Case(
        case.rows, case.config, case.profile, slo, case.delays, case.num_engines, case.page_bytes, case.free_bytes,
        case.faster, case.slower, max(most_engines, case.num_engines), *scales,
    )  # fmt: skip
    return Search(wanted, recorded, seconds, progress).run()


def body_of(answer: Answer, case: RecordedCase, slo: Slo) -> dict[str, Any]:
    """The answer as JSON."""

    def one(tried: Tried) -> dict[str, Any]:
        return {
            "options": dict(tried.change.options), "replicas": tried.change.num_engines, **asdict(tried.times),
            "attainment_low": tried.low, "attainment_high": tried.high, "keeps": tried.keeps, "given_up": not tried.is_complete,
            "requests": tried.num_requests, "beyond": tried.beyond,
        }  # fmt: skip

    return {
        "model": case.model,
        "slo": asdict(slo),
        "requests": answer.num_all,
        "tried_with": answer.num_requests,
        "recorded": None if answer.recorded is None else asdict(answer.recorded),
        "simulated": asdict(answer.simulated),
        "error": {"ttft": answer.ttft_error, "tpot": answer.tpot_error, "speed": case.speeds},
        "tried": [one(tried) for tried in answer.tried],
        "found": None if answer.found is None else one(answer.found),
        "time_over": answer.is_cut,
        "took_s": answer.took_s,
    }


def show(answer: Answer, case: RecordedCase, slo: Slo) -> None:
    limits = [
        f"{name} {value * 1000:g} ms"
        for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if value is not None
    ]
    title = f"{case.model}: {' and '.join(limits)} for {slo.attainment:.0%} of {answer.num_requests:,} requests"
    table = Table(
        "",
        "within the SLO",
        "TTFT p50 / p90 / p99",
        "TPOT p50 / p90 / p99",
        title=title,
        title_justify="left",
    )
    if answer.recorded is not None:
        table.add_row("as recorded", f"{answer.recorded.attainment:.1%}", *_both(answer.recorded))
    table.add_row("as simulated", f"{answer.simulated.attainment:.1%}", *_both(answer.simulated))
    if answer.recorded is not None:
        ratios = (
            answer.ttft_error if slo.ttft_s else None,
            answer.tpot_error if slo.tpot_s else None,
        )
        cells = (
            "-" if ratio is None else f"× {ratio:.2f} at p{100 * slo.attainment:g}"
            for ratio in ratios
        )
        table.add_row("recorded / simulated", "", *cells)
        if case.speeds != (1.0, 1.0):
            table.add_row(
                "steps, in good and bad times",
                "",
                f"× {case.speeds[0]:.2f} to × {case.speeds[1]:.2f}",
                "",
            )
    table.add_section()
    shown = _shown(answer)
    for tried in shown:
        part = f"{tried.times.attainment:.1%} ({tried.low:.1%} to {tried.high:.1%})"
        mark = " *" if tried is answer.found else ""
        table.add_row(tried.change.flags(case.num_engines) + mark, part, *_both(tried.times))
    console = Console(highlight=False)
    console.print(table)
    if others := len(answer.tried) - 1 - len(shown):
        console.print(
            f"{others} other changes were tried and kept it for no more requests (--json lists them).",
            markup=False,
        )
    for line in lines_of(answer, slo, case.num_engines):
        console.print(line, markup=False)
    console.print(f"{len(answer.tried)} simulations in {answer.took_s:.1f} s", markup=False)


def _shown(answer: Answer) -> list[Tried]:
    """The changes that were better than those before them, in the order in which they were tried."""
    shown, best = [], answer.simulated.attainment
    for tried in answer.tried[1:]:
        if tried is answer.found or (tried.is_complete and tried.times.attainment > best):
            shown.append(tried)
            best = tried.times.attainment
    return shown


def _both(times: Times) -> tuple[str, str]:
    return _percentiles(times.ttft_s), _percentiles(times.tpot_s)


def _percentiles(values: dict[str, float]) -> str:
    if not values:
        return "-"
    scale, unit = (1, "s") if max(values.values()) >= 10 else (1000, "ms")
    return (
        " / ".join(f"{value * scale:.{1 if unit == 's' else 0}f}" for value in values.values())
        + f" {unit}"
    )


def print_answers(answers: list[tuple[Answer, RecordedCase]], slo: Slo, as_json: bool) -> bool:
    """Returns whether something keeps the SLO, of each model."""
    if as_json:
        bodies = [body_of(answer, case, slo) for answer, case in answers]
        print(json.dumps(bodies[0] if len(bodies) == 1 else bodies, indent=1))
    else:
        for answer, case in answers:
            show(answer, case, slo)
    return all(answer.found is not None for answer, _ in answers)
