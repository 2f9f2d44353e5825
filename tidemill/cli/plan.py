"""`tidemill plan`: which engines, cut how, on how many devices keep the SLOs of a load. All figures
are simulated."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.config import parse_bytes
from tidemill.errors import ConfigError, ModelNotFound
from tidemill.planning.cluster import Job
from tidemill.planning.commands import commands
from tidemill.planning.costs import Costs
from tidemill.planning.hardware import HARDWARE, parse_devices, with_link
from tidemill.planning.load import Lengths, parse_lengths, poisson, read_trace
from tidemill.planning.plans import Case, Result, Slo, parse_slo
from tidemill.planning.report import as_dict, why
from tidemill.planning.search import Found, search
from tidemill.planning.shapes import NAMES, SHAPES
from tidemill.planning.space import Space
from tidemill.sched.policies import POLICIES
from tidemill.types.model_config import ModelConfig

_TRIED = "continuous,prefill-first"
_SHOWN = 12  # plans of the table
_WIDTH = 150
_MAX_REQUESTS = 1_000_000


def plan(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL[:RATE]",
            help=f"A shape ({', '.join(SHAPES)}) or a model as `tidemill serve` takes one; :2.5 is its requests a second. "
            "May be given several times.",
        ),
    ],
    devices: Annotated[
        str, typer.Option(help=f"What there is at most, like 8xH200. Known: {', '.join(HARDWARE)}.")
    ],
    slo: Annotated[
        str,
        typer.Option(
            help="Seconds to the first token and per token after it, and the part of requests that must keep both."
        ),
    ] = "ttft=0.5,tpot=0.05,attainment=0.9",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second of all models, which come at random (Poisson)."),
    ] = None,
    input_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt, like 1000 or 500-1500.")
    ] = "1000",
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of an output, like 200 or 50-350.")
    ] = "200",
    trace: Annotated[
        Path | None, typer.Option(help="A recorded load instead: Azure's CSV or Mooncake's JSONL.")
    ] = None,
    speed: Annotated[
        float, typer.Option(help="With --trace: its time passes so many times faster.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests that are simulated. Default: as the rate needs, 100 to 2000; of a trace the first 1000."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random arrivals and lengths.")] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Most GPU hours per million output tokens.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Scheduling policies that are tried, with commas between them.")
    ] = _TRIED,
    token_budgets: Annotated[
        str, typer.Option(help="Values of --token-budget that are tried.")
    ] = "512,2048,8192",
    max_requests: Annotated[
        str, typer.Option(help="Values of --max-requests that are tried.")
    ] = "64,256",
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL=]PROFILE",
            help="Measured costs of a model on one device: a file of `tidemill calibrate`, or a shipped name; those of several "
            "devices are derived. Default: the shipped one of that model and device, if there is one. none: estimates.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes a second by which a KV cache moves between engines, like 40G."),
    ] = None,
    unbuilt: Annotated[
        bool,
        typer.Option(
            help="Also layouts that the engine does not have on these devices: estimates to compare with."
        ),
    ] = False,
    how: Annotated[
        str,
        typer.Option(
            "--search", help="pruned, or exhaustive: simulate every plan; the result is the same."
        ),
    ] = "pruned",
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a picture of all plans that were simulated: .svg or .png."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the fewest devices that keep the SLOs of a load. The simulator tries replicas,
    parallelism, prefill and decode engines, policy and batch limits."""
    num_devices, hardware = parse_devices(devices)
    wanted = [_wanted(text) for text in model]
    limits = parse_slo(slo)
    _check(wanted, rate, trace, speed, requests, budget)
    lengths = (
        parse_lengths(input_tokens, "--input-tokens"),
        parse_lengths(output_tokens, "--output-tokens"),
    )
    space = Space(
        _policies(policies),
        _numbers(token_budgets, "--token-budgets"),
        _numbers(max_requests, "--max-requests"),
    )
    if not space.all_limits():
        raise ConfigError(
            "No value of --max-requests is at most one of --token-budgets.",
            fix="A step has a token of each request.",
        )
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {plot}: the name must end in .svg or .png.")
    rates = _rates(wanted, rate)
    jobs = (
        _trace(trace, rates, requests, speed, seed)
        if trace
        else _random(rates, requests, *lengths, limits, seed)
    )
    moved = with_link(hardware, None if link is None else float(parse_bytes(link)))
    costs = Costs({model.name: model.config for model in wanted}, moved, profile)
    most = math.inf if budget is None else budget
    case = Case(costs.models, jobs, limits, moved, num_devices, most, costs=costs)
    source = costs.source
    console = Console(stderr=True, highlight=False)
    found = search(
        case,
        replace(space, unbuilt=unbuilt),
        how,
        lambda text: console.print(text, style="dim", markup=False),
    )
    names = {model.name: NAMES.get(model.given, model.given) for model in wanted}
    lines = commands(found.winner.plan, names, moved, max(case.longest.values()))
    if as_json:
        print(json.dumps(as_dict(case, found, lines, source), indent=1))
    else:
        _print(case, found, lines, source)
    if plot is not None:
        from tidemill.bench.plots import plot_plans

        plot_plans(case, found, plot)


@dataclass(frozen=True)
class _Wanted:
    name: str
    given: str
    rate: float | None
    config: ModelConfig


def _wanted(text: str) -> _Wanted:
    name, rate = text, None
    head, colon, tail = text.rpartition(":")
    if colon:
        try:
            name, rate = head, float(tail)
        except ValueError:
            name = text
    return _Wanted(name.rstrip("/").rsplit("/", 1)[-1], name, rate, _config(name))


