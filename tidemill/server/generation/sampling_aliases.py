"""The sampling options that llama.cpp's API and Ollama's have in common, under llama.cpp's
names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.generation.sampling import NEUTRAL, as_tuple
from tidemill.server.http.body import Body, UnsignedSeed
from tidemill.types.sampling import MAX_STOPS

# Refused unless they are off.
_OFF = (
    "mirostat", "tfs_z", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_n_sigma",
    "min_keep", "n_indent", "t_max_predict_ms", "penalize_newline", "penalize_nl",
)  # fmt: skip


class Options(Body):
    """Sampling options. Values are checked by SamplingParams."""

    without_effect: ClassVar[frozenset[str]] = frozenset({
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold",
    })  # fmt: skip

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: UnsignedSeed | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    # Refused unless they are off.
    mirostat: int | None = None
    tfs_z: float | None = None
    dynatemp_range: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    top_n_sigma: float | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    penalize_newline: bool | None = None
    penalize_nl: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The options that are given, as arguments of SamplingParams."""
        for name in _OFF:
            value = getattr(self, name)
            if value is not None and value not in NEUTRAL[name]:
                off = " or ".join(str(neutral).lower() for neutral in NEUTRAL[name])
                what, fix = f"{name} is not supported.", f"Leave it out, or give {off}."
                raise InvalidRequest(what, fix=fix, param=name)
        values: dict[str, Any] = {
            # Below 0 a temperature is greedy, too.
            "temperature": None if self.temperature is None else max(self.temperature, 0.0),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "repetition_penalty": self.repeat_penalty,
            "penalty_window": None if self.repeat_last_n is None else max(self.repeat_last_n, -1),
            "stop": as_tuple(self.stop) if self.stop else None,
        }
        return {name: value for name, value in values.items() if value is not None}
