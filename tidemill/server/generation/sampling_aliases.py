"""What llama.cpp's API and Ollama's have in common: names of sampling options, and figures of a request."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.frontend.output import TextDelta
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import MAX_STOPS, SamplingParams
from tidemill.server.api.openai.types import NEUTRAL, CompletionRequest
from tidemill.server.api.openai.writers import CompletionWriter
from tidemill.server.generation.service import Service
from tidemill.server.http.body import Body, UnsignedSeed, parse
from tidemill.wire import Delta, PromptProgress, Timings, TokenLogprobs

# Refused unless they are off.
_OFF = (
    "mirostat", "tfs_z", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_n_sigma", "min_keep", "n_indent",
    "t_max_predict_ms", "penalize_newline", "penalize_nl",
)  # fmt: skip


class Options(Body):
    """Sampling options. Values are checked by SamplingParams."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
            "dry_sequence_breakers", "xtc_threshold",
        }
    )  # fmt: skip

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
        """As parameters of the OpenAI API."""
        for name in _OFF:
            given = getattr(self, name)
            if given is not None and given not in NEUTRAL[name]:
                off = " or ".join(str(value).lower() for value in NEUTRAL[name])
                raise InvalidRequest(f"{name} is not supported.", fix=f"Leave it out, or give {off}.", param=name)
        same = ("top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "seed")
        made = {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.temperature is not None:
            made["temperature"] = max(self.temperature, 0.0)  # below 0 is greedy, too
        if self.top_k is not None:
            made["top_k"] = max(self.top_k, 0)
        if self.repeat_penalty is not None:
            made["repetition_penalty"] = self.repeat_penalty
        if self.stop:
            made["stop"] = self.stop
        return made if self.repeat_last_n is None else made | {"repeat_last_n": max(self.repeat_last_n, -1)}


def completion_params(
    service: Service, prompts: list[list[int]], values: dict[str, Any], max_tokens: int | None, is_streamed: bool
) -> SamplingParams:
    """Of a completion that is asked for with these values of the OpenAI API. `max_tokens` None: up to the end of the context."""
    asked = parse(CompletionRequest, json.dumps({"prompt": "", **values}).encode())
    params = msgspec.structs.replace(asked.params(), max_tokens=max_tokens)
    return CompletionWriter(service.tokenizer, prompts, params, asked).bounded(
        service.max_context, is_streamed, service.defaults.limit
    )


@dataclass(slots=True)
class Progress:
    """Of one prompt: what has been generated, and when."""

    num_prompt: int
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached: int = 0
    num_output: int = 0
    timings: Timings | None = None  # by the engine; there are none if the text met a stop string
    reason: str | None = None
    stop: str | int | None = None  # the string or token that ended it

    def take(self, delta: Delta, text: TextDelta) -> None:
        if text.num_tokens:
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
        self.num_output += text.num_tokens
        self.num_cached = max(self.num_cached, delta.num_cached)
        self.timings = delta.timings or self.timings
        self.reason, self.stop = text.finish_reason, text.stop

    @property
    def queue_s(self) -> float:
        return self.timings.queue_s if self.timings else 0.0

    @property
    def prefill_s(self) -> float:
        return self.timings.prefill_s if self.timings else self.first_s - self.begun_s

    @property
    def decode_s(self) -> float:
        return self.timings.decode_s if self.timings else self.last_s - self.first_s


def timings(progress: Progress) -> dict[str, float]:
    """Under llama.cpp's names."""
    prompt_n, prompt_ms = progress.num_prompt - progress.num_cached, 1000 * progress.prefill_s
    predicted_n, predicted_ms = progress.num_output, 1000 * progress.decode_s
    return {
        "cache_n": progress.num_cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(prompt_n, 1),
        "prompt_per_second": 1000 * prompt_n / max(prompt_ms, 1e-6),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(predicted_n - 1, 1),
        "predicted_per_second": 1000 * max(predicted_n - 1, 0) / max(predicted_ms, 1e-6),  # the first is the prefill's
    }


def prompt_progress(progress: PromptProgress, begun_s: float) -> dict[str, int]:
    """Under llama.cpp's names."""
    took_ms = int(1000 * (time.monotonic() - begun_s))
    return {"total": progress.num_prompt, "cache": progress.num_cached, "processed": progress.num_done, "time_ms": took_ms}


def logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], as_probs: bool = False) -> list[dict[str, Any]]:
    """`as_probs`: probabilities, without tokens that have none."""
    name = "prob" if as_probs else "logprob"

    def cell(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        shown = math.exp(value) if as_probs else max(value, -9999.0)  # JSON has no infinity
        return {"id": token, "token": text, "bytes": list(data), name: shown}

    return [
        cell(entry.token_id, entry.logprob)
        | {f"top_{name}s": [cell(token, value) for token, value in entry.top if not as_probs or math.exp(value) > 0]}
        for entry in entries
    ]
