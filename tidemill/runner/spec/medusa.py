"""Medusa: all drafts of a row at once, from the hidden state that its last token was drawn from. A chain, or a tree.

Head d has candidates of its own for the token d places on: the tokens of rank 0, 1, ... by its logits. Which combinations are
worth a place in the tree is known from how often the token drawn had which rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import torch
import torch.nn.functional as F

from tidemill.runner.spec.choose import Chain, Chooser
from tidemill.runner.spec.heads import MedusaHeads, Target
from tidemill.runner.spec.packed import PackedTable, pack
from tidemill.sampling import SamplingParams
from tidemill.sched.tree import Tree

_NUM_RANKS = 4
_FADE = 0.995  # weight of older ranks with each new one
_PRIOR = (0.4, 0.12, 0.06, 0.03)  # how often the token drawn has each rank, before any was seen, and what that counts for:
_PRIOR_WEIGHT = 8.0


class Ranks:
    """How often the token drawn had which rank among a head's candidates, of those whose tokens before it were all right."""

    def __init__(self, num_heads: int) -> None:
        self._counts = [[0.0] * _NUM_RANKS for _ in range(num_heads)]
        self._totals = [0.0] * num_heads

    def add(self, head: int, rank: int | None) -> None:
        """None: it was no candidate."""
        self._fade(head)
        self._totals[head] += 1
        if rank is not None:
            self._counts[head][rank] += 1

    def fade(self) -> None:
        """A token came without drafts: after some time there may be some again."""
        for head in range(len(self._totals)):
            self._fade(head)

    def _fade(self, head: int) -> None:
        self._counts[head] = [count * _FADE for count in self._counts[head]]
        self._totals[head] *= _FADE

    def chance(self, head: int, rank: int) -> float:
        return (self._counts[head][rank] + _PRIOR_WEIGHT * _PRIOR[rank]) / (self._totals[head] + _PRIOR_WEIGHT)

    def shape(self, most: int) -> tuple[list[tuple[int, int]], list[float]]:
        """The likeliest tree of so many drafts, likelier ones first: parent and rank of each, and how likely each is right."""
        made, chances = list[tuple[int, int]](), list[float]()
        heads = list[int]()  # of each draft
        open_ = [(-self.chance(0, rank), -1, rank) for rank in range(_NUM_RANKS)]
        heapify(open_)
        while open_ and len(made) < most:
            chance, parent, rank = heappop(open_)
            made.append((parent, rank))
            chances.append(-chance)
            heads.append(0 if parent < 0 else heads[parent] + 1)
            head = heads[-1] + 1
            if head < len(self._counts):
                for next_rank in range(_NUM_RANKS):
                    heappush(open_, (chance * self.chance(head, next_rank), len(made) - 1, next_rank))
        return made, chances


@dataclass(slots=True)
class _Proposal:
    position: int  # of the first draft
    candidates: list[list[int]]  # by head


class MedusaDrafter:
    def __init__(self, head: MedusaHeads, target: Target, num_rows: int, least: float, trees: bool = False) -> None:
        """`trees`: drafts are trees, for requests that allow it. `least`: of chains alone."""
        self._blocks = [pack(block.weight.detach(), block.bias.detach()) for block in head.blocks]  # type: ignore[union-attr, operator]
        self._table = PackedTable(target)
        self._chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)
        self._states_RH = torch.zeros(num_rows, target.hidden_size)
        self._ends = [-1] * num_rows  # tokens of the row that its state has seen
        self._ranks = Ranks(len(self._blocks)) if trees else None
        self._proposals: dict[int, _Proposal] = {}  # by row

    def forget(self, row: int) -> None:
        self._ends[row] = -1
        self._proposals.pop(row, None)

    def observe(self, row: int, start: int, states_TH: torch.Tensor, next_ids: list[int]) -> None:
        """The states at positions `start` on that are right, and the tokens that follow each."""
        self._states_RH[row] = states_TH[-1]
        self._ends[row] = start + len(next_ids)
        made = self._proposals.pop(row, None)
        if made is not None and self._ranks is not None and start < made.position <= start + len(next_ids):
            for head, (token, known) in enumerate(zip(next_ids[made.position - start - 1 :], made.candidates, strict=False)):
                self._ranks.add(head, known.index(token) if token in known else None)
        elif self._ranks is not None:
            self._ranks.fade()

    def chances(self, params: SamplingParams, most: int) -> Sequence[float] | None:
        """How likely each draft of a tree is right; None: drafts would be a chain."""
        return self._ranks.shape(most)[1] if self._ranks is not None and _takes_trees(params) else None

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts. A row of which something was not observed gets none."""
        going = [chain for chain in chains if chain.most and self._ends[chain.row] == len(chain.tokens) - 1]
        if self._ranks is not None:
            self._grow([chain for chain in going if _takes_trees(chain.params)])
            going = [chain for chain in going if chain.tree is None]
        states_RH = self._states_RH[[chain.row for chain in going]]
        for block in self._blocks:
            if not going:
                return
            kept = self._chooser.extend(self._table.logits(states_RH + F.silu(block(states_RH))), going)
            going, states_RH = [going[i] for i in kept], states_RH[kept]

    def _grow(self, chains: list[Chain]) -> None:
        if not chains:
            return
        assert self._ranks is not None
        states_RH = self._states_RH[[chain.row for chain in chains]]
        by_head = [
            self._chooser.candidates(self._table.logits(states_RH + F.silu(block(states_RH))), chains, number, _NUM_RANKS)
            for number, block in enumerate(self._blocks)
        ]
        shape = self._ranks.shape(max(chain.most for chain in chains))[0]
        parents, heads = [parent for parent, _ in shape], list[int]()
        for parent in parents:
            heads.append(0 if parent < 0 else heads[parent] + 1)
        for i, chain in enumerate(chains):
            candidates = [of_head[i] for of_head in by_head]
            tokens = [candidates[head][rank] for head, (_, rank) in zip(heads, shape, strict=True)]
            chain.tree = Tree(tokens[: chain.most], parents[: chain.most])
            self._proposals[chain.row] = _Proposal(len(chain.tokens), candidates)


def _takes_trees(params: SamplingParams) -> bool:
    """What is drawn depends on the tokens before it through the model alone: other stages look at a row's tokens."""
    return not params.has_penalties and not params.bad_word_ids and not params.has_masks
