"""Medusa: all drafts of a row at once, from the hidden state that its last token was drawn from. A
chain, or a tree.

Head d has candidates of its own for the token d places on: the tokens of rank 0, 1, ... by its
logits. Which combinations are worth a place in the tree is known from how often the token drawn had
which rank (ranks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidemill.runner.spec.choose import Chain, Chooser, Seen
from tidemill.runner.spec.heads import MedusaHeads, Target
from tidemill.runner.spec.packed import PackedTable, pack
from tidemill.runner.spec.ranks import NUM_RANKS, Ranks, takes_trees
from tidemill.sched.tree import Tree, depths_of
from tidemill.types.sampling import SamplingParams


@dataclass(slots=True)
class _Proposal:
    position: int  # of the first draft
    candidates: list[list[int]]  # by head


class MedusaDrafter:
    def __init__(
        self, head: MedusaHeads, target: Target, num_rows: int, least: float, trees: bool = False
    ) -> None:
        """`trees`: drafts are trees, for requests that allow it. `least`: of chains alone."""
        self._blocks = [
            pack(target.own(block.weight), target.own(block.bias))  # type: ignore[arg-type, union-attr]
            for block in head.blocks
        ]
        self._table = PackedTable(target)
        self._chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)
        self._states_RH = target.zeros(num_rows, target.hidden_size)
        self._ends = [-1] * num_rows  # tokens of the row that its state has seen
        self._ranks = Ranks(len(self._blocks)) if trees else None
        self._proposals: dict[int, _Proposal] = {}  # by row

    def forget(self, row: int) -> None:
        self._ends[row] = -1
        self._proposals.pop(row, None)

    def observe(self, seen: Sequence[Seen], hidden_TH: torch.Tensor) -> None:
        if seen:
            self._states_RH[[one.row for one in seen]] = hidden_TH[[one.at[-1] for one in seen]]
        for one in seen:
            self._ends[one.row] = one.end
            made = self._proposals.pop(one.row, None)
            if self._ranks is None:
                continue
            if made is None or made.position != one.first_drawn:
                self._ranks.fade()
                continue
            for head, (token, known) in enumerate(zip(one.drawn, made.candidates, strict=False)):
                self._ranks.add(head, known.index(token) if token in known else None)

    def chances(self, params: SamplingParams, most: int) -> Sequence[float] | None:
        """The chance of each draft of a tree to be right; None: drafts would be a chain."""
        return (
            self._ranks.shape(most)[1] if self._ranks is not None and takes_trees(params) else None
        )

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts. A row of which something was not observed gets none."""
        going = [
            chain
            for chain in chains
            if chain.most and self._ends[chain.row] == len(chain.tokens) - 1
        ]
        if self._ranks is not None:
            self._grow([chain for chain in going if takes_trees(chain.params)])
            going = [chain for chain in going if chain.tree is None]
        states_RH = self._states_RH[[chain.row for chain in going]]
        for block in self._blocks:
            if not going:
                return
            kept = self._chooser.extend(
                self._table.logits(states_RH + F.silu(block(states_RH))), going
            )
            going, states_RH = [going[i] for i in kept], states_RH[kept]

    def _grow(self, chains: list[Chain]) -> None:
        if not chains:
            return
        assert self._ranks is not None
        states_RH = self._states_RH[[chain.row for chain in chains]]
        by_head = [
            self._chooser.candidates(
                self._table.logits(states_RH + F.silu(block(states_RH))), chains, number, NUM_RANKS
            )
            for number, block in enumerate(self._blocks)
        ]
        shape = self._ranks.shape(max(chain.most for chain in chains))[0]
        parents = [parent for parent, _ in shape]
        heads = [depth - 1 for depth in depths_of(parents)]
        for i, chain in enumerate(chains):
            candidates = [of_head[i] for of_head in by_head]
            tokens = [candidates[head][rank] for head, (_, rank) in zip(heads, shape, strict=True)]
            chain.tree = Tree(tokens[: chain.most], parents[: chain.most])
            self._proposals[chain.row] = _Proposal(len(chain.tokens), candidates)
