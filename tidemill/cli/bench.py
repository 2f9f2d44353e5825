"""`tidemill bench`: latency, throughput, serve, policies."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidemill.bench.record import summarize
from tidemill.bench.workload import Item, arriving, read_trace, synthetic
from tidemill.cli.help import Command
from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import EPILOG, Settings, raise_on_interrupt, takes
from tidemill.errors import ConfigError
from tidemill.sched.policies import POLICIES

app = typer.Typer(
    help="Measure an engine or a server.", no_args_is_help=True, rich_markup_mode=None
)
console = Console(stderr=True, highlight=False)


def _check_json(path: Path | None) -> Path | None:
    """Before anything is measured. Its folder is made; a file is there only when there are figures."""
    if path is not None:
        is_new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            what = f"--json {path} cannot be written: {error.strerror}."
            raise ConfigError(what, fix="Give another file.", param="json") from error
    return path


NumRequests = Annotated[
    int, typer.Option("--requests", "-r", min=1, help="How many requests to send.")
]
PromptLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt, on average.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens to generate for each, on average.")]
Spread = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="How much lengths vary: 0.5 is from half to one and a half times the given ones.",
    ),
]
SharedPrefix = Annotated[
    int,
    typer.Option(
        min=0, help="Tokens at the beginning that all prompts share, to measure prefix caching."
    ),
]
JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json", callback=_check_json, help="Also write the figures into this JSON file."
    ),
]
PlotDir = Annotated[
    Path | None,
    typer.Option("--plot", help="Write charts (PNG) into this folder; needs matplotlib."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        help="Replay a file of recorded traffic instead of synthetic requests: Azure's LLM trace (CSV) or Mooncake's (JSONL)."
    ),
]
TimeScale = Annotated[
    float,
    typer.Option(
        min=1e-6, max=1e6, help="Multiply the times in a trace by this: 0.5 sends twice as fast."
    ),
]
LengthScale = Annotated[
    float,
    typer.Option(
        min=1e-6, max=1e6, help="Multiply the prompt and output lengths in a trace by this."
    ),
]


@app.callback()
def root() -> None:
    raise_on_interrupt()


@app.command(epilog=EPILOG, cls=Command)
@takes(*ENGINE_NAMES)
def latency(
    settings: Settings,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    repeats: Annotated[
        int, typer.Option(min=1, help="How many runs to take the median of; one more warms up.")
    ] = 5,
    json_path: JsonPath = None,
) -> None:
    """One stream: time to first token and time per output token."""
    from tidemill.bench.offline import run_core

    llm = _load(settings)
    ttfts, tpots = [], []
    with _bar("Runs", repeats + 1) as done:
        for run in range(repeats + 1):
            (record,) = run_core(llm.core, _drawn(llm, 1, prompt_len, output_len, seed=run))
            if run:  # the first warms up
                ttfts.append(record.ttft_s)
                tpots.append(record.tpot_s or 0.0)
            done(run + 1)
    ttft, tpot = statistics.median(ttfts), statistics.median(tpots)
    figures = {
        "prompt_len": prompt_len, "output_len": output_len, "ttft_s": ttft, "tpot_s": tpot,
        "prefill_tokens_per_s": prompt_len / ttft, "decode_tokens_per_s": 1 / tpot if tpot else None,
    }  # fmt: skip
    title = f"{settings['model']}: {prompt_len} → {output_len} tokens, {repeats} runs"
    table = Table("", "median", title=title, title_justify="left")
    table.add_row("time to first token", f"{ttft * 1000:.1f} ms")
    table.add_row("prefill", f"{prompt_len / ttft:.1f} tokens/s")
    if tpot:
        table.add_row("time per output token", f"{tpot * 1000:.2f} ms")
        table.add_row("decode", f"{1 / tpot:.1f} tokens/s")
    _report(table, figures, json_path)


@app.command(epilog=EPILOG, cls=Command)
@takes(*ENGINE_NAMES)
def throughput(
    settings: Settings,
    requests: NumRequests = 32,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    spread: Spread = 0.5,
    shared_prefix: SharedPrefix = 0,
    json_path: JsonPath = None,
    plot: PlotDir = None,
) -> None:
    """Many requests at once, offline."""
    from tidemill.bench.offline import run_core

    llm = _load(settings)
    items = _drawn(
        llm, requests, prompt_len, output_len, spread=spread, shared_prefix=shared_prefix
    )
    with _bar("Requests", requests) as done:
        records = run_core(llm.core, items, done)
    figures = summarize(records)
    if plot:
        from tidemill.bench.plots import plot_timelines

        path = plot_timelines({settings["policy"]: records}, plot / "timeline.png")
        console.print(f"wrote {path}")
    _report(
        _table({settings["model"]: figures}, f"{requests} requests, offline"), figures, json_path
    )


@app.command(cls=Command)
def serve(
    url: Annotated[
        str,
        typer.Option(
            "--url",
            "--base-url",
            help="Any OpenAI-compatible server: http://HOST:PORT or unix:PATH.",
        ),
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The model's name at the server.")] = "smollm2",
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=1e-6, max=1e6, help="Requests per second; several values make a sweep. Default: 1."
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, max=1e3, help="1: Poisson arrivals; more: bursts (gamma).")
    ] = 1.0,
    requests: NumRequests = 32,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    spread: Spread = 0.5,
    shared_prefix: SharedPrefix = 0,
    trace: TraceFile = None,
    time_scale: TimeScale = 1.0,
    length_scale: LengthScale = 1.0,
    max_context: Annotated[
        int, typer.Option(min=2, help="Cut a trace's requests to this many tokens.")
    ] = 4096,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="A request is good if its first token came within this.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="... and each further one within this, on average.")
    ] = None,
    vocab: Annotated[
        int,
        typer.Option(
            min=200,
            help="Prompts are random token ids below this; at most the size of the model's vocabulary.",
        ),
    ] = 30_000,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for exactly the tokens planned (servers that refuse it: --no-ignore-eos)."
        ),
    ] = True,
    api_key: Annotated[
        str, typer.Option(help="The server's key, if it has one. Default: TIDEMILL_API_KEY.")
    ] = "",
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of prompts and arrivals. Default: a new one, so that nothing is cached."
        ),
    ] = None,
    json_path: JsonPath = None,
    plot: PlotDir = None,
) -> None:
    """Open-loop load on a server: requests are sent when they are due, whether or not earlier ones
    have finished."""
    from tidemill.bench.http import check_server, run_load

    check_server(url, api_key)
    runs: dict[str, list[Any]] = {}
    summaries: dict[str, dict[str, Any]] = {}
    rates = [0.0] if trace else list(dict.fromkeys(rate or [1.0]))
    first_seed = secrets.randbits(32) if seed is None else seed
    # other prompts at every rate: the prefix cache must not help the second
    for seed, each in enumerate(rates, first_seed):
        if trace:
            items = read_trace(
                trace,
                limit=requests,
                time_scale=time_scale,
                length_scale=length_scale,
                max_context=max_context,
                vocab=vocab,
                seed=seed,
            )
            name = trace.name
        else:
            drawn = synthetic(
                requests,
                prompt_len,
                output_len,
                spread=spread,
                shared_prefix=shared_prefix,
                vocab=vocab,
                seed=seed,
            )
            items = arriving(drawn, each, burstiness=burstiness, seed=seed)
            name = f"{each:g} requests/s"
        with _bar(name, len(items)) as done:
            load = run_load(url, model, items, api_key=api_key, ignore_eos=ignore_eos, on_done=done)
            runs[name] = asyncio.run(load)
        summaries[name] = summarize(
            runs[name],
            slo_ttft_s=None if slo_ttft_ms is None else slo_ttft_ms / 1000,
            slo_tpot_s=None if slo_tpot_ms is None else slo_tpot_ms / 1000,
        )
    if plot:
        from tidemill.bench import plots

        for number, (name, records) in enumerate(runs.items()):
            if any(record.error is None for record in records):
                console.print(
                    f"wrote {plots.plot_latencies(records, plot / f'latency-{number}.png')}"
                )
                console.print(
                    f"wrote {plots.plot_timelines({name: records}, plot / f'timeline-{number}.png')}"
                )
        if len(rates) > 1:
            points = list(zip(rates, summaries.values(), strict=True))
            console.print(f"wrote {plots.plot_rates(points, plot / 'rates.png')}")
    _report(_table(summaries, f"{url}, {model}"), summaries, json_path)
    if any(summary["failed"] for summary in summaries.values()):
        raise typer.Exit(1)


@app.command(epilog=EPILOG, cls=Command)
@takes(*(name for name in ENGINE_NAMES if name != "policy"), max_requests=8)
def policies(
    settings: Settings,
    requests: NumRequests = 16,
    prompt_len: PromptLen = 96,
    output_len: OutputLen = 48,
    spread: Spread = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e6, help="Requests per second; without it all arrive at once."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="These policies; default: all.")] = None,
    json_path: JsonPath = None,
    plot: PlotDir = None,
) -> None:
    """The same load under every scheduling policy."""
    from tidemill.bench.offline import run_policies

    names = only or ["none", "static", "dynamic", "prefill-first", "splitfuse", "continuous"]
    if unknown := set(names) - set(POLICIES):
        raise ConfigError(
            f"There is no scheduling policy {unknown.pop()!r}.",
            fix=f"Choose among {', '.join(POLICIES)}.",
        )
    llm = _load(settings)
    items = _drawn(llm, requests, prompt_len, output_len, spread=spread)
    if rate is not None:
        items = arriving(items, rate)
    with _bar("Requests", requests) as done:
        runs = run_policies(llm.core.runner.model, llm.config, names, items, done)
    summaries = {name: summarize(records) for name, records in runs.items()}
    if plot:
        from tidemill.bench.plots import plot_timelines

        console.print(f"wrote {plot_timelines(runs, plot / 'policies.png')}")
    title = f"{settings['model']}: {requests} requests over {llm.config.max_requests} slots"
    _report(_table(summaries, title), summaries, json_path)


# ---- shared


def _load(settings: Settings) -> Any:
    from tidemill.engine.llm import LLM

    return LLM(progress=console.is_terminal, **settings.engine)


def _drawn(llm: Any, requests: int, prompt_len: int, output_len: int, **more: Any) -> list[Item]:
    """Synthetic requests that the model's vocabulary and context can hold."""
    items = synthetic(requests, prompt_len, output_len, vocab=llm.model_config.vocab_size, **more)
    longest, context = (
        max(len(item.prompt_ids) + item.num_output for item in items),
        llm.config.max_context,
    )
    if longest > context:
        raise ConfigError(
            f"A request of {longest} tokens does not fit the context of {context}.",
            fix="Ask for shorter ones.",
        )
    return items


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda completed: progress.update(task, completed=completed)


