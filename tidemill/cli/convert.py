"""`tidemill convert`: a model with fewer KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.distill import stops_in_order
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of


@takes("model")
def convert(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    gqa: Annotated[
        int,
        typer.Option(
            help="KV heads of the result (grouped-query attention): each is the mean of several."
        ),
    ],
    steps: Annotated[
        int, typer.Option(help="Of training towards the original's distributions; 0: none.")
    ] = 200,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 4,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 3e-4,
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
    """Convert multi-head to grouped-query attention. KV heads are mean-pooled, then trained shortly
    by distillation. The KV cache shrinks in proportion. The same command goes on where it was
    stopped."""
    from tidemill.compress import calibration as text  # brings torch
    from tidemill.compress.gqa import ConvertOptions, convert
    from tidemill.compress.student import Learning

    options = ConvertOptions(
        model=settings["model"], out=out.expanduser(), num_kv_heads=gqa, out_dtype=out_dtype, device=device,
        learning=Learning(steps=steps, batch=batch, rate=rate, seed=seed),
        calibration=text.Calibration(**text_of(calibration, samples, seq_len, seed)),
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown, stops_in_order(out):
        result = convert(options, shown, shown.is_stopped)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{out}: {result['kv_heads']} of {result['of']} KV heads, {result['bytes']:,} bytes.",
        markup=False,
    )
    console.print(
        f"Compare it with: tidemill evaluate {out} --against {settings['model']}", markup=False
    )
