"""The value of drafts: the measured cost of steps of several tokens, and the speed that an
acceptance gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidemill.compress.draft.losses import Drafted
from tidemill.compress.draft.states import batch_of
from tidemill.models.base import CausalLM
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.graphs import use_first_pages
from tidemill.runner.spec.choose import Chain, Seen
from tidemill.runner.spec.drafters import make_drafter
from tidemill.runner.spec.heads import DraftHead, Target
from tidemill.types.sampling import SamplingParams

_CONTEXT, _CONTEXT_PAGE = 128, 64
_MOST = 4  # drafts of a chain that is timed
_THRESHOLDS = [round(0.05 * i, 2) for i in range(1, 20)]


def _fastest_s(run: Callable[[], object], repeats: int) -> float:
    """The fastest of many runs: other work of the machine only adds to it."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    return min(took)


def _context(runner: CpuRunner) -> int:
    """Tokens before those that are timed: whole pages."""
    return min(_CONTEXT, runner.model.config.max_context // 2 // _CONTEXT_PAGE * _CONTEXT_PAGE)


@torch.inference_mode()
def step_seconds(runner: CpuRunner, most: int, repeats: int = 30) -> list[float]:
    """The times of steps of 1 .. `most` tokens of one sequence, with the logits of each."""
    model = runner.model
    assert isinstance(model, CausalLM)
    context = _context(runner)
    seconds = []
    for num in range(1, most + 1):
        batch = batch_of(runner, [0] * (context + num), context)
        seconds.append(_fastest_s(lambda batch=batch: model.logits(runner.forward(batch)), repeats))  # type: ignore[misc]
    return seconds


@torch.inference_mode()
def draft_seconds(
    runner: CpuRunner, head: DraftHead, target: Target, repeats: int = 30
) -> tuple[float, bool]:
    """The time of one more draft, and whether all are made at once."""
    drafter = make_drafter(head, target, runner, 0.0)
    num = _context(runner) + 2
    use_first_pages(runner.mixers, num + _MOST)
    chain = Chain(0, SamplingParams(temperature=0.0), [0] * num, num, _MOST, [])

    def run() -> None:
        chain.drafts.clear()
        states_TH = torch.zeros(1, target.hidden_size)
        drafter.observe([Seen(0, num - 2, [0], [0])], states_TH)
        drafter.propose([chain])

    seconds = _fastest_s(run, repeats)
    return seconds / (1 if head.kind == "medusa" else len(chain.drafts)), head.kind == "medusa"


@dataclass(frozen=True, slots=True)
class Costs:
    steps_s: list[float]  # of a step of 1, 2, ... tokens
    draft_s: float  # of a draft
    at_once: bool = False  # all drafts of a step are made together


def acceptance(drafted: Sequence[Drafted]) -> list[float]:
    """The share of places where the first 1, 2, ... drafts are all right."""
    right = torch.cat([part.is_right for part in drafted]).cumprod(1).double()
    return [round(share, 4) for share in right.mean(0).tolist()] if len(right) else []


def speed(drafted: Sequence[Drafted], costs: Costs, least: float) -> float:
    """Tokens in the time of one plain step, along the texts, if a draft is made while those before
    it and it are right with a probability of at least `least`, by the head's own account. 1 is the
    speed without drafts."""
    tokens, seconds = 0, 0.0
    for part in drafted:
        num_good = (
            (part.probs.cumprod(1) >= least)
            .cumprod(1)
            .sum(1)
            .clamp(max=len(costs.steps_s) - 1)
            .tolist()
        )
        num_right = part.is_right.cumprod(1)
        place = 0
        while place < len(num_good):
            num = num_good[place]
            # the last one made is not good enough
            num_made = 1 if costs.at_once else min(num + 1, part.probs.shape[1])
            seconds += costs.steps_s[num] + costs.draft_s * num_made
            accepted = int(num_right[place, :num].sum()) if num else 0
            tokens += accepted + 1
            place += accepted + 1
    return tokens * costs.steps_s[0] / seconds if tokens else 1.0


def best_threshold(drafted: Sequence[Drafted], costs: Costs) -> tuple[float, float]:
    """The least probability that gives the highest speed, and that speed."""
    found = {least: speed(drafted, costs, least) for least in _THRESHOLDS}
    best = max(found, key=found.__getitem__)
    return best, round(found[best], 3)
