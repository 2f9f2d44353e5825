"""Trained heads as a drafter of the engine: it sees the hidden states of each step, and drafts from them before the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from tidemill.config import EngineConfig
from tidemill.errors import ConfigError
from tidemill.models.base import CausalLM
from tidemill.runner.base import Runner, StepResult
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.spec import Ask
from tidemill.runner.spec.choose import Chain
from tidemill.runner.spec.eagle import EagleDrafter
from tidemill.runner.spec.exit import ExitDrafter, FirstLayers
from tidemill.runner.spec.heads import DraftHead, EagleHead, ExitHead, MedusaHeads, Target
from tidemill.runner.spec.medusa import MedusaDrafter
from tidemill.runner.spec.stored import load_draft
from tidemill.sched.plan import StepPlan


class HeadDrafter(Protocol):
    def observe(self, row: int, start: int, states_TH: torch.Tensor, next_ids: list[int]) -> None:
        """The target's states at positions `start` on that are right, and the tokens that follow each."""
        ...

    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts."""
        ...

    def forget(self, row: int) -> None:
        """Another request takes the row."""
        ...


def make_drafter(head: DraftHead, target: Target, runner: CpuRunner, least: float) -> HeadDrafter:
    """`least`: the probability of a chain of drafts under which it ends. While no sequence is in the runner's cache."""
    num_rows = runner.state.tokens.shape[0]
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head, target, num_rows, least)
    if isinstance(head, EagleHead):
        return EagleDrafter(head, target, num_rows, least)
    assert isinstance(head, ExitHead)
    return ExitDrafter(head, target, FirstLayers(runner.model, runner.mixers, runner.cache, runner.state, head.layer), least)


class HeadsDrafter:
    """On a CPU, where a step is done when the next is planned."""

    is_free = False

    def __init__(self, name: str, config: EngineConfig, runner: Runner) -> None:
        self.name = name
        if not isinstance(runner, CpuRunner) or not isinstance(runner.model, CausalLM):
            raise ConfigError(
                f"Draft heads ({name}) run on a CPU.", fix="Use --device cpu, or --speculate auto.", param="speculate"
            )
        if not config.draft_heads:
            raise ConfigError(
                f"--speculate {name} needs trained heads.",
                fix=f"Give --draft-heads FOLDER; tidemill train-draft MODEL --kind {name} makes one.",
                param="draft_heads",
            )
        self.stored = load_draft(Path(config.draft_heads), runner.model, name)
        self._state = runner.state
        self._inner = make_drafter(self.stored.head, Target(runner.model, self.stored.ids_D), runner, self.stored.least)
        runner.observers.append(self.observe)

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        chains = [Chain(ask.row, ask.params, ask.tokens, ask.num_prompt, ask.most, []) for ask in asks]
        self._inner.propose(chains)
        return [chain.drafts for chain in chains]

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        return  # a row is forgotten when another request takes it

    def observe(self, plan: StepPlan, hidden_TH: torch.Tensor, result: StepResult) -> None:
        """A step was computed: states of drafts that were wrong are left out."""
        for new in plan.new_rows:
            self._inner.forget(new.row)
        first = 0
        for item in plan.items:
            drawn = result.tokens.get(item.row, [])
            num = item.count - item.num_drafts + (len(drawn) - 1 if item.num_drafts else 0)
            if num > 0 and (not drawn or drawn[-1] >= 0) and not self._state.is_pooled(item.row):
                after = self._state.tokens[item.row, item.start + 1 : item.start + num + 1].tolist()
                self._inner.observe(item.row, item.start, hidden_TH[first : first + num], after)
            first += item.count
