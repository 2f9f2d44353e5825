"""`tidemill train-predictors`: which neurons and heads a token needs, learned from what the model
does with text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of


@takes("model")
def train_predictors(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    units: Annotated[
        str,
        typer.Option(
            help="What is chosen: neurons (of feed-forwards), heads (of attention) or both."
        ),
    ] = "neurons",
    keep: Annotated[
        float,
        typer.Option(
            help="Of what a layer's neurons or heads add, squared, the part that stays on average."
        ),
    ] = 0.95,
    rank: Annotated[
        int, typer.Option(help="Of a predictor; 0: a sixteenth of the hidden size, at least 8.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Of learning, for each predictor.")] = 300,
    calibration: Calibration = SELF,
    samples: Samples = 32,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train predictors for --contextual-sparsity. Layer by layer; the same command goes on where it
    was stopped."""
    from tidemill.compress import calibration as texts  # brings torch
    from tidemill.compress.predictors import PredictorOptions, train_predictors

    options = PredictorOptions(
        model=settings["model"], out=out.expanduser(), units=units, keep=keep, rank=rank, steps=steps, device=device,
        calibration=texts.Calibration(**text_of(calibration, samples, seq_len, seed)),
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown:
        figures_by_kind = train_predictors(options, shown)
    console = Console(highlight=False, soft_wrap=True)
    for kind, figures in figures_by_kind.items():
        share, kept = (sum(figures[name]) / len(figures[name]) for name in ("share", "kept"))
        console.print(
            f"{out}: {share:.1%} of the {kind} are computed, and keep {kept:.1%} of what all add.",
            markup=False,
        )
    console.print(
        f"Serve it with: tidemill serve {settings['model']} --contextual-sparsity {out}",
        markup=False,
    )
