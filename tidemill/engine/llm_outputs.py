"""The outputs of `LLM` and `AsyncLLM`, and how they grow with the engine's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tidemill.errors import TidemillError
from tidemill.frontend.output import TextStream
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import RequestOutputKind, SamplingParams
from tidemill.types.wire import Delta, Timings, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability. `rank`: 1 for the likeliest; None where it is not among those that
    were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class Logprobs(dict[int, Logprob]):
    """The log-probabilities at one position by token id: first of the token that is there, then of
    the likeliest ones."""

    def __init__(self, entry: TokenLogprobs, tokenizer: Tokenizer, is_ranked: bool) -> None:
        """`is_ranked`: `entry.top` are the likeliest tokens, and not some that the request named."""
        ranks = {token: rank if is_ranked else None for rank, (token, _) in enumerate(entry.top, 1)}
        text = tokenizer.token_text
        super().__init__(
            {
                entry.token_id: Logprob(
                    entry.logprob, ranks.get(entry.token_id), text(entry.token_id)
                )
            }
        )
        for token, logprob in entry.top:
            if token != entry.token_id:
                self[token] = Logprob(logprob, ranks[token], text(token))
        self._entry = entry

    @property
    def token_id(self) -> int:
        """The token that is there."""
        return self._entry.token_id

    @property
    def logprob(self) -> float:
        return self._entry.logprob

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens, or those that the request named."""
        return self._entry.top


@dataclass(slots=True)
class Completion:
    """One sample of a request's output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    timings: Timings | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    score: float | None = None  # of beam search

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over its tokens, if their log-probabilities were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. If that prompt failed, `error` says why, and its `outputs` cannot
    be read: they raise it."""

    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Completion]
    # of each prompt token; None: of the first, which follows nothing
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached: int = 0  # prompt tokens found in the prefix cache
    error: TidemillError | None = None
    pooled: list[float] | None = None  # its embedding or scores, if they were asked for
    request_id: str = ""

    @property
    def outputs(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return self.samples

    @property
    def text(self) -> str:
        """The text of the first sample."""
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
        """The output itself, so that vLLM's spelling works: `output.outputs.embedding`."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(slots=True)
class EmbeddingOutput(_Pooled):
    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ScoreOutput(_Pooled):
    score: float = 0.0


@dataclass(slots=True)
class PoolingOutput(_Pooled):
    """`data`: a torch tensor with a vector, a vector for each token, or the scores of labels."""

    data: Any = None


@dataclass(slots=True)
class ClassificationOutput(_Pooled):
    """`probs`: of each label, in the order of the model's."""

    probs: list[float] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class OutputBuilder:
    """A request's output, which grows with its deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        text: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._tokenizer, self._params = tokenizer, params
        samples = [
            Completion(i, logprobs=[] if params.logprobs is not None else None)
            for i in range(params.n)
        ]
        self._streams = [TextStream(tokenizer, params) for _ in samples]
        # characters and tokens of each sample that a reader of what is new has had
        self._num_shown = [(0, 0)] * params.n
        self.output = RequestOutput(text, list(prompt_ids), samples, request_id=request_id)

    def take(self, delta: Delta) -> bool:
        """Adds its tokens. True: a stop string has ended the sample, which the engine still
        computes."""
        output, params = self.output, self._params
        sample = output.samples[delta.index]
        if sample.finish_reason:
            return False
        text = self._streams[delta.index].push(delta.token_ids, delta.finish_reason)
        sample.text += text.text
        sample.token_ids += delta.token_ids[: text.num_tokens]
        if sample.logprobs is not None and delta.logprobs:
            is_ranked = not params.logprob_token_ids
            sample.logprobs += [
                Logprobs(logprobs, self._tokenizer, is_ranked)
                for logprobs in delta.logprobs[: text.num_tokens]
            ]
        if delta.embedding is not None:
            output.pooled = delta.embedding
        if delta.prompt_logprobs is not None:
            is_ranked = not params.prompt_logprob_token_ids
            entries = [
                Logprobs(logprobs, self._tokenizer, is_ranked) for logprobs in delta.prompt_logprobs
            ]
            output.prompt_logprobs = [None] * (
                len(output.prompt_token_ids) - len(entries)
            ) + entries
        output.num_cached = max(output.num_cached, delta.num_cached if delta.index == 0 else 0)
        sample.timings, sample.score = delta.timings, delta.score
        sample.finish_reason, sample.stop_reason = text.finish_reason, text.stop
        return bool(text.finish_reason and not delta.finish_reason)

    def next_output(self) -> RequestOutput:
        """The output as it is now; of the kind DELTA, what has come since the last one."""
        is_delta = self._params.output_kind == RequestOutputKind.DELTA
        samples = []
        for sample, (num_chars, num_tokens) in zip(
            self.output.samples, self._num_shown, strict=True
        ):
            logprobs = None if sample.logprobs is None else sample.logprobs[num_tokens:]
            text, token_ids = sample.text[num_chars:], sample.token_ids[num_tokens:]
            samples.append(replace(sample, text=text, token_ids=token_ids, logprobs=logprobs))
        if is_delta:
            self._num_shown = [
                (len(sample.text), len(sample.token_ids)) for sample in self.output.samples
            ]
        return replace(self.output, samples=samples)
