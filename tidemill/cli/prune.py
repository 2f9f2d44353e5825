"""`tidemill prune`: fewer weights, neurons, heads or layers, or matrices of lower rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of


@takes("model")
def prune(
    settings: Settings,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    method: Annotated[
        str,
        typer.Option(
            help="What goes: magnitude: the smallest weights. wanda: the smallest times their inputs. sparsegpt: the "
            "same, and the other weights make up for it. svd: matrices of lower rank. asvd: those that are best on the inputs."
        ),
    ] = "sparsegpt",
    structure: Annotated[
        str,
        typer.Option(
            help="weights, neurons (of feed-forward blocks), heads (with their KV head) or layers."
        ),
    ] = "weights",
    pattern: Annotated[
        str,
        typer.Option(
            help="Of weights: unstructured, 2:4 (2 of 4 are kept), 4:8, or blocks like 4x4."
        ),
    ] = "unstructured",
    sparsity: Annotated[
        float, typer.Option(help="The share that goes; of svd and asvd, of the matrices' bytes.")
    ] = 0.5,
    bits: Annotated[
        int,
        typer.Option(
            help="Of sparsegpt: quantize what is left to so many bits, jointly (8 or 4); 0: do not."
        ),
    ] = 0,
    merged: Annotated[
        bool,
        typer.Option(
            help="Of svd and asvd: multiply the factors out, for programs that do not know them."
        ),
    ] = False,
    damping: Annotated[
        float,
        typer.Option(help="Added to the diagonal of the inputs' second moments, times its mean."),
    ] = 0.01,
    calibration: Calibration = SELF,
    samples: Samples = 32,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    out_dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: as the model is stored."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Prune a model to a Hugging Face folder. Layer by layer; the same command goes on where it was
    stopped."""
    from tidemill.compress import calibration as text  # brings torch
    from tidemill.compress.prune import PruneOptions, prune

    given_text = text.Calibration(**text_of(calibration, samples, seq_len, seed))
    options = PruneOptions(
        model=settings["model"], out=out.expanduser(), method=method, structure=structure, pattern=pattern, sparsity=sparsity,
        bits=bits, merged=merged, damping=damping, out_dtype=out_dtype, device=device, calibration=given_text,
    )  # fmt: skip
    raise_on_interrupt()
    with Stages(Console(stderr=True, highlight=False)) as shown:
        result = prune(options, shown)
    console = Console(highlight=False, soft_wrap=True)
    share = result["zeros"] / result["values"]
    console.print(
        f"{out}: {result['bytes']:,} bytes, {result['layers']} layers; {share:.1%} of the matrices' values are 0.",
        markup=False,
    )
    console.print(
        f"Compare it with: tidemill evaluate {out} --against {settings['model']}", markup=False
    )
