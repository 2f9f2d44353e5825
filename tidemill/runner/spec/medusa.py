"""Medusa: all drafts of a row at once, from the hidden state that its last token was drawn from."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.runner.spec.choose import Chain, Chooser
from tidemill.runner.spec.heads import MedusaHeads, Target
from tidemill.runner.spec.packed import PackedTable, pack


class MedusaDrafter:
    def __init__(self, head: MedusaHeads, target: Target, num_rows: int, least: float) -> None:
        self._blocks = [pack(block.weight.detach(), block.bias.detach()) for block in head.blocks]  # type: ignore[union-attr, operator]
        self._table = PackedTable(target)
        self._chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)
        self._states_RH = torch.zeros(num_rows, target.hidden_size)
        self._ends = [-1] * num_rows  # tokens of the row that its state has seen

    def forget(self, row: int) -> None:
        self._ends[row] = -1

    def observe(self, row: int, start: int, states_TH: torch.Tensor, next_ids: list[int]) -> None:
        """The states at positions `start` on that are right, and the tokens that follow each."""
        self._states_RH[row] = states_TH[-1]
        self._ends[row] = start + len(next_ids)

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts. A row of which something was not observed gets none."""
        going = [chain for chain in chains if chain.most and self._ends[chain.row] == len(chain.tokens) - 1]
        states_RH = self._states_RH[[chain.row for chain in going]]
        for block in self._blocks:
            if not going:
                return
            kept = self._chooser.extend(self._table.logits(states_RH + F.silu(block(states_RH))), going)
            going, states_RH = [going[i] for i in kept], states_RH[kept]
