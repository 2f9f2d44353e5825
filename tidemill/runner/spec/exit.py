"""Early exit: the target's own first layers draft, with their keys and values in the target's cache.

What they write there, the step that verifies the drafts writes again, with the same bits where a draft is right.
Where there are several exits, a bandit chooses one for each draft (bandit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.mixers import Mixers
from tidemill.kernels.native.program import Program
from tidemill.models.base import Model
from tidemill.runner.graphs import record_forward
from tidemill.runner.spec.bandit import ExitBandit
from tidemill.runner.spec.choose import Chain, Chooser
from tidemill.runner.spec.heads import ExitHead, Target
from tidemill.runner.spec.packed import PackedTable, pack
from tidemill.runner.state import RowState


class FirstLayers:
    """The model's first layers on a runner's cache and rows."""

    def __init__(self, model: Model, mixers: Mixers, cache: torch.Tensor, state: RowState, num_layers: int) -> None:
        """Made before any sequence is in the cache."""
        self._model, self._mixers, self._state, self._num_layers = model, mixers, state, num_layers
        self._program: Program | None = None
        if native.lib and mixers.are_native:
            with model.only_layers(range(num_layers)):
                self._program = record_forward(model, mixers, cache)

    def has_page(self, position: int, num_computed: int) -> bool:
        """It lies in the page of the last token computed. The row's table may still name later ones that it has given back."""
        return position // self._state.page_size == (num_computed - 1) // self._state.page_size

    def __call__(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        """A token of each row, at its position: states after the last norm, [R, H]."""
        at, ids_T, ones = np.array(positions), torch.tensor(ids), np.ones(len(rows), np.int64)
        pages, offsets = at // self._state.page_size, at % self._state.page_size
        tables = [table.numpy()[rows, pages].astype(np.int64) for table in self._state.kv_tables]
        slots_GT = torch.from_numpy(np.array([pages_R * self._state.page_size + offsets for pages_R in tables], np.int64))
        step = self._mixers.plan(np.array(rows), at, ones, torch.from_numpy(at), slots_GT)
        embedded_TH = self._model.embed_at(ids_T, torch.from_numpy(at), None)
        if self._program is not None:
            return step.replay(self._program, embedded_TH)
        with self._model.only_layers(range(self._num_layers)):
            return self._model(embedded_TH, step)


class Exit:
    """The first layers and the head after them."""

    def __init__(self, head: ExitHead, target: Target, layers: FirstLayers, least: float) -> None:
        self.layers, self._scale = layers, head.scale.detach()
        self._down, self._up = pack(head.down.weight.detach()), pack(head.up.weight.detach())
        self.chooser = Chooser(target.ids_D, target.model.config.vocab_size, least)

    def states(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        states_RH = self.layers(rows, positions, ids)
        return states_RH * self._scale + self._up(F.silu(self._down(states_RH)))


@dataclass(slots=True)
class _Proposal:
    """What was proposed for a row, until the tokens drawn are known."""

    position: int  # of the first draft
    drafts: list[int]
    num_made: int  # one more than there are drafts, where the head was not sure of the last
    exits: list[int]  # of each


class ExitDrafter:
    """`exits`: from the first to the deepest; with more than one, `bandit` chooses among them."""

    def __init__(self, exits: Sequence[Exit], target: Target, bandit: ExitBandit | None = None) -> None:
        assert bandit is not None or len(exits) == 1
        self._exits, self._bandit = exits, bandit
        self._table = PackedTable(target)
        self._proposals: dict[int, _Proposal] = {}  # by row

    def forget(self, row: int) -> None:
        self._proposals.pop(row, None)

    def observe(self, row: int, start: int, states_TH: torch.Tensor, next_ids: list[int]) -> None:
        """The drafts up to the first that is wrong are results of their exits. One that the head was not sure of, and which was
        not offered, counts as wrong: its time was spent."""
        made = self._proposals.pop(row, None)
        first = -1 if made is None else made.position - start - 1
        if made is None or self._bandit is None or not 0 <= first < len(next_ids):
            return
        for number, exit_ in enumerate(made.exits[: made.num_made]):
            if first + number >= len(next_ids):
                return  # its place was not computed
            is_right = made.drafts[number : number + 1] == [next_ids[first + number]]
            self._bandit.add(number, exit_, is_right)
            if not is_right:
                return

    @torch.inference_mode()
    def propose(self, chains: list[Chain]) -> None:
        """Fill their drafts, up to the end of a page: the last token and all drafts but the last are computed."""
        most = max((chain.most for chain in chains), default=0)
        exits = [0] * most if self._bandit is None else self._bandit.plan(most)
        going = [chain for chain in chains if chain.most and len(chain.tokens) > 1]
        nums_made = dict.fromkeys((chain.row for chain in going), 0)
        for number in exits:
            exit_ = self._exits[number]
            going = [chain for chain in going if exit_.layers.has_page(chain.position - 1, len(chain.tokens) - 1)]
            if not going:
                break
            last = [chain.drafts[-1] if chain.drafts else int(chain.tokens[-1]) for chain in going]
            states_RH = exit_.states([chain.row for chain in going], [chain.position - 1 for chain in going], last)
            for chain in going:
                nums_made[chain.row] += 1
            going = [going[i] for i in exit_.chooser.extend(self._table.logits(states_RH), going)]
        if self._bandit is not None:
            for chain in chains:
                num_made = nums_made.get(chain.row, 0)
                self._proposals[chain.row] = _Proposal(len(chain.tokens), list(chain.drafts), num_made, exits)
