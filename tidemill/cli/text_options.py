"""Options of the text that something is fitted to, alike in quantize, prune, distill, convert,
calibrate-kv, train-draft, train-predictors and measure-neurons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.errors import ConfigError

SELF = "self"
_MAX_TOKENS = 2**24

Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="FILE|self",
        help="The text to fit to: a .txt file, or .jsonl with an object of text, messages or ids a line. self: the model writes "
        "it.",
    ),
]
Samples = Annotated[int, typer.Option("--samples", help="Sequences of the text.")]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens of a sequence.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Of what the model writes, and of all that is drawn.")
]


def text_of(calibration: str, samples: int, seq_len: int, seed: int) -> dict[str, Any]:
    """By the names that the commands' own options have."""
    if not 16 <= seq_len <= 2**17:
        raise ConfigError(
            f"--seq-len is {seq_len}.", fix="It must be 16 to 131072.", param="seq-len"
        )
    if not 1 <= samples <= _MAX_TOKENS // seq_len:
        most = _MAX_TOKENS // seq_len
        raise ConfigError(
            f"--samples is {samples}.",
            fix=f"It must be 1 to {most}, of {seq_len} tokens each.",
            param="samples",
        )
    data = None if calibration == SELF else Path(calibration).expanduser()
    return {"data": data, "num_tokens": samples * seq_len, "length": seq_len, "seed": seed}