def _table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    caption = "p50 / p90 / p99 of: TTFT time to first token, TPOT time per output token after it, ITL gap between tokens"
    table = Table(
        "", *summaries, title=title, title_justify="left", caption=caption, caption_justify="left"
    )

    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(cell(summary) for summary in summaries.values()))

    row("requests (failed)", lambda s: f"{s['requests']} ({s['failed']})")
    row("duration", lambda s: f"{s['duration_s']:.2f} s")
    row("output tokens/s", lambda s: f"{s['output_tokens_per_s']:.1f}")
    row("input tokens/s", lambda s: f"{s['input_tokens_per_s']:.1f}")
    for label, key in (
        ("TTFT", "ttft_s"),
        ("TPOT", "tpot_s"),
        ("ITL", "itl_s"),
        ("end to end", "e2e_s"),
        ("sent late by", "lateness_s"),
    ):
        table.add_row(label, *(_percentiles(summary[key]) for summary in summaries.values()))
    if any("slo_met" in summary for summary in summaries.values()):
        row(
            "goodput, requests/s",
            lambda s: f"{s['goodput_requests_per_s']:.2f} ({s['slo_met']:.0%} within SLO)",
        )
    for summary in summaries.values():
        for error, count in list(summary.get("errors", {}).items())[:5]:
            table.add_row(f"{count} failed", escape(error))
    return table


def _percentiles(values: dict[str, float]) -> str:
    """p50 / p90 / p99 in one unit that suits them."""
    if not values:
        return "-"
    scale, unit, digits = (1, "s", 1) if max(values.values()) >= 10 else (1000, "ms", 0)
    return " / ".join(f"{value * scale:.{digits}f}" for value in values.values()) + f" {unit}"


def _report(table: Table, figures: Any, json_path: Path | None) -> None:
    Console(highlight=False).print(table)
    if json_path:
        json_path.write_text(json.dumps(figures, indent=2))