def _config(name: str) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    from tidemill.models.registry import model_class
    from tidemill.weights.checkpoint import open_checkpoint
    from tidemill.weights.locate import locate

    try:
        checkpoint = open_checkpoint(locate(name))
    except ModelNotFound as error:
        raise ModelNotFound(
            error.message, fix=f"Give a shape ({', '.join(SHAPES)}) or a model as serve takes it."
        ) from error
    config = model_class(checkpoint).read_config(checkpoint)
    if config.pooler is not None:
        raise ConfigError(
            f"{name} is an encoder: it generates no text.", fix="Plan for models that do."
        )
    return config


def _check(
    wanted: Sequence[_Wanted],
    rate: float | None,
    trace: Path | None,
    speed: float,
    requests: int | None,
    budget: float | None,
) -> None:
    names = [model.name for model in wanted]
    if len(set(names)) < len(names):
        raise ConfigError(f"--model {', '.join(names)}: a name is given twice.")
    own = [model.rate for model in wanted if model.rate is not None]
    if own and len(own) < len(wanted):
        raise ConfigError(
            "Some models have a rate of their own, and some have none.",
            fix="Write --model NAME:RATE for each.",
        )
    if (rate is not None) + bool(own) + (trace is not None and not own) != 1:
        raise ConfigError(
            "Say once how many requests come.", fix="Give --rate, or MODEL:RATE, or --trace."
        )
    for value in (
        *own,
        *([] if rate is None else [rate]),
        speed,
        *([] if budget is None else [budget]),
    ):
        if not 0 < value < 1e9:
            raise ConfigError(f"{value} is no rate, speed or budget.", fix="Give a number above 0.")
    if requests is not None and not 10 <= requests <= _MAX_REQUESTS:
        raise ConfigError(
            f"--requests {requests} is out of range.", fix=f"Give 10 to {_MAX_REQUESTS:,}."
        )


def _policies(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in POLICIES:
            raise ConfigError(
                f"There is no scheduling policy {name!r}.",
                fix=f"Choose from {', '.join(POLICIES)}.",
            )
    return list(dict.fromkeys(found))


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 65_536 for part in parts):
        raise ConfigError(
            f"{option} {text!r} is not a list of numbers.", fix="Write it like 512,2048."
        )
    return sorted({int(part) for part in parts})


def _rates(wanted: Sequence[_Wanted], rate: float | None) -> list[tuple[str, float]]:
    """The rate of each model; for a trace, its shares."""
    return [(model.name, model.rate or (rate or 1.0) / len(wanted)) for model in wanted]


def _random(
    rates: Sequence[tuple[str, float]],
    num: int | None,
    prompt: Lengths,
    output: Lengths,
    slo: Slo,
    seed: int,
) -> list[Job]:
    total = math.fsum(rate for _, rate in rates)
    lives_s = slo.ttft_s + output.most * slo.tpot_s
    return poisson(
        rates,
        num or min(max(100, math.ceil(total * max(20.0, 3 * lives_s))), 2000),
        prompt,
        output,
        seed,
    )


def _trace(
    path: Path, rates: Sequence[tuple[str, float]], num: int | None, speed: float, seed: int
) -> list[Job]:
    """Its requests are shared out among the models by their rates."""
    rng, names = random.Random(seed), [name for name, _ in rates]
    shares = [rate for _, rate in rates]
    return [
        replace(job, model=rng.choices(names, shares)[0])
        for job in read_trace(path, limit=num or 1000, speed=speed)
    ]


def _print(case: Case, found: Found, lines: Sequence[str], source: str) -> None:
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, _WIDTH))
    span = case.jobs[-1].at_s - case.jobs[0].at_s
    exact = "exact" if found.is_exact else "replicas by bisection"
    console.print(
        f"{len(case.jobs):,} requests in {span:,.0f} s, {found.num_plans:,} plans, {found.num_simulated:,} simulations "
        f"({exact}). All figures are simulated; costs are {source}.",
        markup=False,
    )
    console.print(_table(found))
    for line in why(case, found):
        console.print(line, markup=False)
    console.print("Start it with:" if found.attains else "The nearest would be started with:")
    for line in lines:
        console.print(f"  {line}", markup=False)


def _table(found: Found) -> Table:
    heads = (
        "plan",
        "limits",
        "GPUs",
        "in SLO",
        "strain",
        "TTFT ms p50/p99",
        "TPOT ms p50/p99",
        "tok/s",
        "goodput",
        "GPU h/M tok",
    )
    table = Table(
        *heads,
        title="simulated; tokens and good requests are per second and device",
        title_justify="left",
    )
    best: dict[str, Result] = {}
    for result in [
        *filter(None, (found.winner, found.runner_up)),
        *sorted(found.results, key=lambda result: result.strain),
    ]:
        best.setdefault(result.plan.name, result)  # of each plan, the best limits
    for result in list(best.values())[:_SHOWN]:
        limits = result.plan.pools[-1].limits
        table.add_row(
            result.plan.name,
            f"{limits.policy} {limits.token_budget}/{limits.max_requests}",
            str(result.plan.num_devices),
            f"{result.attainment:.1%}",
            f"{result.strain:.2f}",
            "/".join(f"{1000 * value:.0f}" for value in result.ttft_s),
            "/".join(f"{1000 * value:.1f}" for value in result.tpot_s),
            f"{result.throughput:,.0f}",
            f"{result.goodput:.2f}",
            f"{result.gpu_hours:.2f}",
            style="bold" if result is found.winner else None,
        )
    return table
