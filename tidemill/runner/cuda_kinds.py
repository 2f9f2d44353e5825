"""The two kinds of steps that every engine on a GPU has: one in which every sequence decodes, and
one with prompts among them.

A step in which every sequence decodes is one replay of a CUDA graph, from token lookup to the
sampled token in its row; a step with prompts replays one up to hidden states, or to the last
layer's keys and values (cuda_last.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda import flash
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_attention import ListAttention
from tidemill.runner.cuda_graphs import Graph, GraphKey, Step, one_of_each_kind, uncaptured
from tidemill.runner.cuda_last import AllLayers, LastLayerApart
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, Sampled
from tidemill.runner.cuda_work import Work
from tidemill.runner.flash_trial import FROM_TOKENS, Candidates, FlashTrial, run_trial


class Mixed:
    """Steps with prompts; any step can be computed so."""

    def __init__(self, slots: CudaSlots, last: AllLayers | LastLayerApart) -> None:
        """`last`: how the last layer is computed."""
        self._slots, self.last, self.sizes = slots, last, slots.mixed_sizes
        self.graphs: dict[GraphKey, Graph] = {}
        self.has_flash = False  # long prompts have graphs by flash-attn-4

    def _keys(self, sizes: Iterable[int]) -> list[GraphKey]:
        slots = self._slots
        return [
            GraphKey(size, has_decodes, lora)
            for size in sizes
            for lora in slots.adapters.variants
            for has_decodes in slots.attention.variants
        ]

    def trials(self) -> list[Step]:
        return [self.step(key) for key in self._keys(one_of_each_kind(self.sizes))]

    def step(self, key: GraphKey) -> Step:
        grid = self._slots.attention.mixed_grid(key.size, key.has_lists, key.flash)
        forward = self.last.forward_of(key.size)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            hidden_TH = self._slots.forward(key, grid, work, forward, model)
            return self._slots.buffers.hidden[: key.size].copy_(hidden_TH)

        return Step(key.size, grid, run)

    def capture(self) -> None:
        slots = self._slots
        for key in self._keys(reversed(self.sizes)):
            step = self.step(key)
            if slots.attention.captures_prompts:
                self.graphs[key] = slots.graphs.capture(step)
            else:
                self.graphs[key] = uncaptured(step, slots.buffers.hidden)

    def takes(self, batch: CudaBatch) -> bool:
        return True

    def by_flash(self, batch: CudaBatch) -> bool:
        """Tells if its prompts are flash-attn-4's: few of them, and long."""
        if not self.has_flash or batch.has_lora or batch.num_tokens < FROM_TOKENS:
            return False
        return bool((batch.table[:, 2] > 1).sum() <= flash.MOST_PROMPTS)

    def run(self, batch: CudaBatch) -> Sampled:
        by_flash = self.by_flash(batch)
        work = self._slots.attention.work(batch, by_flash)
        size = self.sizes[bisect_left(self.sizes, work.rows.size)]
        graph = self.graphs[GraphKey(size, work.has_singles, batch.has_lora, by_flash)]
        where = self._slots.replay(graph, work, batch.has_lora)
        return self.last.finish(batch, work, graph, where, by_flash)


class Decode:
    """Steps in which every sequence decodes."""

    def __init__(self, slots: CudaSlots) -> None:
        self._slots, self.sizes = slots, slots.decode_sizes
        self.graphs: dict[GraphKey, Graph] = {}

    def _keys(self, sizes: Iterable[int]) -> list[GraphKey]:
        slots = self._slots
        return [
            GraphKey(size, shares, lora)
            for size in sizes
            for lora in slots.adapters.variants
            for shares in slots.attention.variants
        ]

    def trials(self) -> list[Step]:
        return [self.step(key) for key in self._keys(one_of_each_kind(self.sizes))]

    def step(self, key: GraphKey) -> Step:
        slots, grid = self._slots, self._slots.attention.decode_grid(key.size, key.has_lists)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            hidden_TH = slots.states.keep(slots.forward(key, grid, work, model=model))
            return slots.pick_all(hidden_TH, key.size)

        return Step(key.size, grid, run)

    def capture(self) -> None:
        for key in self._keys(reversed(self.sizes)):
            self.graphs[key] = self._slots.graphs.capture(self.step(key))

    def takes(self, batch: CudaBatch) -> bool:
        return batch.decodes

    def run(self, batch: CudaBatch) -> Sampled:
        work = self._slots.attention.work(batch)
        size = self.sizes[bisect_left(self.sizes, work.rows.size)]
        graph = self.graphs[GraphKey(size, work.shares, batch.has_lora)]
        self._slots.replay(graph, work, batch.has_lora)
        # The next replay writes over the tokens.
        return graph.out.clone(), self._slots.buffers.logits[: work.rows.size]


class NoFlash:
    """Prompts are for our kernel."""

    def __init__(self, why: str) -> None:
        self.trial = FlashTrial(False, why)


class FlashPrompts:
    """Graphs of steps with long prompts by flash-attn-4, where a trial finds that faster."""

    def __init__(
        self, slots: CudaSlots, attention: ListAttention, mixed: Mixed, config: EngineConfig
    ) -> None:
        self._slots, self._attention, self._mixed = slots, attention, mixed
        self._config = config
        self.trial = FlashTrial(False, "not tried yet")

    def trials(self) -> list[Step]:
        return []

    def capture(self) -> None:
        mixed, slots, config = self._mixed, self._slots, self._config
        size = mixed.sizes[-1]
        self.trial = run_trial(
            Candidates(
                slots.state,
                config.num_pages,
                config.max_context,
                slots.model.config.vocab_size,
                size,
                mixed.graphs[GraphKey(size, False)],
                self._attention.prompt_tile,
                lambda: self._capture(GraphKey(size, False, flash=True)),
                slots.replay,
                slots.buffers.hidden,
            )
        )
        slots.buffers.metadata.zero_()  # a graph is captured with no work to do
        if self.trial.is_taken:
            self.take()

    def take(self) -> None:
        mixed = self._mixed
        mixed.has_flash = True
        for size in mixed.sizes[bisect_left(mixed.sizes, FROM_TOKENS) :]:
            for has_decodes in (False, True):
                key = GraphKey(size, has_decodes, flash=True)
                mixed.graphs[key] = self._capture(key)

    def _capture(self, key: GraphKey) -> Graph:
        return self._slots.graphs.capture(self._mixed.step(key), run_first=True)
