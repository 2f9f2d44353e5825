"""`tidemill plan-layout`: what layouts of a model over several ranks would cost, by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from tidemill.cli.settings import Settings, takes
from tidemill.config import fmt_bytes, parse_bytes
from tidemill.distributed.layouts import (
    DEVICES,
    Device,
    Phase,
    choose,
    gather_from,
    rank_costs,
    rank_of_host,
)
from tidemill.errors import ConfigError
from tidemill.types.model_config import ModelConfig
from tidemill.weights.locate import locate

console = Console(highlight=False)
_MAX_RANKS = 1024


@takes("model")
def plan_layout(
    settings: Settings,
    ranks: Annotated[int, typer.Option(help="Ranks that share the model.")] = 2,
    hardware: Annotated[
        str,
        typer.Option(
            help=f"What a rank runs on: {', '.join(DEVICES)}; or here: this machine, measured."
        ),
    ] = "cpu",
    prompt: Annotated[int, typer.Option(help="Tokens of a step of prefill.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences of a step of decode.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of a sequence's KV cache.")] = 2048,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes a second between ranks, like 10G. Default: the hardware's."),
    ] = None,
) -> None:
    """Find the fastest layout of a model over ranks. The cost of a step is estimated for each, for
    prefill and decode."""
    from tidemill.models.registry import model_class
    from tidemill.weights.checkpoint import open_checkpoint

    if not 1 <= ranks <= _MAX_RANKS or min(prompt, batch, context) < 1:
        raise ConfigError(
            f"--ranks must be from 1 to {_MAX_RANKS}; --prompt, --batch and --context at least 1."
        )
    device = _device(hardware, None if link is None else float(parse_bytes(link)), ranks)
    checkpoint = open_checkpoint(locate(settings.engine_options().model))
    model = model_class(checkpoint).read_config(checkpoint)
    for phase in (Phase("prefill", prompt, 1, context), Phase("decode", batch, batch, context)):
        console.print(_table(model, ranks, phase, device))
    if ranks > 1 and device.shares_memory:
        begin = gather_from(model, ranks, device)
        others = (
            f"; steps of {begin:,} tokens and more with weights of all ranks in shared memory"
            if begin
            else ""
        )
        console.print(f"--tensor-layout phased: 1D{others}", soft_wrap=True)


def _device(name: str, link: float | None, num_ranks: int) -> Device:
    if link == 0:
        raise ConfigError(
            "--link must be above 0.", fix="Give the bytes a second, like 10G.", param="link"
        )
    if name == "here":
        return _measured(num_ranks, link)
    if name not in DEVICES:
        raise ConfigError(
            f"--hardware {name!r} is not known.", fix=f"Choose one of {', '.join(DEVICES)}."
        )
    return DEVICES[name] if link is None else replace(DEVICES[name], link=link)


def _measured(num_ranks: int, link: float | None) -> Device:
    """A rank's share of this machine."""
    from tidemill.kernels import machine
    from tidemill.kernels.rates import measure_rates

    machine.set_threads(machine.detect().num_cores)
    rates = measure_rates()
    flops, read, copied = (rate / 1e9 for rate in (rates.flops, rates.memory, rates.copies))
    console.print(
        f"measured here: {flops:.1f} GFLOP/s, {read:.1f} GB/s read, {copied:.1f} GB/s copied"
    )
    device = rank_of_host(rates.flops, rates.memory, rates.copies, num_ranks)
    return device if link is None else replace(device, link=link)


def _table(model: ModelConfig, ranks: int, phase: Phase, device: Device) -> Table:
    costs = rank_costs(model, ranks, phase, device)
    best = choose(costs, ranks)
    title = f"{phase.name}: {phase.num_tokens:,} tokens a step on {ranks} ranks"
    columns = ("ms", "computing", "reading", "sending", "sent by a rank", "")
    table = Table(Column("layout", overflow="fold"), *columns, title=title, title_justify="left")
    for cost in costs:
        times = (cost.seconds, cost.compute_s, cost.memory_s, cost.sent_s)
        note = "chosen" if cost is best else "" if cost.layout.is_there(ranks) else "estimate only"
        table.add_row(
            cost.layout.name,
            *(f"{1000 * time:.3f}" for time in times),
            fmt_bytes(int(cost.sent_bytes)),
            note,
        )
    return table
