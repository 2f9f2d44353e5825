"""`tidemill train-predictors`: which neurons and heads a token needs, learned from what the model does with text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages


@takes("model")
def train_predictors(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    units: Annotated[
        str, typer.Option(help="What is chosen: neurons (of feed-forwards), heads (of attention) or both.")
    ] = "neurons",
    keep: Annotated[
        float, typer.Option(help="Of what a layer's neurons or heads add, squared, the part that stays on average.")
    ] = 0.95,
    rank: Annotated[int, typer.Option(help="Of a predictor; 0: a sixteenth of the hidden size, at least 8.")] = 0,
    steps: Annotated[int, typer.Option(help="Of learning, for each predictor.")] = 300,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text to learn from: .txt, or .jsonl with text, messages or ids a line. Default: the model writes its own."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of it.")] = 16_384,
    length: Annotated[int, typer.Option(help="Of a sequence of it.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the text that the model writes, and of learning.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train predictors for --contextual-sparsity, layer by layer. The same command goes on where it was stopped."""
    from tidemill.compress.calibration import Calibration  # brings torch
    from tidemill.compress.predictors import PredictorOptions, train_predictors

    calibration = Calibration(data=data, num_tokens=tokens, length=length, seed=seed)
    options = PredictorOptions(
        model=settings["model"], out=out.expanduser(), units=units, keep=keep, rank=rank, steps=steps, device=device,
        calibration=calibration,
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown:
        made = train_predictors(options, shown)
    console = Console(highlight=False, soft_wrap=True)
    for kind, figures in made.items():
        share, kept = (sum(figures[name]) / len(figures[name]) for name in ("share", "kept"))
        console.print(f"{out}: {share:.1%} of the {kind} are computed, and keep {kept:.1%} of what all add.", markup=False)
    console.print(f"Serve it with: tidemill serve {settings['model']} --contextual-sparsity {out}", markup=False)
