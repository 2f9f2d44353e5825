"""Figures of a request: how many tokens it has, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tidemill.frontend.output import TextDelta
from tidemill.types.wire import Delta, PromptProgress, Timings


@dataclass(slots=True)
class Figures:
    """Figures of one prompt and all its samples, as measured here and as reported by the engine."""

    num_prompt: int = 0
    num_cached: int = 0
    num_held: int = 0  # tokens of the longest prefix that is held for the request
    num_output: int = 0
    num_reasoning: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0
    timings: Timings | None = None  # by the engine; there are none if the text met a stop string

    def take(self, delta: Delta, text: TextDelta) -> None:
        if text.num_tokens:
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
        self.num_output += text.num_tokens
        self.num_reasoning += text.num_reasoning
        self.timings = delta.timings or self.timings
        if (
            delta.index == 0
        ):  # the other samples find the prompt in the cache, since the first computed it
            self.num_cached = max(self.num_cached, delta.num_cached)
            self.num_held = max(self.num_held, delta.num_held)

    @staticmethod
    def total(parts: Iterable[Figures]) -> Figures:
        """The figures of several prompts that were sent together."""
        several = list(parts)
        if len(several) == 1:
            return several[0]
        return Figures(
            num_prompt=sum(part.num_prompt for part in several),
            num_cached=sum(part.num_cached for part in several),
            num_held=sum(part.num_held for part in several),
            num_output=sum(part.num_output for part in several),
            num_reasoning=sum(part.num_reasoning for part in several),
            begun_s=min(part.begun_s for part in several),
            first_s=min((part.first_s for part in several if part.first_s), default=0.0),
            last_s=max(part.last_s for part in several),
            timings=next((part.timings for part in reversed(several) if part.timings), None),
        )

    @property
    def queue_s(self) -> float:
        return self.timings.queue_s if self.timings else 0.0

    @property
    def prefill_s(self) -> float:
        if self.timings:
            return self.timings.prefill_s
        return (self.first_s or time.monotonic()) - self.begun_s  # so far, or until the first token

    @property
    def decode_s(self) -> float:
        return self.timings.decode_s if self.timings else self.last_s - self.first_s

    def usage(self) -> dict[str, Any]:
        """Token counts under the names of OpenAI's completions."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }

    def times(self) -> dict[str, float]:
        """Times under Tidemill's names. Several tokens may arrive here together, so the engine's
        time counts."""
        now = time.monotonic()
        decode_s = now - self.first_s if self.timings is None else self.timings.decode_s
        per_second = (self.num_output - 1) / max(decode_s, 1e-6) if self.num_output > 1 else 0.0
        times = {
            "total_ms": 1000 * (now - self.begun_s),
            "first_token_ms": 1000 * (self.first_s - self.begun_s),
            "tokens_per_second": per_second,
        }
        if self.timings is not None:
            times |= {
                "queue_ms": 1000 * self.timings.queue_s,
                "prefill_ms": 1000 * self.timings.prefill_s,
                "decode_ms": 1000 * self.timings.decode_s,
            }
        return {name: round(value, 3) for name, value in times.items()}

    def llamacpp_timings(self) -> dict[str, float]:
        """Times under llama.cpp's names. The first output token is the prefill's."""
        prompt_n, prompt_ms = self.num_prompt - self.num_cached, 1000 * self.prefill_s
        predicted_ms, num_decoded = 1000 * self.decode_s, max(self.num_output - 1, 0)
        return {
            "cache_n": self.num_cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(prompt_n, 1),
            "prompt_per_second": 1000 * prompt_n / max(prompt_ms, 1e-6),
            "predicted_n": self.num_output,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(num_decoded, 1),
            "predicted_per_second": 1000 * num_decoded / max(predicted_ms, 1e-6),
        }

    def llamacpp_progress(self, progress: PromptProgress) -> dict[str, int]:
        """The progress of the prompt under llama.cpp's names."""
        return {
            "total": progress.num_prompt,
            "cache": progress.num_cached,
            "processed": progress.num_done,
            "time_ms": int(1000 * (time.monotonic() - self.begun_s)),
        }
