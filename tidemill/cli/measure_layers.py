"""`tidemill measure-layers`: how long the layers of a model take, by which a pipeline is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.config.compute import decide_device
from tidemill.distributed.stages import LayerTimes, computed_ends, counts_of, stage_ms
from tidemill.errors import ConfigError
from tidemill.types.model_config import ModelConfig
from tidemill.weights.locate import locate


@takes(*ENGINE_NAMES, speculate="off")
def measure_layers(
    settings: Settings,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write. Default: MODEL-layers.json, here."),
    ] = None,
) -> None:
    """Measure a model's layers, for --pipeline-layers. The time of each, in the stages of a
    pipeline. Give the options that `serve` will get, with --pipeline-parallel."""
    from tidemill.engine.layer_times import measure_layers  # brings torch
    from tidemill.engine.load import load_core
    from tidemill.kernels.machine import detect

    raise_on_interrupt()
    options, here = settings.engine_options(), detect()
    if options.pipeline_parallel < 2:
        fix = "Add --pipeline-parallel N."
        raise ConfigError(
            "Layers are measured in the stages of a pipeline.", fix=fix, param="pipeline_parallel"
        )
    if decide_device(options, here)[0] != "cpu":
        fix = "Give numbers of layers to --pipeline-layers, or leave it out."
        raise ConfigError("Layers are measured on CPUs only.", fix=fix, param="device")
    found = locate(options.model, fetch=True)
    target = (
        out or Path(f"{found.name if found.is_dir() else found.stem}-layers.json")
    ).expanduser()
    core = load_core(options)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    try:
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("Measuring", total=1.0)
            times = measure_layers(
                core, options, here, lambda part: progress.update(task, completed=part)
            )
    finally:
        core.close()
    times.save(target)
    _show(times, core.model_config, options.pipeline_parallel)
    Console(highlight=False).print(
        f"{target}: use it with `tidemill serve --pipeline-layers {target}`", soft_wrap=True
    )


def _show(times: LayerTimes, model: ModelConfig, num_stages: int) -> None:
    prompt, step = f"prompt of {times.prompt_len} tokens", f"step of {times.batch} that decode"
    table = Table("ms", prompt, step, title="Measured", title_justify="left")
    kinds: dict[tuple[float, float], list[int]] = {}
    for layer, layer_times in enumerate(times.layers):
        kinds.setdefault((layer_times.prefill_s, layer_times.decode_s), []).append(layer)
    rows = [("embedding", times.embedding.prefill_s, times.embedding.decode_s)]
    rows += [
        (f"each of {len(layers)} layers (first: {layers[0]})", *times)
        for times, layers in kinds.items()
    ]
    for name, prefill_s, decode_s in (*rows, ("head", times.head.prefill_s, times.head.decode_s)):
        table.add_row(name, f"{1e3 * prefill_s:.3f}", f"{1e3 * decode_s:.3f}")
    Console(highlight=False).print(table)
    for what, ends in (
        ("measured", times.divide(num_stages)),
        ("computed", computed_ends(model, num_stages)),
    ):
        layers = " + ".join(map(str, counts_of(ends)))
        slowest = max(stage_ms(times, ends))
        Console(highlight=False).print(
            f"{what}: {layers} layers, the slowest stage {slowest:.1f} ms for a prompt and its output"
        )
