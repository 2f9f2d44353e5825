"""`tidemill quantize`: fewer bits a weight, in layouts that others read, too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of
from tidemill.config import fmt_bytes
from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.compress.quantize import Result


@takes("model")
def quantize(
    settings: Settings,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder to write, or a file that ends in .gguf.")
    ],
    method: Annotated[
        str,
        typer.Option(
            help="rtn: round to nearest. gptq: later columns make up for earlier ones. awq: columns with large inputs lose "
            "less. smoothquant: 8 bits for weights and activations, whose range is shared out. llm-int8: the same with large "
            "activations left out. zeroquant: layers are trained. gobo: a few centroids. fp8: 8-bit floats. nf4: 4-bit numbers "
            "of a Gaussian. ternary: -1, 0 and 1."
        ),
    ] = "gptq",
    bits: Annotated[
        int | None, typer.Option(help="Of a weight: 2 to 8. Default: 4; gobo's 3.")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(help="Columns of a row that share a scale. Default: 128, of some methods 64."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="What shares a scale: group, channel (a row), tensor; of fp8 also block (128 × 128)."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--affine", help="Whether the middle code is 0, or groups have zero points."
        ),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="none, or 8 bits with a scale for a token or for the tensor.")
    ] = None,
    static: Annotated[
        bool | None,
        typer.Option(
            "--static/--dynamic", help="Whether the tensor's scale is of the calibration text."
        ),
    ] = None,
    act_order: Annotated[
        str | None,
        typer.Option(
            help="gptq: columns with the largest inputs first. static: groups stay those of neighbours. group: they are of "
            "columns in that order. off: as they lie."
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(help="gptq: added to the diagonal of the inputs' moments, times its mean."),
    ] = None,
    clip: Annotated[
        bool | None, typer.Option("--clip/--no-clip", help="awq: ranges are cut where that helps.")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="smoothquant: how much of the range moves into weights. Default: the best of some."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="llm-int8: activations from here on stay as they are.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="zeroquant, ternary: of training a layer.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="zeroquant, ternary: of training, times a weight's mean size."),
    ] = None,
    double: Annotated[
        bool | None,
        typer.Option("--double/--single", help="nf4: whether scales are quantized, too."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Bits a weight on average, scales included: each layer gets as many as it needs."
        ),
    ] = None,
    choices: Annotated[str, typer.Option(help="With --budget: the bits to choose from.")] = "3,4,8",
    sensitivity: Annotated[
        str,
        typer.Option(
            help="With --budget: kl: of outputs, with one layer rounded. second-order: errors of a matrix's outputs."
        ),
    ] = "kl",
    kv_scales: Annotated[
        bool,
        typer.Option(
            "--kv-scales",
            help="Scales of 8-bit keys and values, too (kv_cache_scheme): the KV cache has 8 bits then.",
        ),
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compressed-tensors, gptq, awq, bitsandbytes, fp8, bitnet, gobo or gguf. Default: the method's own.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Of a .gguf file: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K. Decides bits and groups; K types need "
            "columns in multiples of 256, else a matrix becomes Q5_0, Q5_1 or Q8_0.",
        ),
    ] = None,
    out_dtype: Annotated[
        str | None, typer.Option(help="Of what stays floats: float16, bfloat16 or float32.")
    ] = None,
    calibration: Calibration = SELF,
    samples: Samples = 32,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    evaluate: Annotated[
        int,
        typer.Option(
            help="Tokens to compare the result with the original on, as both are served; 0: none."
        ),
    ] = 2048,
    text: Annotated[
        Path | None, typer.Option(help="What to compare them on. Default: Python's documentation.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes and perplexity of both into this .png or .svg.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Quantize a model to a folder or GGUF file. Layer by layer; the same command goes on where it
    ended."""
    from tidemill.compress import calibration as texts  # brings torch
    from tidemill.compress.mixed import Budget
    from tidemill.compress.quantize import QuantizeOptions, quantize
    from tidemill.compress.summary import check_plot, summarize

    method_options: dict[str, Any] = {
        "bits": bits, "group": group, "weights": weights, "symmetric": symmetric, "activations": activations, "static": static,
        "act_order": act_order, "damping": damping, "clip": clip, "alpha": alpha, "threshold": threshold, "steps": steps,
        "rate": rate, "double": double,
    }  # fmt: skip
    of_budget = None if budget is None else Budget(budget, _numbers(choices), sensitivity)
    options = QuantizeOptions(
        model=settings["model"], out=out.expanduser(), method=method, layout=layout, kind=kind, dtype=out_dtype,
        budget=of_budget, kv_scales=kv_scales,
        options={name: value for name, value in method_options.items() if value is not None}, device=device,
        calibration=texts.Calibration(**text_of(calibration, samples, seq_len, seed)),
    )  # fmt: skip
    if evaluate < 0:
        raise ConfigError(
            f"--evaluate is {evaluate}.", fix="Give a number of tokens, or 0.", param="evaluate"
        )
    if plot is not None:
        check_plot(plot, evaluate)
    raise_on_interrupt()
    console = Console(highlight=False, soft_wrap=True)
    with Stages(Console(stderr=True, highlight=False)) as shown:
        result = quantize(options, shown)
        console.print(
            f"{result.out} ({result.layout}): {result.bytes_after:,} bytes instead of {result.bytes_before:,}; "
            f"{result.bits_per_weight:.2f} bits for each of {result.num_values:,} quantized weights.",
            markup=False,
        )
        if result.bytes_after >= result.bytes_before:
            console.print(_not_smaller(result), style="yellow", markup=False)
        if result.smaller_group is not None:
            console.print(
                f"Scales are of {result.smaller_group} columns: larger groups do not fit the matrices.",
                markup=False,
            )
        if evaluate:
            console.print(summarize(settings["model"], result, evaluate, text, plot, shown))


def _not_smaller(result: Result) -> str:
    matrices, rest = (
        fmt_bytes(result.num_matrix_bytes),
        fmt_bytes(result.bytes_after - result.num_matrix_bytes),
    )
    return (
        f"warning: this is no smaller than the original, whose weights take {fmt_bytes(result.bytes_before)}: "
        f"the quantized matrices take {matrices}, and embeddings, norms and the like, which stay floats, {rest}. "
        "Quantize the original weights, in 16 bits; of a GGUF file, an --out that ends in .gguf keeps what is "
        "not quantized as it is."
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--choices is {text!r}.", fix="Give numbers like 3,4,8.", param="choices"
        ) from None
