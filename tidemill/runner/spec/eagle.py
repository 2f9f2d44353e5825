"""EAGLE: drafts from the hidden states that those before them were guessed to have. A chain, or a
tree.

Every row has the layer's keys and values of its last tokens in a ring. Those of tokens that were
accepted since the last proposal are computed with the first draft. Those of a chain's drafts are
written there, too, and written over by the true ones; those of a tree's are kept with each draft,
which sees its ancestors alone. The shape of a tree is chosen as Medusa's (ranks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidemill.kernels.norm import add_rms_norm
from tidemill.runner.spec.choose import Chain, Chooser, Seen
from tidemill.runner.spec.heads import EPS, EagleHead, Target, normed, rotated
from tidemill.runner.spec.packed import PackedTable, pack
from tidemill.runner.spec.ranks import NUM_RANKS, Ranks, takes_trees
from tidemill.sched.tree import Tree
from tidemill.types.sampling import SamplingParams

_NOWHERE = 2**40  # the position of an empty place
_DEEPEST = 8  # tree


@dataclass(slots=True)
class _Proposal:
    """A tree that was proposed for a row, until the tokens drawn are known."""

    position: int  # of the first draft
    # after each draft that has any, and after the last known token (-1)
    candidates: dict[int, list[int]]
    children: dict[tuple[int, int], int]  # by parent and rank

    def ranks(self, drawn: Sequence[int]) -> list[int | None]:
        """The ranks of the tokens drawn, as long as those before them were drafts whose next ones
        were guessed."""
        made, at = list[int | None](), -1
        for token in drawn:
            known = self.candidates.get(at)
            if known is None:
                break
            made.append(known.index(token) if token in known else None)
            if made[-1] is None or (at, made[-1]) not in self.children:
                break
            at = self.children[at, made[-1]]
        return made


@dataclass(slots=True)
class _Level:
    """Drafts of one depth of all trees that others follow: whose, the states guessed after them,
    and keys and values of the path to each, [M, depth, N, D]."""

    chains: list[int]
    drafts: list[int]
    states_MH: torch.Tensor
    path: tuple[torch.Tensor, torch.Tensor] | None = None


class EagleDrafter:
    def __init__(
        self, head: EagleHead, target: Target, num_rows: int, least: float, trees: bool = False
    ) -> None:
        """`trees`: drafts are trees, for requests that allow it. `least`: of chains alone."""
        self._window, self._num_heads, self._head_dim = head.window, head.num_heads, head.head_dim
        self._target, self._inverse = target, head.inverse.to(target.device)
        names = ("fuse", "qkv", "out", "gate_up", "down")
        self._fuse, self._qkv, self._out, self._gate_up, self._down = (
            pack(target.own(getattr(head, name).weight)) for name in names
        )
        self._norm, self._mlp_norm, self._last_norm = map(
            target.own, (head.norm, head.mlp_norm, head.last_norm)
        )
        self._ones = target.zeros(target.hidden_size) + 1
        self._table = PackedTable(target)
        self._chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)
        shape = (num_rows, head.window, head.num_heads, head.head_dim)
        self._keys, self._values = target.zeros(*shape), target.zeros(*shape)
        self._positions = torch.full(shape[:2], _NOWHERE, device=target.device)
        # positions from, and states
        self._new: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(num_rows)]
        # positions from which states were observed without a gap, past the last
        self._ends = [-1] * num_rows
        self._ranks = Ranks(_DEEPEST) if trees else None
        self._proposals: dict[int, _Proposal] = {}  # by row

    def forget(self, row: int) -> None:
        self._new[row].clear()
        self._positions[row] = _NOWHERE
        self._ends[row] = -1
        self._proposals.pop(row, None)

    def observe(self, seen: Sequence[Seen], hidden_TH: torch.Tensor) -> None:
        if not seen:
            return
        kept_TH = hidden_TH[[at for one in seen for at in one.at[-self._window :]]]
        first = 0
        for one in seen:
            num = min(len(one.at), self._window)
            self._enter(one.row, one.start, one.end, kept_TH[first : first + num])
            first += num
            made = self._proposals.pop(one.row, None)
            if self._ranks is None:
                continue
            if made is None or made.position != one.first_drawn:
                self._ranks.fade()
                continue
            for depth, rank in enumerate(made.ranks(one.drawn)):
                self._ranks.add(depth, rank)

    def _enter(self, row: int, start: int, end: int, states_TH: torch.Tensor) -> None:
        """The states of the last positions of those from `start` to `end`."""
        if start != self._ends[row]:
            self.forget(row)
        new, window = self._new[row], self._window
        new.append((end - len(states_TH), states_TH))
        self._ends[row] = end
        while new[0][0] + len(new[0][1]) <= end - window:  # the ring has no place for them
            del new[0]
        if new[0][0] < end - window:
            first, states = new[0]
            new[0] = end - window, states[end - window - first :]

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
            if chain.most
            and self._ends[chain.row] == len(chain.tokens) - 1
            and self._new[chain.row]
        ]
        if self._ranks is not None:
            self._grow([chain for chain in going if takes_trees(chain.params)])
            going = [chain for chain in going if chain.tree is None]
        if not going:
            return
        states_RH = self._first(going)
        while True:
            kept = self._chooser.extend(self._table.logits(states_RH), going)
            if not kept:
                return
            going, states_RH = [going[i] for i in kept], states_RH[kept]
            ids = self._ints([chain.drafts[-1] for chain in going])
            # of the state before the last draft
            positions = self._ints([chain.position - 2 for chain in going])
            states_RH = self._step([chain.row for chain in going], ids, positions, states_RH)

    def _grow(self, chains: list[Chain]) -> None:
        """Level by level: the candidates after each draft that others follow."""
        if not chains:
            return
        assert self._ranks is not None
        shape = self._ranks.shape(max(chain.most for chain in chains))[0]
        children = {one: draft for draft, one in enumerate(shape)}
        after: dict[int, list[int]] = {}  # drafts that follow each
        for draft, (parent, _) in enumerate(shape):
            after.setdefault(parent, []).append(draft)
        proposals = [_Proposal(len(chain.tokens), {}, children) for chain in chains]
        tokens = [[0] * len(shape) for _ in chains]
        level, depth = _Level(list(range(len(chains))), [-1] * len(chains), self._first(chains)), 0
        while level.chains:
            owners = [chains[i] for i in level.chains]
            made = self._chooser.candidates(
                self._table.logits(level.states_MH), owners, depth, NUM_RANKS
            )
            for i, draft, candidates in zip(level.chains, level.drafts, made, strict=True):
                proposals[i].candidates[draft] = candidates
                for rank, token in enumerate(candidates):
                    if (draft, rank) in children:
                        tokens[i][children[draft, rank]] = token
            depth += 1
            level = self._next_level(chains, tokens, after, level, depth)
        for chain, proposal, own in zip(chains, proposals, tokens, strict=True):
            chain.tree = Tree(own[: chain.most], [parent for parent, _ in shape[: chain.most]])
            self._proposals[chain.row] = proposal

    def _next_level(
        self,
        chains: list[Chain],
        tokens: list[list[int]],
        after: dict[int, list[int]],
        level: _Level,
        depth: int,
    ) -> _Level:
        """The drafts after those of a level that have others after them, within what their chains
        may have."""
        sources, owners, drafts = list[int](), list[int](), list[int]()
        for source, (i, parent) in enumerate(zip(level.chains, level.drafts, strict=True)):
            for draft in after[parent]:
                if draft in after and after[draft][0] < chains[i].most:
                    sources.append(source)
                    owners.append(i)
                    drafts.append(draft)
        if not owners:
            return _Level([], [], level.states_MH)
        ids = self._ints([tokens[i][draft] for i, draft in zip(owners, drafts, strict=True)])
        # positions from which on states are guessed
        firsts = self._ints([len(chains[i].tokens) - 1 for i in owners])
        path = None if level.path is None else (level.path[0][sources], level.path[1][sources])
        rows = [chains[i].row for i in owners]
        states_MH, path = self._branch(rows, ids, firsts, depth - 1, level.states_MH[sources], path)
        return _Level(owners, drafts, states_MH, path)

    def _branch(
        self,
        rows: list[int],
        ids_M: torch.Tensor,
        firsts_M: torch.Tensor,
        behind: int,
        states_MH: torch.Tensor,
        path: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The same as `_step`, for drafts that see the ring up to `firsts_M` and their own paths,
        and enter nothing. `behind`: how far after that they are."""
        positions_M = firsts_M + behind
        x, q, k, v = self._projected(ids_M, positions_M, states_MH)
        keys, values = k.unsqueeze(1), v.unsqueeze(1)
        if path is not None:
            keys, values = torch.cat([path[0], keys], 1), torch.cat([path[1], values], 1)
        at_MW = self._positions[rows]
        is_seen = (at_MW < firsts_M.unsqueeze(1)) & (
            positions_M.unsqueeze(1) - at_MW < self._window
        )
        is_seen = torch.cat([is_seen, is_seen.new_ones(len(rows), keys.shape[1])], 1)
        own = torch.cat([self._keys[rows], keys], 1), torch.cat([self._values[rows], values], 1)
        return self._after(x, q, *own, is_seen), (keys, values)

    def _first(self, chains: list[Chain]) -> torch.Tensor:
        """All that was observed enters the rings; the states guessed after the last of each row,
        [R, H]."""
        owners, ids, positions, states = list[int](), list[int](), list[int](), list[torch.Tensor]()
        lasts = []
        for chain in chains:
            for start, states_TH in self._new[chain.row]:
                end = start + len(states_TH)
                positions += range(start, end)
                states.append(states_TH)
                ids += chain.tokens[start + 1 : end + 1]
                owners += [chain.row] * len(states_TH)
            lasts.append(len(owners) - 1)
            self._new[chain.row].clear()
        return self._step(owners, self._ints(ids), self._ints(positions), torch.cat(states), lasts)

    def _step(
        self,
        rows: list[int],
        ids_M: torch.Tensor,
        positions_M: torch.Tensor,
        states_MH: torch.Tensor,
        lasts: list[int] | None = None,
    ) -> torch.Tensor:
        """Enter keys and values; the states guessed after those numbered `lasts`."""
        x, q, k, v = self._projected(ids_M, positions_M, states_MH)
        places = (self._ints(rows), positions_M % self._window)
        self._keys[places], self._values[places], self._positions[places] = k, v, positions_M
        if lasts is not None:
            rows, x, q, positions_M = (
                [rows[i] for i in lasts],
                x[lasts],
                q[lasts],
                positions_M[lasts],
            )
        before_RW = positions_M.unsqueeze(1) - self._positions[rows]
        is_seen = (before_RW >= 0) & (before_RW < self._window)
        return self._after(x, q, self._keys[rows], self._values[rows], is_seen)

    def _projected(
        self, ids_M: torch.Tensor, positions_M: torch.Tensor, states_MH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The input of the layer, and the queries, keys and values of it, [M, N, D]."""
        embedded_MH = self._target.embed(ids_M)
        x = self._fuse(
            torch.cat(
                [self._normed(embedded_MH, self._ones), self._normed(states_MH, self._ones)], -1
            )
        )
        parts = self._qkv(self._normed(x, self._norm)).unflatten(
            -1, (3, self._num_heads, self._head_dim)
        )
        q, k, v = parts.unbind(1)
        return x, self._rotated(q, positions_M), self._rotated(k, positions_M), v

    def _after(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        keys_RWND: torch.Tensor,
        values_RWND: torch.Tensor,
        is_seen_RW: torch.Tensor,
    ) -> torch.Tensor:
        """The rest of the layer: attention to these keys, and the MLP."""
        scores_RWN = (q.unsqueeze(1) * keys_RWND).sum(
            -1, dtype=torch.float32
        ) * self._head_dim**-0.5
        weights_RWN = (
            scores_RWN.masked_fill(~is_seen_RW.unsqueeze(-1), -torch.inf).softmax(1).to(x.dtype)
        )
        x = x + self._out((weights_RWN.unsqueeze(-1) * values_RWND).sum(1).flatten(1))
        gate, up = self._gate_up(self._normed(x, self._mlp_norm)).chunk(2, -1)
        return self._normed(x + self._down(F.silu(gate) * up), self._last_norm)

    def _rotated(self, x_MND: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        return rotated(x_MND, positions_M, self._inverse).to(x_MND.dtype)

    def _normed(self, x_MH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        if x_MH.is_cuda:  # drafts need not be exact: torch's own, which is not compiled first
            return normed(x_MH, weight_H)
        return add_rms_norm(None, x_MH.contiguous(), weight_H, EPS)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._target.device)
