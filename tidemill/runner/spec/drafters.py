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
from tidemill.runner.spec.bandit import ExitBandit
from tidemill.runner.spec.choose import Chain
from tidemill.runner.spec.eagle import EagleDrafter
from tidemill.runner.spec.exit import Exit, ExitDrafter, FirstLayers
from tidemill.runner.spec.heads import DraftHead, EagleHead, ExitHead, MedusaHeads, Target
from tidemill.runner.spec.medusa import MedusaDrafter
from tidemill.runner.spec.stored import StoredDraft, load_draft, load_exits
from tidemill.sampling import SamplingParams
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


def make_drafter(head: DraftHead, target: Target, runner: CpuRunner, least: float, trees: bool = False) -> HeadDrafter:
    """`least`: the probability of a chain of drafts under which it ends. `trees`: drafts may be trees. While no sequence is in
    the runner's cache."""
    num_rows = runner.state.tokens.shape[0]
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head, target, num_rows, least, trees)
    if isinstance(head, EagleHead):
        return EagleDrafter(head, target, num_rows, least)
    assert isinstance(head, ExitHead)
    return ExitDrafter([_make_exit(head, target, runner, least)], target)


def _make_exit(head: ExitHead, target: Target, runner: CpuRunner, least: float) -> Exit:
    return Exit(head, target, FirstLayers(runner.model, runner.mixers, runner.cache, runner.state, head.layer), least)


def make_exit_bandit(stored: Sequence[StoredDraft], target: Target, runner: CpuRunner) -> HeadDrafter:
    """`stored`: exits, from the first to the deepest, which guess tokens of one vocabulary. Costs are those of their training."""
    exits = []
    for one in stored:
        assert isinstance(one.head, ExitHead)
        exits.append(_make_exit(one.head, target, runner, one.least))
    return ExitDrafter(exits, target, ExitBandit([one.draft_cost for one in stored], stored[0].step_costs))


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
                fix=f"Give --draft-heads FOLDER; tidemill train-draft MODEL --kind {name.partition('-')[0]} makes one.",
                param="draft_heads",
            )
        self._state = runner.state
        self._inner = self._make(name, config, runner, runner.model)
        runner.observers.append(self.observe)

    def _make(self, name: str, config: EngineConfig, runner: CpuRunner, model: CausalLM) -> HeadDrafter:
        path = Path(config.draft_heads or "")
        if name == "exit-bandit":
            stored = load_exits(path, model)
            return make_exit_bandit(stored, Target(model, stored[0].ids_D), runner)
        one = load_draft(path, model, name)
        trees = runner.mixers.takes_trees and config.acceptance == "exact"
        return make_drafter(one.head, Target(model, one.ids_D), runner, one.least, trees)

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        chains = [Chain(ask.row, ask.params, ask.tokens, ask.num_prompt, ask.most, []) for ask in asks]
        self._inner.propose(chains)
        return [chain.drafts if chain.tree is None else chain.tree for chain in chains]

    def chances(self, params: SamplingParams, most: int) -> Sequence[float] | None:
        """How likely each draft is right; None: it is not known beforehand."""
        return self._inner.chances(params, most) if isinstance(self._inner, MedusaDrafter) else None

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        return  # a row is forgotten when another request takes it

    def observe(self, plan: StepPlan, hidden_TH: torch.Tensor, result: StepResult) -> None:
        """A step was computed: states of drafts that were wrong are left out."""
        for new in plan.new_rows:
            self._inner.forget(new.row)
        first = 0
        for item in plan.items:
            drawn = result.tokens.get(item.row, [])
            num_known = item.count - item.num_drafts
            num = num_known + (len(drawn) - 1 if item.num_drafts else 0)
            if num > 0 and (not drawn or drawn[-1] >= 0) and not self._state.is_pooled(item.row):
                after = self._state.tokens[item.row, item.start + 1 : item.start + num + 1].tolist()
                states_TH = hidden_TH[first : first + num]
                if item.row in result.paths:
                    at = [*range(num_known), *(num_known + draft for draft in result.paths[item.row])]
                    states_TH = hidden_TH[[first + i for i in at]]
                self._inner.observe(item.row, item.start, states_TH, after)
            first += item.count
