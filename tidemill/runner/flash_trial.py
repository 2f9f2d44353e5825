"""The trial of flash-attn-4, which takes the prompts of `--fast-math` if it is there, agrees with
our kernel and is faster."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.capabilities import why_not
from tidemill.config import EngineConfig
from tidemill.kernels.cuda import flash
from tidemill.runner.cuda_graphs import Graph, time_replay
from tidemill.runner.cuda_work import Work, make_work
from tidemill.runner.state import RowState
from tidemill.types.model_config import ModelConfig

FROM_TOKENS = 1024  # of a step: below, attention hardly counts
# tokens of the context it is tried in, and how far a token's hidden state may be from ours
_TRIAL, _AGREES = 16384, 0.3


@dataclass(frozen=True, slots=True)
class FlashTrial:
    is_taken: bool
    why: str


@dataclass(slots=True)
class Candidates:
    """The parts of the runner that a trial needs."""

    state: RowState
    num_pages: int  # of the cache
    max_context: int
    vocab_size: int
    size: int  # tokens of the largest step
    ours: Graph
    tile: int  # tokens of a tile of ours
    capture: Callable[[], Graph]  # the same step by flash-attn-4
    replay: Callable[[Graph, Work], object]
    # where a replay leaves its result: of large steps, what goes into the last layer
    hidden: torch.Tensor


def refused_flash(config: EngineConfig, model: ModelConfig) -> str:
    """Why it is not even tried, or empty."""
    if not config.fast_math:
        return "batch-invariant"
    if refusal := why_not("flash-attn-4", config.features):
        return refusal.why
    return "" if flash.covers(model.token_layers) else "it is not for this model's layers"


def run_trial(candidates: Candidates) -> FlashTrial:
    """Steps of one prompt, near the start of a context and far into it. Leaves the state as it was."""
    state, size = candidates.state, candidates.size
    num_pages = min(candidates.num_pages, min(candidates.max_context, _TRIAL) // state.page_size)
    last = num_pages * state.page_size - size
    if size < FROM_TOKENS or last < 0:
        return FlashTrial(False, "steps or contexts are too small for it")
    try:
        flash.forward()
        with warnings.catch_warnings(action="ignore"):
            theirs = candidates.capture()
    except Exception as error:  # not installed, or not for this GPU, or another version's interface
        return FlashTrial(False, f"cannot be used: {type(error).__name__}: {error}".splitlines()[0])
    device = state.tokens.device
    state.pages[0, :num_pages] = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)
    state.tokens[0].random_(candidates.vocab_size)
    table, times, apart = state.pages[:1].cpu().numpy(), [0.0, 0.0], 0.0
    for start in sorted({0, min(size, last), last}):
        seen = []
        for i, (graph, tile) in enumerate(
            ((candidates.ours, candidates.tile), (theirs, flash.WHOLE))
        ):
            work = make_work(
                np.array([[0, start, size]], np.int32), np.ones(1, bool), [table], 1, tile
            )
            times[i] += min(time_replay(candidates.replay, graph, work) for _ in range(3))
            seen.append(candidates.hidden[:size].double())
        error_T = (seen[1] - seen[0]).norm(dim=1) / seen[0].norm(dim=1)
        apart = max(apart, error_T.nan_to_num(torch.inf).max().item())
    for used in (state.pages[0], state.tokens[0]):
        used.zero_()
    part = times[1] / times[0]
    return FlashTrial(
        apart < _AGREES and part < 1,
        f"takes {part:.3f} of our time, hidden states differ by {apart:.3f}",
    )
