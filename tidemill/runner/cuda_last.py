"""The last layer of a step with prompts, on a GPU: of most of a prompt's tokens only keys and
values are ever read.

A graph of many tokens ends with the last layer's keys and values. The tokens that yield logits then
go through that layer as those of a decode step do, in a graph of their own, up to the sampled
tokens. Their bits are the same: no kernel's depend on the batch. Their keys and values are written
a second time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import torch

from tidemill.models.base import CausalLM
from tidemill.runner.cuda_graphs import Graph, GraphKey, Grid, Step, one_of_each_kind
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, ForwardFn, Sampled
from tidemill.runner.cuda_step import CudaStep
from tidemill.runner.cuda_work import Work

# of a graph: below, a layer takes as long as reading its weights, and they would be read twice
FROM_TOKENS = 512


class AllLayers:
    """Every token of a step with prompts goes through all layers."""

    def __init__(self, slots: CudaSlots) -> None:
        self._slots = slots

    def forward_of(self, size: int) -> ForwardFn:
        """The forward pass that a graph of so many tokens has."""
        return self._slots.all_layers

    def finish(
        self, batch: CudaBatch, work: Work, graph: Graph, where: tuple[int, int], by_flash: bool
    ) -> Sampled:
        """The end of a step whose graph was replayed. `where`: as `StepBuffers.write` has it."""
        return self._slots.finish_prefill(batch, graph.size, where)


class LastLayerApart(AllLayers):
    """In steps of many tokens, only those that yield logits go through the last layer."""

    def __init__(self, slots: CudaSlots) -> None:
        super().__init__(slots)
        self._large = [size for size in slots.mixed_sizes if size >= FROM_TOKENS]
        self.sizes = slots.decode_sizes if self._large else []
        hidden = slots.buffers.hidden
        # What the layer starts from, of tokens that are read.
        self.entered = hidden.new_zeros(slots.decode_sizes[-1], hidden.shape[1])
        self.graphs: dict[GraphKey, Graph] = {}

    def forward_of(self, size: int) -> ForwardFn:
        return self._write_kv if size in self._large else self._slots.all_layers

    def _write_kv(
        self, model: CausalLM, ids_T: torch.Tensor, positions_T: torch.Tensor, step: CudaStep
    ) -> torch.Tensor:
        slots = self._slots
        return model.enter(slots.embed(ids_T, positions_T), step)

    def _keys(self, sizes: Iterable[int]) -> list[GraphKey]:
        variants = self._slots.adapters.variants
        return [GraphKey(size, True, lora) for size in sizes for lora in variants]

    def trials(self) -> list[Step]:
        few = [self.step(key) for key in self._keys(one_of_each_kind(self.sizes))]
        return few + [self._all_rows_step(key) for key in self._keys(one_of_each_kind(self._large))]

    def capture(self) -> None:
        for key in self._keys(reversed(self.sizes)):
            self.graphs[key] = self._slots.graphs.capture(self.step(key))

    def step(self, key: GraphKey) -> Step:
        slots = self._slots
        grid = slots.attention.decode_grid(key.size, key.has_lists)._replace(states=0)
        entered_TH = self.entered[: key.size]

        def last_layer(
            model: CausalLM, ids_T: torch.Tensor, positions_T: torch.Tensor, step: CudaStep
        ) -> torch.Tensor:
            return model.finish(entered_TH, step)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            return slots.pick_all(slots.forward(key, grid, work, last_layer, model), key.size)

        return Step(key.size, grid, run)

    def finish(
        self, batch: CudaBatch, work: Work, graph: Graph, where: tuple[int, int], by_flash: bool
    ) -> Sampled:
        if graph.size not in self._large:
            return super().finish(batch, work, graph, where, by_flash)
        if not batch.asks_prompt:
            return self.sample(work, where, batch.has_lora)
        key = GraphKey(graph.size, True, batch.has_lora, by_flash)
        self._all_rows(key, graph.grid)  # somebody reads them
        return super().finish(batch, work, graph, where, by_flash)

    def sample(self, work: Work, where: tuple[int, int], has_lora: bool) -> Sampled:
        """Tokens and logits of the tokens that are read. `work`: of the whole step."""
        (begin, end), slots = where, self._slots
        num, buffers = end - begin, slots.buffers
        if not num:
            return None, None
        read = buffers.metadata[begin:end]
        torch.index_select(buffers.hidden, 0, read, out=self.entered[:num])
        graph = self.graphs[GraphKey(self.sizes[bisect_left(self.sizes, num)], True, has_lora)]
        ones = np.ones(num, np.int32)
        tokens = np.stack([work.rows[work.last], work.positions[work.last], ones], axis=1)
        slots.replay(graph, slots.attention.work_of(tokens), has_lora)
        return graph.out.clone(), buffers.logits[:num]  # the next replay writes over the tokens

    def _all_rows_step(self, key: GraphKey) -> Step:
        grid = self._slots.attention.mixed_grid(key.size, key.has_lists)
        return Step(key.size, grid, lambda work=None, model=None: self._all_rows(key, grid, model))

    def _all_rows(self, key: GraphKey, grid: Grid, model: CausalLM | None = None) -> torch.Tensor:
        """The last layer for all tokens, kernel by kernel."""
        slots, entered_TH = self._slots, self._slots.buffers.hidden[: key.size]

        def last_layer(
            model: CausalLM, ids_T: torch.Tensor, positions_T: torch.Tensor, step: CudaStep
        ) -> torch.Tensor:
            return model.finish(entered_TH, step)

        return entered_TH.copy_(slots.forward(key, grid, None, last_layer, model))
