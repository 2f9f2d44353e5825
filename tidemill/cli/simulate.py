"""`tidemill simulate`: a recorded trace in the engine's own step loop, with a profile's costs
instead of a device."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tidemill.bench.record import Record, summarize
from tidemill.cli.bench import _percentiles
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.simulate_case import DEFAULT_PROFILE, RecordedCase, cases_of
from tidemill.errors import ConfigError
from tidemill.planning.drafter import Speculation
from tidemill.planning.fleet import Delays, run_rows
from tidemill.planning.simulator import SimEngine, SimTiers
from tidemill.planning.trace import MAX_REQUESTS, num_cut
from tidemill.planning.what_if import Slo

_OPTIONS = (
    "policy", "max-context", "max-requests", "token-budget", "kv-memory", "kv-host-memory", "page-size", "prefix-caching",
    "prefix-index", "queue-order", "batch-window", "evict", "max-pinned", "max-drafts", "adaptive-drafts",
)  # fmt: skip


@takes(*_OPTIONS)
def simulate(
    settings: Settings,
    trace: Annotated[
        Path,
        typer.Argument(
            help="Recorded traffic: the folder of `serve --record`, Azure's trace (CSV) or Mooncake's (JSONL)."
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            help="What steps cost: a file that `tidemill calibrate` has written, or the name of a shipped one. Default: of a "
            f"recording, its own; else {DEFAULT_PROFILE}."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Of a recording of several models, this one. Default: each by itself."),
    ] = "",
    server: Annotated[
        int, typer.Option(help="Of a recording, one server's life: 1 is the first, -1 the last.")
    ] = 0,
    key: Annotated[
        Path | None, typer.Option(help="The owner's key, of a recording that is sealed.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "-r", min=1, help="The first so many. Default: all.")
    ] = MAX_REQUESTS,
    time_scale: Annotated[
        float, typer.Option(help="Multiply the times by this: 0.5 sends twice as fast.")
    ] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="Multiply the prompt and output lengths by this.")
    ] = 1.0,
    acceptance_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Tokens are guessed ahead, and so often a guess is right. Default: none are.",
        ),
    ] = None,
    draft_ms: Annotated[
        float,
        typer.Option(min=0.0, help="What one more guess takes; 0: it is looked up in the text."),
    ] = 0.0,
    host_rate: Annotated[
        float, typer.Option(min=0.001, help="GB a second between --kv-host-memory and the device.")
    ] = 50.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="A request is good if its first token came within this.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="... and each further one within this, on average.")
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Search for the smallest change that keeps the SLO. Ends with 1 if there is none.",
        ),
    ] = False,
    attainment: Annotated[
        float, typer.Option(help="The part of the requests that must keep the SLO.")
    ] = 0.9,
    max_replicas: Annotated[
        int, typer.Option(min=1, max=64, help="With --what-if: so many engines at most.")
    ] = 4,
    seconds: Annotated[
        float, typer.Option(help="With --what-if: after these nothing else is tried.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    chart: Annotated[
        Path | None, typer.Option(help="Write charts (PNG) into this folder; needs matplotlib.")
    ] = None,
) -> None:
    """Replay a trace in a simulated engine. Options of the engine are those of `serve`; by default
    they are the profile's."""
    raise_on_interrupt()
    _check("--time-scale", time_scale, 1e-6, 1e6)
    _check("--length-scale", length_scale, 1e-6, 1e6)
    for name, ms in (("--slo-ttft-ms", slo_ttft_ms), ("--slo-tpot-ms", slo_tpot_ms)):
        _check(name, 1.0 if ms is None else ms, 1e-6, 1e9)
    _check("--draft-ms", draft_ms, 0.0, 1e9)
    _check("--host-rate", host_rate, 1e-3, 1e9)
    _check("--attainment", attainment, 1e-3, 1.0)
    _check("--seconds", seconds, 1.0, 86400.0)
    cases = cases_of(trace.expanduser(), settings, profile or "", requests, model, server, key)
    for case in cases:
        if acceptance_rate is not None:
            speculation = Speculation(
                acceptance_rate,
                settings["max-drafts"] or 8,
                draft_ms / 1000,
                settings["adaptive-drafts"],
            )
            case.config = replace(case.config, speculation=speculation)
        if settings["kv-host-memory"]:
            tiers = SimTiers(
                settings["kv-host-memory"] // case.page_bytes, case.page_bytes, 0, host_rate * 1e9
            )
            case.config = replace(case.config, tiers=tiers)
    limits = [None if ms is None else ms / 1000 for ms in (slo_ttft_ms, slo_tpot_ms)]
    if what_if:
        from tidemill.cli.what_if import ask, print_answers

        slo = Slo(limits[0], limits[1], attainment)
        answers = [
            (ask(case, slo, max_replicas, seconds, (time_scale, length_scale)), case)
            for case in cases
        ]
        if not print_answers(answers, slo, as_json):
            raise typer.Exit(1)
        return
    all_figures: dict[str, Any] = {}
    charts: dict[str, list[Record]] = {}
    for case in cases:
        figures, records = figures_of(case, time_scale, length_scale, limits)
        all_figures[case.model] = figures
        if not as_json:
            _show(figures, case, trace)
        if chart:
            charts[case.model] = records
    if as_json:
        print(
            json.dumps(
                next(iter(all_figures.values())) if len(cases) == 1 else {"models": all_figures},
                indent=1,
            )
        )
    for name, records in charts.items():
        from tidemill.bench.plots import plot_latencies

        assert chart is not None
        folder = chart if len(charts) == 1 else chart / name.replace("/", "-")
        Console(stderr=True, highlight=False).print(
            f"wrote {plot_latencies(records, folder / 'latency.png')}"
        )


