"""`tidemill calibrate`: what steps of a model cost on this machine."""

from __future__ import annotations

import platform
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.errors import ConfigError
from tidemill.planning.profile import Profile, check_target
from tidemill.weights.locate import locate


class Clock(StrEnum):
    wall = "wall"
    cpu = "cpu"


@takes(*ENGINE_NAMES, speculate="off")
def calibrate(
    settings: Settings,
    seconds: Annotated[
        float, typer.Option(min=1, max=1e6, help="How long to measure, about.")
    ] = 60.0,
    clock: Annotated[
        Clock,
        typer.Option(
            help="cpu: the time that one thread computes, where others use the machine as well. Needs --threads 1."
        ),
    ] = Clock.wall,
    name: Annotated[
        str | None, typer.Option(help="Of the model, in the profile. Default: that of its file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write. Default: MODEL-profile.json, here."),
    ] = None,
) -> None:
    """Measure what steps cost here, as a profile for `simulate`. The cost is by tokens, sequences
    and context."""
    from tidemill.engine.load import load_core  # brings torch
    from tidemill.kernels.machine import detect
    from tidemill.planning.calibration import Calibration, profile_of

    raise_on_interrupt()
    model = settings["model"]
    stem = name or locate(model, fetch=True).stem
    console, target = (
        Console(stderr=True, highlight=False),
        (out or Path(f"{stem}-profile.json")).expanduser(),
    )
    check_target(target)
    options = settings.engine_options()
    if clock is Clock.cpu and options.threads != 1:
        fix = "Add --threads 1, or leave --clock out."
        raise ConfigError(
            "CPU time is that of all threads: with several it says nothing.", fix=fix, param="clock"
        )
    core = load_core(options)
    now = time.process_time if clock is Clock.cpu else time.perf_counter
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("Measuring", total=1.0)
            samples = Calibration(
                core, seconds, progress=lambda part: progress.update(task, completed=part), now=now
            ).run()
        here = detect()
        machine = (
            here.gpu or f"{platform.machine()}, {core.config.threads} of {here.num_cores} cores"
        )
        profile = profile_of(core, samples, stem, machine)
    finally:
        core.close()
    profile.save(target)
    _show(profile)
    Console(highlight=False).print(
        f"{target}: use it with `tidemill simulate TRACE --profile {target}`", soft_wrap=True
    )


def _show(profile: Profile) -> None:
    cost, errors = profile.cost, profile.errors
    table = Table(
        "",
        "",
        title=f"{profile.model.name} on {profile.machine}",
        title_justify="left",
        show_header=False,
    )
    sizes = [size for size in (1, 8, 64, 256) if size <= cost.decode.at[-1]]
    decode = ", ".join(f"{cost.decode.value(size) * 1e3:.2f} ms for {size}" for size in sizes)
    table.add_row("decode, sequences", decode)
    if cost.decode.at[-1] < profile.engine.max_requests:
        beyond = f"steps of up to {cost.decode.at[-1]} of {profile.engine.max_requests} sequences; more are extrapolated"
        table.add_row("measured", f"{beyond}. Longer --seconds measures more")
    budget = profile.engine.token_budget
    table.add_row(
        "prefill",
        f"{cost.mixed.value(budget) * 1e3:.2f} ms for {budget} tokens: {budget / cost.mixed.value(budget):,.0f}/s",
    )
    table.add_row(
        "context", f"{cost.decode_context_s * 1e6:.3g} µs per token and decoding sequence"
    )
    table.add_row("steps measured", f"{errors.num_steps:,}")
    fit = f"median {errors.median:.1%}, p90 {errors.p90:.1%}, sum of all steps {errors.total:+.1%}"
    table.add_row("error of the fit", fit)
    Console(highlight=False).print(table)
    if errors.median > 0.05:
        Console(stderr=True, highlight=False).print(
            "warning: the steps vary a lot; measure for longer (--seconds), when nothing else runs here, or with --clock cpu."
        )
