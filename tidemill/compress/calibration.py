"""Text that weights are fitted to, as tokens: what the model writes, a text file or a JSONL."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.draft.text import TextFile, read_text, write_text
from tidemill.compress.walk import Quiet, Reporter
from tidemill.errors import ConfigError
from tidemill.frontend.tokenizer import Tokenizer

MAX_TOKENS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`data`: a .txt or .jsonl file; None: the model writes its own."""

    data: Path | None = None
    num_tokens: int = 16_384
    length: int = 512  # of a sequence
    seed: int = 0

    def check(self) -> None:
        if not 16 <= self.length <= 2**17:
            raise ConfigError(
                f"--seq-len is {self.length}.", fix="It must be 16 to 131072.", param="seq-len"
            )
        if not self.length <= self.num_tokens <= MAX_TOKENS:
            fix = f"They must be {self.length} (one sequence) to {MAX_TOKENS}."
            raise ConfigError(
                f"--samples of --seq-len tokens are {self.num_tokens} tokens.",
                fix=fix,
                param="samples",
            )

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        text = None
        if self.data is not None:
            try:
                text = hashlib.sha256(self.data.read_bytes()).hexdigest()
            except OSError as error:
                raise ConfigError(
                    f"--calibration {self.data} cannot be read: {error}.", param="calibration"
                ) from error
        return {"text": text, "tokens": self.num_tokens, "length": self.length, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Texts:
    """The part of a model that reading text needs."""

    tokenizer: Tokenizer
    model_config: _Vocabulary


def calibration_ids(
    model: Path,
    vocab_size: int,
    calibration: Calibration,
    work: Path,
    report: Reporter | None = None,
) -> torch.Tensor:
    """[sequences, length]. Documents follow each other; `work`: where text that the model writes is
    kept meanwhile."""
    calibration.check()
    report = report or Quiet()
    if calibration.data is not None:
        report.stage("Reading text", 1)
        texts = _Texts(Tokenizer.load(model), _Vocabulary(vocab_size))
        examples = read_text(texts, calibration.data, calibration.num_tokens, calibration.length)
        report.at(1)
    else:
        examples = _written(model, calibration, work, report)
    ids = [token for example in examples for token in example.ids]
    num_sequences = calibration.num_tokens // calibration.length
    if len(ids) < num_sequences * calibration.length:
        raise ConfigError(
            f"The calibration text has {len(ids)} tokens; {num_sequences * calibration.length} were asked for.",
            fix=f"Give more text, or --samples {max(len(ids) // calibration.length, 1)}.",
            param="calibration",
        )
    return torch.tensor(ids[: num_sequences * calibration.length]).view(
        num_sequences, calibration.length
    )


def _written(model: Path, calibration: Calibration, work: Path, report: Reporter) -> Any:
    from tidemill.engine.llm import LLM
    from tidemill.engine.load import inspect

    context = min(1024, inspect(str(model))[2].max_context)
    llm = LLM(str(model), device="cpu", max_requests=32, max_context=context, progress=False)
    try:
        report.stage("Writing text", calibration.num_tokens)
        return write_text(
            llm,
            TextFile(work / "text.jsonl", ""),
            calibration.num_tokens,
            calibration.seed,
            report.at,
        )
    finally:
        llm.close()
