"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from tidemill.errors import TidemillError
from tidemill.wire import Timings, TokenLogprobs


@dataclass(slots=True)
class Completion:
    """One sample of a request's output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    timings: Timings | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    score: float | None = None  # of beam search


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. If that prompt failed, `error` says why, and its `outputs` cannot be read: they raise it."""

    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0  # prompt tokens found in the prefix cache
    error: TidemillError | None = None
    pooled: list[float] | None = None  # its embedding or scores, if they were asked for

    @property
    def outputs(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return self.samples

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.outputs[0].text

    @property
    def finished(self) -> bool:
        return self.error is not None or all(sample.finish_reason for sample in self.samples)


@dataclass(slots=True)
class _Pooled:
    prompt_token_ids: list[int]
    error: TidemillError | None = None

    @property
    def outputs(self) -> Self:
        """As vLLM has it: `output.outputs.embedding`."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(slots=True)
class EmbeddingOutput(_Pooled):
    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ScoreOutput(_Pooled):
    score: float = 0.0
