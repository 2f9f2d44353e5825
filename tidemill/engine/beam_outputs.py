"""The outputs that `LLM.beam_search` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidemill.engine.llm_outputs import Logprobs
from tidemill.errors import TidemillError
from tidemill.frontend.tokenizer import Tokenizer


class _Sample(Protocol):
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    score: float | None


@dataclass(slots=True)
class BeamSearchSequence:
    """An output of beam search. As in vLLM, tokens and text begin with the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float  # what outputs are ranked by: cum_logprob / length of the output ** length_penalty
    finish_reason: str | None
    logprobs: list[Logprobs]  # of the output
    token_ids: list[int]  # of the output


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs for one prompt, best first. If it failed, `error` says why, and `sequences`
    raises it."""

    outputs: list[BeamSearchSequence]
    error: TidemillError | None = None

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        samples: Sequence[_Sample],
        error: TidemillError | None,
        with_end: bool,
    ) -> BeamSearchOutput:
        """`with_end`: the token that ended an output is part of it."""
        sequences = []
        for sample in samples if error is None else ():
            has_end = sample.finish_reason == "stop" and not with_end
            ids, entries = (
                sample.token_ids[: len(sample.token_ids) - has_end],
                sample.logprobs or [],
            )
            tokens, total = [*prompt_ids, *ids], sum(entry.logprob for entry in entries)
            text = tokenizer.decode(tokens, skip_special=False)
            sequences.append(
                BeamSearchSequence(
                    tokens, text, total, sample.score or 0.0, sample.finish_reason, entries, ids
                )
            )
        return BeamSearchOutput(sequences, error)

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        if self.error is not None:
            raise self.error
        return self.outputs
