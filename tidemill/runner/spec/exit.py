"""Early exit: the target's own first layers draft, with their keys and values in the target's
cache.

What they write there, the step that verifies the drafts writes again, with the same bits where a
draft is right. Where there are several exits, a bandit chooses one for each draft (bandit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from tidemill.runner.spec.bandit import ExitBandit
from tidemill.runner.spec.choose import Chain, Chooser, Seen
from tidemill.runner.spec.heads import ExitHead, Target
from tidemill.runner.spec.packed import PackedTable, pack


class Layers(Protocol):
    """The model's first layers on a runner's cache and rows."""

    def has_page(self, position: int, num_computed: int) -> bool:
        """It lies in the page of the last token computed. The row's table may still name later ones
        that it has given back."""
        ...

    def __call__(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        """A token of each row, at its position: states after the last norm, [R, H]."""
        ...


class Exit:
    """The first layers and the head after them."""

    def __init__(self, head: ExitHead, target: Target, layers: Layers, least: float) -> None:
        self.layers, self._scale = layers, target.own(head.scale)
        self._down, self._up = pack(target.own(head.down.weight)), pack(target.own(head.up.weight))
        self.chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)

    def states(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        states_RH = self.layers(rows, positions, ids)
        return states_RH * self._scale + self._up(F.silu(self._down(states_RH)))


@dataclass(slots=True)
class _Proposal:
    """The proposal for a row, until the tokens drawn are known."""

    position: int  # of the first draft
    drafts: list[int]
    num_made: int  # one more than there are drafts, where the head was not sure of the last
    exits: list[int]  # of each


class ExitDrafter:
    """`exits`: from the first to the deepest; with more than one, `bandit` chooses among them."""

    def __init__(
        self, exits: Sequence[Exit], target: Target, bandit: ExitBandit | None = None
    ) -> None:
        assert bandit is not None or len(exits) == 1
        self._exits, self._bandit = exits, bandit
        self._table = PackedTable(target)
        self._proposals: dict[int, _Proposal] = {}  # by row

    def forget(self, row: int) -> None:
        self._proposals.pop(row, None)

    def observe(self, seen: Sequence[Seen], hidden_TH: torch.Tensor) -> None:
        """The drafts up to the first that is wrong are results of their exits. One that the head
        was not sure of, and which was not offered, counts as wrong: its time was spent."""
        for one in seen:
            made = self._proposals.pop(one.row, None)
            if made is not None and self._bandit is not None and made.position == one.first_drawn:
                self._learn(self._bandit, made, one.drawn)

    def _learn(self, bandit: ExitBandit, made: _Proposal, drawn: Sequence[int]) -> None:
        for number, exit_ in enumerate(made.exits[: made.num_made]):
            if number >= len(drawn):
                return  # its place was not computed
            is_right = made.drafts[number : number + 1] == [drawn[number]]
            bandit.add(number, exit_, is_right)
            if not is_right:
                return

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts, up to the end of a page: the last token and all drafts but the last
        are computed."""
        most = max((chain.most for chain in chains), default=0)
        exits = [0] * most if self._bandit is None else self._bandit.plan(most)
        going = [chain for chain in chains if chain.most and len(chain.tokens) > 1]
        nums_made = dict.fromkeys((chain.row for chain in going), 0)
        for number in exits:
            exit_ = self._exits[number]
            going = [
                chain
                for chain in going
                if exit_.layers.has_page(chain.position - 1, len(chain.tokens) - 1)
            ]
            if not going:
                break
            last = [chain.drafts[-1] if chain.drafts else int(chain.tokens[-1]) for chain in going]
            states_RH = exit_.states(
                [chain.row for chain in going], [chain.position - 1 for chain in going], last
            )
            for chain in going:
                nums_made[chain.row] += 1
            going = [going[i] for i in exit_.chooser.extend(self._table.logits(states_RH), going)]
        if self._bandit is not None:
            for chain in chains:
                num_made = nums_made.get(chain.row, 0)
                self._proposals[chain.row] = _Proposal(
                    len(chain.tokens), list(chain.drafts), num_made, exits
                )
