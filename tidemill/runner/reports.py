"""The reports of a step besides its tokens, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import StepResult
from tidemill.runner.sampler import Scores, with_named
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepItem

# prompt tokens whose logits are held at a time: on their own, and in the room given
_AT_ONCE, _MOST_AT_ONCE = 64, 256

Score = Callable[[torch.Tensor, torch.Tensor, int], Scores]  # logits, tokens, number of the best


class Report(Protocol):
    """A result of a step besides its tokens: computed on the device, copied and read later."""

    def to_host(self) -> Report: ...
    def read(self, result: StepResult) -> None: ...


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy under way on the current stream, into memory that the device can write by itself."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    tensor.record_stream(torch.cuda.current_stream())
    return target.copy_(tensor, non_blocking=True)


def scores_to_host(scores: Scores) -> Scores:
    return Scores(to_host(scores.chosen), to_host(scores.values), to_host(scores.ids))


@dataclass(slots=True)
class PromptReport:
    """The results for the prompt tokens that a step computed: logprobs, pooled hidden states, or
    both."""

    row: int
    num_top: int
    tokens: torch.Tensor | None = None
    scores: Scores | None = None
    pooled: torch.Tensor | None = None
    named: tuple[int, ...] = ()  # tokens that are reported instead of the likeliest
    above: torch.Tensor | None = None  # their logits less those of the prompt's tokens

    def to_host(self) -> PromptReport:
        return PromptReport(
            self.row,
            self.num_top,
            None if self.tokens is None else to_host(self.tokens),
            None if self.scores is None else scores_to_host(self.scores),
            None if self.pooled is None else to_host(self.pooled),
            self.named,
            None if self.above is None else to_host(self.above),
        )

    def read(self, result: StepResult) -> None:
        """A sequence of which something is not a number fails: its token is -1."""
        if self.scores is not None and self.tokens is not None:
            tokens = self.tokens.tolist()
            entries = self.scores.entries(tokens, [self.num_top] * len(tokens))
            for i, row in enumerate([] if self.above is None else self.above.tolist()):
                entries[i] = with_named(
                    entries[i], self.named, [entries[i].logprob + more for more in row]
                )
            result.prompt_logprobs[self.row] = entries
            if self.scores.chosen.isnan().any():
                result.tokens[self.row] = [-1]
        if self.pooled is not None:
            result.pooled[self.row] = self.pooled.numpy()
            if not self.pooled.isfinite().all():
                result.tokens[self.row] = [-1]


def look_at_prompt(
    model: Model,
    state: RowState,
    item: StepItem,
    hidden_TH: torch.Tensor,
    score: Score,
    logits: torch.Tensor | None = None,
) -> PromptReport:
    """Computes the report that a request asks about its prompt, from the hidden states of this
    step's tokens. `logits`: room for them."""
    params = state.params[item.row]
    assert params is not None
    report = PromptReport(
        item.row, params.prompt_logprobs or 0, named=params.prompt_logprob_token_ids
    )
    if params.prompt_logprobs is not None:
        first = max(params.prompt_logprobs_start, item.start + 1)
        _score_prompt(cast(CausalLM, model), state, item, hidden_TH, score, logits, report, first)
    if params.pooling is not None:
        report.pooled = model.pool(hidden_TH, params.pooling)
    return report


def _score_prompt(
    model: CausalLM,
    state: RowState,
    item: StepItem,
    hidden_TH: torch.Tensor,
    score: Score,
    logits: torch.Tensor | None,
    report: PromptReport,
    first: int,
) -> None:
    """Computes the log-probabilities of the prompt tokens that these hidden states predict: those
    at start + 1 .. start + count, within the prompt, from `first` on."""
    num = min(item.start + item.count, state.num_prompt[item.row] - 1) + 1 - first
    if num < 1:
        return
    hidden_TH = hidden_TH[first - item.start - 1 :]
    at_once = _AT_ONCE if logits is None else min(_MOST_AT_ONCE, logits.shape[0])
    report.tokens = state.tokens[item.row, first : first + num].clone()
    named = upload(np.array(report.named, np.int64), hidden_TH.device)
    parts, above = [], []
    for begin in range(0, num, at_once):
        end = min(num, begin + at_once)
        made = model.logits(hidden_TH[begin:end], None if logits is None else logits[: end - begin])
        parts.append(score(made, report.tokens[begin:end], report.num_top))
        if report.named:
            own = made.gather(1, report.tokens[begin:end].long().unsqueeze(1))
            above.append(made.index_select(1, named).float() - own.float())
    report.scores, report.above = parts[0], torch.cat(above) if above else None
    if len(parts) > 1:
        columns = zip(*((part.chosen, part.values, part.ids) for part in parts), strict=True)
        report.scores = Scores(*(torch.cat(column) for column in columns))
