"""`tidemill distill`: a student of fewer layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of


@takes("model")
def distill(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    layers: Annotated[
        int,
        typer.Option(help="Of the student: it begins as so many of the teacher's, spread evenly."),
    ],
    loss: Annotated[
        str,
        typer.Option(
            help="What it learns: soft: the teacher's distributions. ted: these, and what matters of the layers' states "
            "(task-aware layerwise distillation). hard: the text alone."
        ),
    ] = "soft",
    steps: Annotated[int, typer.Option(help="Of training.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 4,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 5e-4,
    temperature: Annotated[float, typer.Option(help="Of both distributions.")] = 1.0,
    calibration: Calibration = SELF,
    samples: Samples = 512,
    seq_len: SeqLen = 256,
    seed: Seed = 0,
    out_dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: as the model is stored."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Distill a model into a student of fewer layers. It serves alone or as --draft-model. The same
    command goes on where it was stopped."""
    from tidemill.compress import calibration as text  # brings torch
    from tidemill.compress.distill import DistillOptions, distill
    from tidemill.compress.student import Learning

    options = DistillOptions(
        model=settings["model"], out=out.expanduser(), layers=layers, out_dtype=out_dtype, device=device,
        learning=Learning(loss=loss, steps=steps, batch=batch, rate=rate, temperature=temperature, seed=seed),
        calibration=text.Calibration(**text_of(calibration, samples, seq_len, seed)),
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown, stops_in_order(out):
        result = distill(options, shown, shown.is_stopped)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{out}: {result['layers']} of {result['of']} layers, {result['bytes']:,} bytes.",
        markup=False,
    )
    model = settings["model"]
    console.print(f"Compare it with: tidemill evaluate {out} --against {model}", markup=False)
    console.print(
        f"Use it for drafts with: tidemill serve {model} --draft-model {out}", markup=False
    )


@contextmanager
def stops_in_order(out: Path) -> Iterator[None]:
    """A run that was stopped says how to go on."""
    from tidemill.compress.draft.run import Stopped

    try:
        yield
    except (Stopped, KeyboardInterrupt):
        console = Console(stderr=True, highlight=False)
        console.print(
            f"Stopped. The same command goes on from here; what it needs is in {out}.partial.",
            markup=False,
        )
        raise typer.Exit(130) from None