def figures_of(
    case: RecordedCase, time_scale: float, length_scale: float, limits: list[float | None]
) -> tuple[dict[str, Any], list[Record]]:
    """The results of one model as they are printed, and the simulated records. `limits`: of the
    times to the first token and per token."""
    config, cost = case.config, case.profile
    slos = dict(zip(("slo_ttft_s", "slo_tpot_s"), limits, strict=True))
    lengths: dict[str, Any] = {"length_scale": length_scale, "max_context": config.max_context}
    begin = time.perf_counter()
    run = run_rows(
        case.rows, config, cost, num_engines=case.num_engines, delays=case.delays, time_scale=time_scale,
        length_scale=length_scale,
    )  # fmt: skip
    took = time.perf_counter() - begin
    # not of those that were aborted before
    records = [record for record in run.records if record.token_times_s]
    figures = summarize(records, **slos) | about(run.engines)
    figures |= {
        "profile": cost.model.name,
        "machine": cost.machine,
        "is_estimated": cost.is_estimated,
    }
    if case.delays != Delays():
        figures["fit"] = msgspec.to_builtins(cost.errors)
    end_s = max(engine.clock.now() for engine in run.engines)
    figures |= {"engine": asdict(config), "replicas": case.num_engines}
    figures |= {"simulation_s": took, "times_real_time": end_s / took if took else 0.0}
    figures["cut_requests"] = num_cut(case.rows, **lengths)
    if recorded := case.recorded(case.rows):
        figures["recorded"] = summarize(recorded, **slos)
    return figures, records


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # nan is in no range
        raise ConfigError(f"{name} {value:g} is out of range.", fix=f"Give {least:g} to {most:g}.")


def about(engines: Sequence[SimEngine]) -> dict[str, Any]:
    """Beside what requests saw."""
    tallies, end_s = (
        [engine.tally for engine in engines],
        max(engine.clock.now() for engine in engines),
    )
    num_prompt, num_cached = (
        sum(tally.num_prompt for tally in tallies),
        sum(tally.num_cached for tally in tallies),
    )
    busy_s, num_steps = (
        sum(engine.busy_s for engine in engines),
        sum(engine.num_steps for engine in engines),
    )
    return {
        "prefix_hit_rate": num_cached / num_prompt if num_prompt else 0.0,
        "cached_tokens": num_cached,
        "preemptions": sum(tally.num_preempted for tally in tallies),
        "evicted_pages": sum(tally.num_evicted for tally in tallies),
        "aborted": sum(tally.num_aborted for tally in tallies),
        "most_waiting": max(tally.most_waiting for tally in tallies),
        "utilisation": busy_s / end_s / len(engines) if end_s else 0.0,
        "steps": num_steps,
        "mean_step_s": busy_s / num_steps if num_steps else 0.0,
    }


def _show(figures: dict[str, Any], case: RecordedCase, trace: Path) -> None:
    profile, config = case.profile, case.config
    what = f"{profile.model.name} on {profile.machine}{' (estimated)' if profile.is_estimated else ''}, simulated"
    both = [figures, *([figures["recorded"]] if "recorded" in figures else [])]
    engines = f"{case.num_engines} replicas, " if case.num_engines > 1 else ""
    columns = [f"{engines}{config.policy}, {config.num_rows} slots", "as recorded"][: len(both)]
    table = Table("", *columns, title=f"{trace.name}: {what}", title_justify="left")
    table.caption = "p50 / p90 / p99 of: TTFT time to first token, TPOT time per output token after it, ITL gap between tokens"
    table.add_row("requests", *(f"{report['requests']:,}" for report in both))
    if num := figures["cut_requests"]:
        table.add_row("cut to the context", f"{num:,} requests, to {config.max_context:,} tokens")
    table.add_row("duration", *(f"{report['duration_s']:,.1f} s" for report in both))
    table.add_row("output tokens/s", *(f"{report['output_tokens_per_s']:,.1f}" for report in both))
    table.add_row("input tokens/s", *(f"{report['input_tokens_per_s']:,.1f}" for report in both))
    for label, key in (
        ("TTFT", "ttft_s"),
        ("TPOT", "tpot_s"),
        ("ITL", "itl_s"),
        ("end to end", "e2e_s"),
    ):
        table.add_row(label, *(_percentiles(report[key]) for report in both))
    if "slo_met" in figures:
        goodput = (
            f"{report['goodput_requests_per_s']:.2f} ({report['slo_met']:.0%} within SLO)"
            for report in both
        )
        table.add_row("goodput, requests/s", *goodput)
    table.add_row("prefix hits", f"{figures['prefix_hit_rate']:.1%} of prompt tokens")
    table.add_row("preemptions", f"{figures['preemptions']:,}")
    table.add_row("most requests queued", f"{figures['most_waiting']:,}")
    if "fit" in figures:
        fit = figures["fit"]
        table.add_row(
            "fit of its steps",
            f"{fit['num_steps']:,} steps, off by {fit['median']:.0%} (median), {fit['total']:+.1%} in all",
        )
    table.add_row(
        "utilisation",
        f"{figures['utilisation']:.1%}, {figures['steps']:,} steps of {figures['mean_step_s'] * 1e3:.1f} ms",
    )
    table.add_row(
        "simulated in",
        f"{figures['simulation_s']:.1f} s, {figures['times_real_time']:,.0f} times real time",
    )
    Console(highlight=False).print(table)
