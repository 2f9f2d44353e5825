"""`tidemill calibrate`: what steps of a model cost on this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.sim.profile import Profile, check_target
from tidemill.weights.locate import locate


@takes(*ENGINE_NAMES, speculate="off")
def calibrate(
    settings: Settings,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, about.")] = 60.0,
    name: Annotated[str | None, typer.Option(help="Of the model, in the profile. Default: that of its file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write. Default: MODEL-profile.json, here.")] = None,
) -> None:
    """Measure what steps cost on this machine, by tokens, sequences and context, and save it as a profile for `simulate`."""
    from tidemill.engine.load import load_core  # brings torch
    from tidemill.kernels.machine import detect
    from tidemill.sim.calibration import Calibration, profile_of

    raise_on_interrupt()
    model = settings["model"]
    stem = name or locate(model, fetch=True).stem
    console, target = Console(stderr=True, highlight=False), (out or Path(f"{stem}-profile.json")).expanduser()
    check_target(target)
    core = load_core(settings.engine_options())
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("Measuring", total=1.0)
            samples = Calibration(core, seconds, progress=lambda part: progress.update(task, completed=part)).run()
        here = detect()
        machine = here.gpu or f"{platform.machine()}, {core.config.threads} of {here.num_cores} cores"
        made = profile_of(core, samples, stem, machine)
    finally:
        core.close()
    made.save(target)
    _show(made)
    Console(highlight=False).print(f"{target}: use it with `tidemill simulate TRACE --profile {target}`", soft_wrap=True)


def _show(profile: Profile) -> None:
    cost, errors = profile.cost, profile.errors
    table = Table("", "", title=f"{profile.model.name} on {profile.machine}", title_justify="left", show_header=False)
    sizes = [size for size in (1, 8, 64, 256) if size <= profile.engine.max_requests]
    decode = ", ".join(f"{cost.decode.value(size) * 1e3:.2f} ms for {size}" for size in sizes)
    table.add_row("decode, sequences", decode)
    budget = profile.engine.token_budget
    table.add_row(
        "prefill", f"{cost.mixed.value(budget) * 1e3:.2f} ms for {budget} tokens: {budget / cost.mixed.value(budget):,.0f}/s"
    )
    table.add_row("context", f"{cost.decode_context_s * 1e9:.1f} ns per token and decoding sequence")
    table.add_row("steps measured", f"{errors.num_steps:,}")
    fit = f"median {errors.median:.1%}, p90 {errors.p90:.1%}, sum of all steps {errors.total:+.1%}"
    table.add_row("error of the fit", fit)
    Console(highlight=False).print(table)
    if errors.median > 0.1:
        Console(stderr=True, highlight=False).print(
            "warning: the steps vary a lot; measure for longer (--seconds), or when nothing else runs on this machine."
        )
