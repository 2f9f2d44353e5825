"""What every runner is and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tidemill.models.base import CausalLM
from tidemill.runner.sampler import token_logprobs
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.wire import TokenLogprobs

_PROMPT_LOGPROBS_AT_ONCE = 64  # rows of logits held at a time


@dataclass(slots=True)
class StepResult:
    """By row: the token sampled (negative: the logits were not numbers), and the logprobs that were requested."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)  # float64 [H]: the sum over this step's tokens, or the last


class Runner(Protocol):
    """Executes StepPlans in the order they are launched, and gives their results back in that order."""

    steps_ahead: int  # steps that may be launched before the results of the first are collected
    fallback: str  # why slower code runs than is there for this machine, or empty

    def launch(self, plan: StepPlan) -> Any: ...
    def collect(self, launched: Any) -> StepResult: ...


def look_at_prompt(model: CausalLM, state: RowState, item: StepItem, hidden_TH: torch.Tensor, result: StepResult) -> None:
    """Prompt logprobs and pooling where requested, from the hidden states of this step's tokens."""
    params = state.params[item.row]
    if params is not None and params.prompt_logprobs is not None:
        result.prompt_logprobs[item.row] = list(prompt_logprobs(model, state, item, hidden_TH, params.prompt_logprobs))
    if params is not None and params.pooling is not None:
        states = hidden_TH if params.pooling == "mean" else hidden_TH[-1:]
        result.pooled[item.row] = states.double().sum(0).cpu().numpy()


def prompt_logprobs(
    model: CausalLM, state: RowState, item: StepItem, hidden_TH: torch.Tensor, num_top: int
) -> Iterator[TokenLogprobs]:
    """Of the prompt tokens that this step's hidden states predict: those at start + 1 .. start + count, within the prompt."""
    num = min(item.count, state.num_prompt[item.row] - 1 - item.start)
    for begin in range(0, num, _PROMPT_LOGPROBS_AT_ONCE):
        end = min(num, begin + _PROMPT_LOGPROBS_AT_ONCE)
        logprobs = model.logits(hidden_TH[begin:end]).log_softmax(-1)
        targets = state.tokens[item.row, item.start + begin + 1 : item.start + end + 1].tolist()
        for row, token in zip(logprobs, targets, strict=True):
            yield token_logprobs(row, token, num_top)
