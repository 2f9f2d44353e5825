"""`tidemill calibrate-kv`: what KVQuant needs to know of a model's keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of
from tidemill.weights.locate import locate


@takes("model", "dtype", "threads")
def calibrate_kv(
    settings: Settings,
    bits: Annotated[int, typer.Option(help="Of a key's or value's code: 4 or 3.")] = 4,
    outliers: Annotated[
        float,
        typer.Option(
            help="The share of a key channel's values outside its range; the farthest are kept in bfloat16."
        ),
    ] = 0.01,
    calibration: Calibration = SELF,
    samples: Samples = 8,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file to write. Default: MODEL-kvquantBITS.safetensors, here."
        ),
    ] = None,
) -> None:
    """Fit KVQuant, a 4- or 3-bit KV cache, to a model. Serve it with --kv-dtype kvquant4
    --kv-calibration FILE."""
    from tidemill.compress.kvquant.calibrate import CalibrateOptions, calibrate
    from tidemill.engine.llm import LLM
    from tidemill.engine.load import inspect  # brings torch

    model = settings["model"]
    target = out or Path(f"{locate(model, fetch=True).stem}-kvquant{bits}.safetensors")
    options = CalibrateOptions(
        out=target.expanduser(),
        bits=bits,
        outliers=outliers,
        **text_of(calibration, samples, seq_len, seed),
    )
    options.check()
    console = Console(stderr=True, highlight=False)
    raise_on_interrupt()
    sizes: dict[str, Any] = {
        "max_requests": 32,
        "max_context": min(1024, inspect(model)[2].max_context),
    }
    llm = LLM(progress=console.is_terminal, device="cpu", **sizes, **settings.engine)
    with Stages(console) as shown:
        _, about = calibrate(options, llm, shown)
    said = Console(highlight=False)
    per_token = llm.model_config.kv_bytes_per_token
    saved = per_token("bfloat16") / per_token(options.kv_dtype)
    said.print(
        f"{options.out}: fitted to {about['text_tokens']:,} tokens; {saved:.1f} times the tokens of bfloat16.",
        markup=False,
    )
    said.print(
        f"Use it with: --kv-dtype {options.kv_dtype} --kv-calibration {options.out}",
        markup=False,
        soft_wrap=True,
    )
