"""`tidemill measure-neurons`: how often neurons are used, by what the model does with text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of


@takes("model")
def measure_neurons(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    calibration: Calibration = SELF,
    samples: Samples = 32,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measure how often neurons are used, for --hot-neurons. The model has ReLUs. The same command
    goes on where it was stopped."""
    from tidemill.compress import calibration as texts  # brings torch
    from tidemill.compress.neurons import MeasureOptions, measure_neurons

    options = MeasureOptions(
        model=settings["model"], out=out.expanduser(), device=device,
        calibration=texts.Calibration(**text_of(calibration, samples, seq_len, seed)),
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown:
        counts = measure_neurons(options, shown)
    used = sum(float(often.mean()) for often in counts) / len(counts)
    hottest = sum(
        float(
            often.sort(descending=True).values[: len(often) // 4].sum()
            / often.sum().clamp(min=1e-9)
        )
        for often in counts
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{out}: a token uses {used:.1%} of the neurons; {hottest / len(counts):.0%} of those are of the hottest quarter."
    )
    console.print(
        f"Serve it with: tidemill serve {settings['model']} --device cuda --weight-memory SIZE --hot-neurons {out}",
        markup=False,
    )
