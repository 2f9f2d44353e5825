"""From heads to the drafter that runs them."""

from __future__ import annotations

from typing import Protocol

import torch

from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.spec.choose import Chain
from tidemill.runner.spec.eagle import EagleDrafter
from tidemill.runner.spec.exit import ExitDrafter, FirstLayers
from tidemill.runner.spec.heads import DraftHead, EagleHead, ExitHead, MedusaHeads, Target
from tidemill.runner.spec.medusa import MedusaDrafter


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
