"""A model's first layers by themselves, on a CPU: early exits draft with them."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.mixers import Mixers
from tidemill.kernels.native.program import Program
from tidemill.models.base import Model
from tidemill.runner.graphs import record_forward
from tidemill.runner.state import RowState


class FirstLayers:
    """On a runner's cache and rows (spec/exit.py has its callers)."""

    def __init__(
        self, model: Model, mixers: Mixers, cache: torch.Tensor, state: RowState, num_layers: int
    ) -> None:
        """Made before any sequence is in the cache."""
        self._model, self._mixers, self._state = model.only(range(num_layers)), mixers, state
        self._program: Program | None = None
        if native.lib and mixers.are_native:
            self._program = record_forward(self._model, mixers, cache)

    def has_page(self, position: int, num_computed: int) -> bool:
        return position // self._state.page_size == (num_computed - 1) // self._state.page_size

    def __call__(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        at, ids_T, ones = np.array(positions), torch.tensor(ids), np.ones(len(rows), np.int64)
        pages, offsets = at // self._state.page_size, at % self._state.page_size
        tables = [table.numpy()[rows, pages].astype(np.int64) for table in self._state.kv_tables]
        slots_GT = torch.from_numpy(
            np.array([pages_R * self._state.page_size + offsets for pages_R in tables], np.int64)
        )
        step = self._mixers.plan(np.array(rows), at, ones, torch.from_numpy(at), slots_GT)
        embedded_TH = self._model.embed_at(ids_T, torch.from_numpy(at), None)
        if self._program is not None:
            return step.replay(self._program, embedded_TH)
        return self._model(embedded_TH, step)
