"""Trained heads as a drafter of the engine: it sees the hidden states of each step, and drafts from
them before the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from tidemill.config import TREES, EngineConfig
from tidemill.errors import ConfigError
from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import Runner, StepResult
from tidemill.runner.spec import Ask, KnowsChances
from tidemill.runner.spec.bandit import ExitBandit
from tidemill.runner.spec.choose import Chain, Seen
from tidemill.runner.spec.eagle import EagleDrafter
from tidemill.runner.spec.exit import Exit, ExitDrafter, Layers
from tidemill.runner.spec.heads import DraftHead, EagleHead, ExitHead, MedusaHeads, Target
from tidemill.runner.spec.medusa import MedusaDrafter
from tidemill.runner.spec.stored import StoredDraft, load_draft, load_exits
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepPlan
from tidemill.types.sampling import SamplingParams


class HeadDrafter(Protocol):
    def observe(self, seen: Sequence[Seen], hidden_TH: torch.Tensor) -> None:
        """A step was computed: of each row, which of the step's tokens are right, and what was
        drawn."""
        ...

    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts."""
        ...

    def forget(self, row: int) -> None:
        """Another request takes the row."""
        ...


@runtime_checkable
class Observed(Protocol):
    """A runner whose steps heads look at."""

    state: RowState

    @property
    def model(self) -> Model: ...
    @property
    def takes_trees(self) -> bool: ...
    def read_states(self, reader: Callable[[StepPlan, torch.Tensor, StepResult], None]) -> None: ...
    def first_layers(self, num_layers: int) -> Layers:
        """While no sequence is in the cache."""
        ...


def make_drafter(
    head: DraftHead, target: Target, runner: Observed, least: float, trees: bool = False
) -> HeadDrafter:
    """`least`: the probability of a chain of drafts under which it ends. `trees`: drafts may be
    trees. While no sequence is in the runner's cache."""
    num_rows = runner.state.tokens.shape[0]
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head, target, num_rows, least, trees)
    if isinstance(head, EagleHead):
        return EagleDrafter(head, target, num_rows, least, trees)
    assert isinstance(head, ExitHead)
    return ExitDrafter([_make_exit(head, target, runner, least)], target)


def _make_exit(head: ExitHead, target: Target, runner: Observed, least: float) -> Exit:
    return Exit(head, target, runner.first_layers(head.layer), least)


def make_exit_bandit(
    stored: Sequence[StoredDraft], target: Target, runner: Observed
) -> HeadDrafter:
    """`stored`: exits, from the first to the deepest, which guess tokens of one vocabulary. Costs
    are those of their training."""
    exits = []
    for one in stored:
        assert isinstance(one.head, ExitHead)
        exits.append(_make_exit(one.head, target, runner, one.least))
    return ExitDrafter(
        exits, target, ExitBandit([one.draft_cost for one in stored], stored[0].step_costs)
    )


class HeadsDrafter:
    is_free = False

    def __init__(self, name: str, config: EngineConfig, runner: Runner) -> None:
        self.name = name
        if not isinstance(runner, Observed) or not isinstance(runner.model, CausalLM):
            raise ConfigError(
                f"Draft heads ({name}) run beside one model that generates.",
                fix="Use --speculate auto.",
                param="speculate",
            )
        self._state = runner.state
        self._inner = self._make(name, config, runner, runner.model)
        self._knowing = self._inner if isinstance(self._inner, KnowsChances) else None
        runner.read_states(self.observe)

    def _make(
        self, name: str, config: EngineConfig, runner: Observed, model: CausalLM
    ) -> HeadDrafter:
        path = Path(config.draft_heads or "")
        if name == "exit-bandit":
            stored = load_exits(path, model)
            return make_exit_bandit(stored, Target(model, stored[0].ids_D), runner)
        one = load_draft(path, model, _kind_of(name))
        trees = name in TREES and runner.takes_trees and config.acceptance == "exact"
        return make_drafter(one.head, Target(model, one.ids_D), runner, one.least, trees)

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        chains = [
            Chain(ask.row, ask.params, ask.tokens, ask.num_prompt, ask.most, []) for ask in asks
        ]
        self._inner.propose(chains)
        return [chain.drafts if chain.tree is None else chain.tree for chain in chains]

    def chances(self, params: SamplingParams, most: int) -> Sequence[float] | None:
        """The chance of each draft to be right; None: it is not known beforehand."""
        return None if self._knowing is None else self._knowing.chances(params, most)

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        return  # a row is forgotten when another request takes it

    def observe(self, plan: StepPlan, hidden_TH: torch.Tensor, result: StepResult) -> None:
        """A step was computed: states of drafts that were wrong are left out."""
        for row in (
            *(new.row for new in plan.new_rows),
            *(copy.target for copy in plan.row_copies),
        ):
            self._inner.forget(row)
        seen, first = list[Seen](), 0
        for item in plan.items:
            drawn = result.tokens.get(item.row, [])
            num_known = item.count - item.num_drafts
            if (
                num_known > 0
                and (not drawn or drawn[-1] >= 0)
                and not self._state.is_pooled(item.row)
            ):
                path = result.paths.get(item.row, range(len(drawn) - 1 if item.num_drafts else 0))
                at = [
                    *range(first, first + num_known),
                    *(first + num_known + draft for draft in path),
                ]
                seen.append(Seen(item.row, item.start, at, drawn))
            first += item.count
        self._inner.observe(seen, hidden_TH)


def _kind_of(name: str) -> str:
    """The heads that a drafter needs."""
    return name.partition("-")[0]
