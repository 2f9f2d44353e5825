"""A model's first layers by themselves, on a GPU: early exits draft with them."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from tidemill.models.base import CausalLM
from tidemill.runner.cuda_attention import ListAttention
from tidemill.runner.cuda_graphs import GraphKey, Step
from tidemill.runner.cuda_slots import CudaSlots
from tidemill.runner.cuda_work import Work, make_work
from tidemill.runner.state import upload


class CudaFirstLayers:
    """On a runner's cache and rows (spec/exit.py): a graph for each number of rows."""

    def __init__(self, slots: CudaSlots, num_layers: int) -> None:
        """While no sequence is in the cache."""
        assert isinstance(slots.attention, ListAttention)
        self._slots, self._attention = slots, slots.attention
        self._first = slots.model.only(range(num_layers))
        self._state, self._sizes = slots.state, slots.decode_sizes
        num_words = slots.buffers.metadata.numel()
        self._staging = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        with torch.inference_mode():
            self._out = torch.zeros_like(slots.buffers.hidden[: self._sizes[-1]])
            self._graphs = {
                size: slots.graphs.capture(self._step(size), run_first=True)
                for size in reversed(self._sizes)
            }

    def _step(self, size: int) -> Step:
        slots, key = self._slots, GraphKey(size, True)
        grid = self._attention.decode_grid(size, True)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            hidden_TH = slots.forward(key, grid, work, model=model or self._first)
            return self._out[:size].copy_(hidden_TH)

        return Step(size, grid, run)

    def has_page(self, position: int, num_computed: int) -> bool:
        """The same as `FirstLayers.has_page`."""
        return position // self._state.page_size == (num_computed - 1) // self._state.page_size

    def __call__(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        """A token of each row, at its position: states after the last norm, [R, H]. Those of the
        call before are read by now."""
        tokens, buffers, attention = self._state.tokens, self._slots.buffers, self._attention
        self._state.append(*upload(np.array([rows, positions, ids], np.int64), tokens.device))
        table = np.array([rows, positions, [1] * len(rows)], np.int32).T.copy()
        tiles = attention.members_per_tile, attention.prompt_tile
        work = make_work(table, np.ones(len(rows), bool), attention.tables, *tiles)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, len(rows))]]
        staging, row = self._staging.numpy(), buffers.padding_row
        end = work.write(staging, graph.size, row, graph.grid) + work.last.size
        buffers.metadata[:end].copy_(self._staging[:end], non_blocking=True)
        graph.replay(work)
        return self._out[: len(rows)]
