"""From a model to the file of constants that `--kv-calibration` takes: text, keys and values, fit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.compress.draft.text import Reporter, TextFile, text_for
from tidemill.compress.kvquant.collect import Collector
from tidemill.compress.kvquant.fit import fit
from tidemill.engine.llm import LLM
from tidemill.errors import ConfigError
from tidemill.kernels.kvquant import KVQuant
from tidemill.models.base import CausalLM
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.types.kv_format import FORMATS
from tidemill.weights.kv_calibration import save_calibration

_LEAST_TOKENS = 256  # of which channels' ranges can be told
_MAX_TOKENS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    out: Path
    data: Path | None = None
    bits: int = 4
    outliers: float = 0.01
    num_tokens: int = 4096
    length: int = 512  # of a sequence
    seed: int = 0

    @property
    def kv_dtype(self) -> str:
        return f"kvquant{self.bits}"

    def check(self) -> None:
        if self.kv_dtype not in FORMATS:
            raise ConfigError(f"--bits is {self.bits}.", fix="It must be 4 or 3.", param="bits")
        if not 0 <= self.outliers <= 0.2:
            raise ConfigError(
                f"--outliers is {self.outliers}.",
                fix="It must be 0 to 0.2, like 0.01.",
                param="outliers",
            )
        if not _LEAST_TOKENS <= self.num_tokens <= _MAX_TOKENS:
            raise ConfigError(
                f"--samples of --seq-len tokens are {self.num_tokens} tokens.",
                fix=f"They must be {_LEAST_TOKENS} to {_MAX_TOKENS}.",
                param="samples",
            )
        if not self.out.parent.is_dir():
            raise ConfigError(
                f"There is no folder {self.out.parent}.",
                fix="Make it, or give another --out.",
                param="out",
            )


def calibrate(
    options: CalibrateOptions, llm: LLM, report: Reporter
) -> tuple[KVQuant, dict[str, Any]]:
    """Writes the file; and what is said in it."""
    options.check()
    runner, model = llm.core.runner, llm.core.runner.model  # type: ignore[attr-defined]
    if (
        not isinstance(runner, CpuRunner)
        or not isinstance(model, CausalLM)
        or runner.mixers.kv is None
    ):
        raise ConfigError(
            "The KV cache is calibrated on a CPU, for a model that generates text with attention layers."
        )
    if model.config.head_dim % 8:
        raise ConfigError(
            f"KVQuant takes heads of a multiple of 8; this model's have {model.config.head_dim}."
        )
    sequences = _text(options, llm, report)
    collector = Collector(runner, sequences)
    report.stage("Keys and values", collector.num_tokens)
    samples = collector.collect(report.at)
    report.stage("Fitting levels", 1)
    quant = fit(samples, options.kv_dtype, options.outliers)
    report.at(1)
    about = {
        "outliers": options.outliers,
        "text": "its own" if options.data is None else options.data.name,
        "text_tokens": collector.num_tokens,
        "sampled_tokens": samples[0].keys.shape[0],
        "seed": options.seed,
    }
    save_calibration(options.out, quant, model.config, about)
    return quant, about


def _text(options: CalibrateOptions, llm: LLM, report: Reporter) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        file = TextFile(Path(folder) / "text.jsonl", "")
        texts = text_for(
            llm, options.data, options.num_tokens, options.length, options.seed, file, report
        )
    sequences = [text.ids for text in texts if len(text.ids) > 1]
    total = sum(map(len, sequences))
    if total < _LEAST_TOKENS:
        raise ConfigError(
            f"The text has {total} tokens.",
            fix=f"Give one of at least {_LEAST_TOKENS}.",
            param="calibration",
        )
    return sequences
