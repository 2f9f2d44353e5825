"""EAGLE: a chain of drafts, each from the hidden state that the one before it was guessed to have.

Every row has the layer's keys and values of its last tokens in a ring. Those of tokens that were accepted since the last proposal
are computed with the first draft; those of drafts are written over by the true ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.kernels.norm import add_rms_norm
from tidemill.runner.spec.choose import Chain, Chooser
from tidemill.runner.spec.heads import EPS, EagleHead, Target
from tidemill.runner.spec.packed import PackedTable, pack

_NOWHERE = 2**40  # the position of an empty place


class EagleDrafter:
    def __init__(self, head: EagleHead, target: Target, num_rows: int, least: float) -> None:
        self._head, self._target = head, target
        names = ("fuse", "qkv", "out", "gate_up", "down")
        self._fuse, self._qkv, self._out, self._gate_up, self._down = (
            pack(getattr(head, name).weight.detach()) for name in names
        )
        self._ones = torch.ones(target.hidden_size)
        self._table = PackedTable(target)
        self._chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)
        shape = (num_rows, head.window, head.num_heads, head.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._positions = torch.full(shape[:2], _NOWHERE)
        self._new: list[list[tuple[int, torch.Tensor, list[int]]]] = [[] for _ in range(num_rows)]
        self._ends = [-1] * num_rows  # positions from which states were observed without a gap, past the last

    def forget(self, row: int) -> None:
        self._new[row].clear()
        self._positions[row] = _NOWHERE
        self._ends[row] = -1

    def observe(self, row: int, start: int, states_TH: torch.Tensor, next_ids: list[int]) -> None:
        """The states at positions `start` on that are right, and the tokens that follow each."""
        if start != self._ends[row]:
            self.forget(row)
        num, window, new = min(len(next_ids), self._head.window), self._head.window, self._new[row]
        new.append((start + len(next_ids) - num, states_TH[-num:].clone(), next_ids[-num:]))
        self._ends[row] = end = start + len(next_ids)
        while new[0][0] + len(new[0][2]) <= end - window:  # the ring has no place for them
            del new[0]
        if new[0][0] < end - window:
            first, states, ids = new[0]
            num = end - window - first
            new[0] = first + num, states[num:], ids[num:]

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts. A row of which something was not observed gets none."""
        going = [
            chain for chain in chains if chain.most and self._ends[chain.row] == len(chain.tokens) - 1 and self._new[chain.row]
        ]
        if not going:
            return
        states_RH = self._first([chain.row for chain in going])
        while True:
            kept = self._chooser.extend(self._table.logits(states_RH), going)
            if not kept:
                return
            going, states_RH = [going[i] for i in kept], states_RH[kept]
            ids = torch.tensor([chain.drafts[-1] for chain in going])
            positions = torch.tensor([chain.position - 2 for chain in going])  # of the state before the last draft
            states_RH = self._step([chain.row for chain in going], ids, positions, states_RH)

    def _first(self, rows: list[int]) -> torch.Tensor:
        """All that was observed enters the rings; the states guessed after the last of each row, [R, H]."""
        owners, ids, starts, states = list[int](), list[int](), list[torch.Tensor](), list[torch.Tensor]()
        lasts = []
        for row in rows:
            num = 0
            for start, states_TH, next_ids in self._new[row]:
                starts.append(torch.arange(start, start + len(next_ids)))
                states.append(states_TH)
                ids += next_ids
                num += len(next_ids)
            owners += [row] * num
            lasts.append(len(owners) - 1)
            self._new[row].clear()
        return self._step(owners, torch.tensor(ids), torch.cat(starts), torch.cat(states), lasts)

    def _step(
        self,
        rows: list[int],
        ids_M: torch.Tensor,
        positions_M: torch.Tensor,
        states_MH: torch.Tensor,
        lasts: list[int] | None = None,
    ) -> torch.Tensor:
        """Enter keys and values; the states guessed after those numbered `lasts`."""
        head = self._head
        x = self._fuse(torch.cat([self._normed(self._target.embed(ids_M), self._ones), self._normed(states_MH, self._ones)], -1))
        q, k, v = self._qkv(self._normed(x, head.norm)).unflatten(-1, (3, head.num_heads, head.head_dim)).unbind(1)
        q, k = head.rotated(q, positions_M), head.rotated(k, positions_M)
        places = (torch.tensor(rows), positions_M % head.window)
        self._keys[places], self._values[places], self._positions[places] = k, v, positions_M
        if lasts is not None:
            rows, x, q, positions_M = [rows[i] for i in lasts], x[lasts], q[lasts], positions_M[lasts]
        before_RW = positions_M.unsqueeze(1) - self._positions[rows]
        is_seen = (before_RW >= 0) & (before_RW < head.window)
        scores_RWN = (q.unsqueeze(1) * self._keys[rows]).sum(-1) * head.head_dim**-0.5
        weights_RWN = scores_RWN.masked_fill(~is_seen.unsqueeze(-1), -torch.inf).softmax(1)
        x = x + self._out((weights_RWN.unsqueeze(-1) * self._values[rows]).sum(1).flatten(1))
        gate, up = self._gate_up(self._normed(x, head.mlp_norm)).chunk(2, -1)
        return self._normed(x + self._down(F.silu(gate) * up), head.last_norm)

    def _normed(self, x_MH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(None, x_MH.contiguous(), weight_H, EPS)
