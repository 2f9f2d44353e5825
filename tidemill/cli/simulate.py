"""`tidemill simulate`: a recorded trace in the engine's own step loop, with a profile's costs instead of a device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.bench.record import Record, summarize
from tidemill.cache_layout import Group
from tidemill.cli.bench import _percentiles
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.config import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.sim.drafter import Speculation
from tidemill.sim.profile import MOST_ROWS, Profile
from tidemill.sim.simulator import Arrival, SimConfig, SimEngine, SimTiers
from tidemill.sim.trace import MAX_REQUESTS, Row, coming, num_cut, read_rows

_OPTIONS = (
    "policy", "max-context", "max-requests", "token-budget", "kv-memory", "kv-host-memory", "page-size", "prefix-caching",
    "prefix-index", "queue-order", "batch-window", "evict", "max-pinned", "max-drafts", "adaptive-drafts",
)  # fmt: skip
_MOST_PAGES = 2**24  # some hundred bytes of memory each


@takes(*_OPTIONS)
def simulate(
    settings: Settings,
    trace: Annotated[
        Path, typer.Argument(help="Recorded traffic: the folder of `serve --record`, Azure's trace (CSV) or Mooncake's (JSONL).")
    ],
    profile: Annotated[
        str, typer.Option(help="What steps cost: a file that `tidemill calibrate` has written, or the name of a shipped one.")
    ] = "h200-llama8b",
    requests: Annotated[int, typer.Option("--requests", "-r", min=1, help="The first so many. Default: all.")] = MAX_REQUESTS,
    time_scale: Annotated[float, typer.Option(help="Multiply the times by this: 0.5 sends twice as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiply the prompt and output lengths by this.")] = 1.0,
    acceptance_rate: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Tokens are guessed ahead, and so often a guess is right. Default: none are."),
    ] = None,
    draft_ms: Annotated[float, typer.Option(min=0.0, help="What one more guess takes; 0: it is looked up in the text.")] = 0.0,
    host_rate: Annotated[float, typer.Option(min=0.001, help="GB a second between --kv-host-memory and the device.")] = 50.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="A request is good if its first token came within this.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="... and each further one within this, on average.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Write charts (PNG) into this folder; needs matplotlib.")] = None,
) -> None:
    """Replay a trace in a simulated engine. Options of the engine are those of `serve`; by default they are the profile's."""
    raise_on_interrupt()
    _check("--time-scale", time_scale, 1e-6, 1e6)
    _check("--length-scale", length_scale, 1e-6, 1e6)
    for name, ms in (("--slo-ttft-ms", slo_ttft_ms), ("--slo-tpot-ms", slo_tpot_ms)):
        _check(name, 1.0 if ms is None else ms, 1e-6, 1e9)
    _check("--draft-ms", draft_ms, 0.0, 1e9)
    _check("--host-rate", host_rate, 1e-3, 1e9)
    cost = Profile.load(profile)
    config = engine_of(settings, cost)
    if acceptance_rate is not None:
        speculation = Speculation(acceptance_rate, settings["max-drafts"] or 8, draft_ms / 1000, settings["adaptive-drafts"])
        config = replace(config, speculation=speculation)
    if settings["kv-host-memory"]:
        page_bytes = cost.engine.page_bytes or config.page_size * cost.model.kv_bytes_per_token
        config = replace(config, tiers=SimTiers(settings["kv-host-memory"] // page_bytes, page_bytes, 0, host_rate * 1e9))
    rows = read_rows(trace, requests)
    lengths: dict[str, Any] = {"length_scale": length_scale, "max_context": config.max_context}
    begin = time.perf_counter()
    engine, arrivals = run(coming(rows, time_scale=time_scale, **lengths), config, cost)
    took = time.perf_counter() - begin
    records = records_of(arrivals, engine)
    limits = zip(("slo_ttft_s", "slo_tpot_s"), (slo_ttft_ms, slo_tpot_ms), strict=True)
    slos = {name: None if ms is None else ms / 1000 for name, ms in limits}
    figures = summarize(records, **slos)
    figures |= about(engine) | {"profile": cost.model.name, "machine": cost.machine, "is_estimated": cost.is_estimated}
    figures |= {"engine": asdict(config), "simulation_s": took, "times_real_time": engine.clock.now() / took if took else 0.0}
    figures["cut_requests"] = num_cut(rows, **lengths)
    if recorded := recorded_of(rows):
        figures["recorded"] = summarize(recorded, **slos)
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        _show(figures, cost, config, trace)
    if chart:
        from tidemill.bench.plots import plot_latencies

        Console(stderr=True, highlight=False).print(f"wrote {plot_latencies(records, chart / 'latency.png')}")


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # nan is in no range
        raise ConfigError(f"{name} {value:g} is out of range.", fix=f"Give {least:g} to {most:g}.")


def engine_of(settings: Settings, profile: Profile) -> SimConfig:
    """The engine to simulate. Options that are not given are as in the profile."""
    own, page_size = profile.engine, settings["page-size"] or profile.engine.page_size
    if page_size & (page_size - 1):
        raise ConfigError(f"page_size is {page_size}.", fix="It must be a power of two up to 64.", param="page_size")
    if own.groups and page_size != own.page_size:
        what = f"page_size is {page_size}, and the profile's layers with windows or states were measured with {own.page_size}."
        raise ConfigError(what, fix="Leave --page-size out.", param="page_size")
    page_bytes = own.page_bytes or page_size * profile.model.kv_bytes_per_token
    kv_bytes = settings["kv-memory"] or own.num_pages * own.page_size // page_size * page_bytes
    num_pages = int(kv_bytes // page_bytes)
    max_context, num_rows = settings["max-context"] or own.max_context, settings["max-requests"] or own.max_requests
    token_budget = settings["token-budget"] or own.token_budget
    if num_rows > MOST_ROWS:
        raise ConfigError(f"--max-requests {num_rows} is too large.", fix=f"At most {MOST_ROWS:,}.", param="max_requests")
    if num_pages > _MOST_PAGES:
        what = f"{fmt_bytes(kv_bytes)} of KV cache are {num_pages:,} pages, and at most {_MOST_PAGES:,} can be simulated."
        raise ConfigError(what, fix="Give less --kv-memory, or a larger --page-size.", param="kv_memory_bytes")
    num_needed = sum(group.most_pages(max_context, token_budget) for group in own.groups or (Group(page_size),))
    if num_pages < num_needed:
        pages = f"{num_pages:,} pages, and a request of {max_context:,} tokens needs up to {num_needed:,}"
        what = f"{fmt_bytes(kv_bytes)} of KV cache hold {pages}."
        raise ConfigError(what, fix="Give more --kv-memory, or less --max-context.", param="kv_memory_bytes")
    window_ms = settings["batch-window"]
    window_ms = window_ms if window_ms is not None else 50.0 if settings["policy"] == "dynamic" else 0.0
    return replace(
        SimConfig.measured(own),
        policy=settings["policy"],
        num_rows=num_rows,
        token_budget=token_budget,
        num_pages=num_pages,
        page_size=page_size,
        max_context=max_context,
        prefix_caching=settings["prefix-caching"],
        prefix_index=settings["prefix-index"],
        queue_order=settings["queue-order"],
        batch_window_s=window_ms / 1000,
        evict=settings["evict"],
        max_pinned=settings["max-pinned"],
    )


def run(arrivals: Iterable[Arrival], config: SimConfig, cost: Profile) -> tuple[SimEngine, list[Arrival]]:
    """Also returns what was given, without the prompts."""
    engine, simulated = SimEngine(config, cost, keeps_events=False), []
    for arrival in arrivals:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
        simulated.append(replace(arrival, prompt_ids=()))
    engine.run_until(math.inf)
    return engine, simulated


def records_of(arrivals: list[Arrival], engine: SimEngine) -> list[Record]:
    """The record of each sample. One that was aborted before its first token is not among them."""
    records = []
    for arrival in arrivals:
        for name in [f"{arrival.request_id}:{i}" for i in range(arrival.n)] if arrival.n > 1 else [arrival.request_id]:
            times = engine.token_times_s[name]
            if times:
                at = arrival.arrival_s
                records.append(Record(at, at, None, times, times[-1], arrival.num_prompt, 0, len(times)))
    return records


def recorded_of(rows: Iterable[Row]) -> list[Record]:
    """The record of each sample, as the server that recorded the trace measured its request."""
    records = []
    for row in rows:
        if row.ttft_s is not None and row.e2e_s is not None:
            first_s, end_s = row.at_s + row.ttft_s, row.at_s + row.e2e_s
            records += [Record(row.at_s, row.at_s, None, [first_s], end_s, row.num_prompt, 0, max(row.num_output, 1))] * row.n
    return records


def about(engine: SimEngine) -> dict[str, Any]:
    """Beside what requests saw."""
    tally, end_s = engine.tally, engine.clock.now()
    return {
        "prefix_hit_rate": tally.num_cached / tally.num_prompt if tally.num_prompt else 0.0,
        "cached_tokens": tally.num_cached,
        "preemptions": tally.num_preempted,
        "evicted_pages": tally.num_evicted,
        "aborted": tally.num_aborted,
        "most_waiting": tally.most_waiting,
        "utilisation": engine.busy_s / end_s if end_s else 0.0,
        "steps": engine.num_steps,
        "mean_step_s": engine.busy_s / engine.num_steps if engine.num_steps else 0.0,
    }


def _show(figures: dict[str, Any], profile: Profile, config: SimConfig, trace: Path) -> None:
    what = f"{profile.model.name} on {profile.machine}{' (estimated)' if profile.is_estimated else ''}, simulated"
    both = [figures, *([figures["recorded"]] if "recorded" in figures else [])]
    columns = [f"{config.policy}, {config.num_rows} slots", "as recorded"][: len(both)]
    table = Table("", *columns, title=f"{trace.name}: {what}", title_justify="left")
    table.caption = "p50 / p90 / p99 of: TTFT time to first token, TPOT time per output token after it, ITL gap between tokens"
    table.add_row("requests", *(f"{report['requests']:,}" for report in both))
    if num := figures["cut_requests"]:
        table.add_row("cut to the context", f"{num:,} requests, to {config.max_context:,} tokens")
    table.add_row("duration", *(f"{report['duration_s']:,.1f} s" for report in both))
    table.add_row("output tokens/s", *(f"{report['output_tokens_per_s']:,.1f}" for report in both))
    table.add_row("input tokens/s", *(f"{report['input_tokens_per_s']:,.1f}" for report in both))
    for label, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s")):
        table.add_row(label, *(_percentiles(report[key]) for report in both))
    if "slo_met" in figures:
        goodput = (f"{report['goodput_requests_per_s']:.2f} ({report['slo_met']:.0%} within SLO)" for report in both)
        table.add_row("goodput, requests/s", *goodput)
    table.add_row("prefix hits", f"{figures['prefix_hit_rate']:.1%} of prompt tokens")
    table.add_row("preemptions", f"{figures['preemptions']:,}")
    table.add_row("most requests queued", f"{figures['most_waiting']:,}")
    table.add_row(
        "utilisation", f"{figures['utilisation']:.1%}, {figures['steps']:,} steps of {figures['mean_step_s'] * 1e3:.1f} ms"
    )
    table.add_row("simulated in", f"{figures['simulation_s']:.1f} s, {figures['times_real_time']:,.0f} times real time")
    Console(highlight=False).print(table)
