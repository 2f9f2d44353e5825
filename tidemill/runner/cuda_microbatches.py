"""Steps on a GPU in two microbatches that run beside each other, for the sizes at which a trial
finds them faster, or for all if that is asked for."""

from __future__ import annotations

from bisect import bisect_left

import torch

from tidemill.config import EngineConfig
from tidemill.distributed.group import Group
from tidemill.kernels.cuda.lanes import Lanes
from tidemill.kernels.cuda.records import HEADER
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_attention import ListAttention, StepTokens
from tidemill.runner.cuda_buffers import WRITES_IN_FLIGHT, pinned
from tidemill.runner.cuda_graphs import Graph, GraphKey, Grid, Step, microbatches
from tidemill.runner.cuda_kinds import Decode, Mixed
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, Sampled, look_up_in
from tidemill.runner.cuda_work import Work, make_microbatches
from tidemill.runner.nano import Candidates, NanoTrial, run_trials


class NoMicrobatches:
    """Steps are computed whole."""

    def __init__(self) -> None:
        self.made, self.cuts = list[NanoTrial](), dict[tuple[bool, int], int]()


class Microbatches:
    def __init__(
        self,
        slots: CudaSlots,
        attention: ListAttention,
        kinds: tuple[Mixed, Decode],
        config: EngineConfig,
        pool: torch.Tensor,
        group: Group,
    ) -> None:
        """`kinds`: the same steps in one. `pool`: of pages."""
        self._slots, self._attention, (self._mixed, self._decode) = slots, attention, kinds
        self._config, self._pool, self._group = config, pool, group
        self.made = list[NanoTrial]()
        # By (decodes, size): how many tokens are in the first.
        self.cuts: dict[tuple[bool, int], int] = {}
        self.graphs: dict[tuple[bool, GraphKey], Graph] = {}
        metadata = slots.buffers.metadata
        self._second_metadata = torch.zeros_like(metadata)
        num_words = metadata.numel()
        self._staging = [pinned(num_words, torch.int32) for _ in range(WRITES_IN_FLIGHT)]
        self._stream = torch.cuda.Stream()

    def trials(self) -> list[Step]:
        return []

    def capture(self) -> None:
        slots, config = self._slots, self._config
        kinds = ((True, self._decode.sizes), (False, self._mixed.sizes))
        cuts = {
            (decodes, size): cut
            for decodes, sizes in kinds
            for size, cut in microbatches(sizes).items()
        }
        taken = set(cuts)

        def make(decodes: bool, key: GraphKey) -> Graph:
            slots.buffers.metadata.zero_()  # a graph is captured with no work to do
            self._second_metadata.zero_()
            step = self.step(decodes, key, cuts[decodes, key.size])
            return slots.graphs.capture(step, run_first=True)

        if config.nano_batching == "auto":
            decode, mixed = self._decode, self._mixed
            whole = {(True, size): decode.graphs[GraphKey(size, False)] for size in decode.sizes}
            whole |= {(False, size): mixed.graphs[GraphKey(size, True)] for size in mixed.sizes}
            attention = self._attention
            candidates = Candidates(
                slots.state,
                self._pool,
                config.max_context,
                slots.model.config.vocab_size,
                slots.buffers.padding_row,
                whole,
                lambda decodes, size: make(decodes, GraphKey(size, not decodes)),
                self.replay,
                slots.buffers.hidden,
                cuts,
                (attention.members_per_tile, attention.prompt_tile, attention.at_once),
                self._group,
            )
            self.made, taken = run_trials(candidates)
        for decodes, size in sorted(taken, reverse=True):
            for has_lists in self._attention.variants:
                key = GraphKey(size, has_lists)
                self.graphs[decodes, key] = make(decodes, key)
            self.cuts[decodes, size] = cuts[decodes, size]

    def step(self, decodes: bool, key: GraphKey, cut: int) -> Step:
        """The metadata has the tokens of both, and lists of the first."""
        slots, attention, size = self._slots, self._attention, key.size
        grid_of = attention.decode_grid if decodes else attention.mixed_grid
        first, second = (grid_of(num, key.has_lists) for num in (cut, size - cut))
        forward = slots.all_layers if decodes else self._mixed.last.forward_of(size)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            rows, positions = slots.buffers.tokens_of(size)

            def half(
                part: slice, grid: Grid, metadata: torch.Tensor, lists: torch.Tensor
            ) -> torch.Tensor:
                state, at = slots.state, (rows[part], positions[part])
                ids, places = look_up_in(state, *at)
                tokens = StepTokens(*at, places, metadata, lists, grid)
                step = attention.part_step(tokens, attention.done[part])
                return forward(model or slots.model, ids, positions[part], step)

            metadata, more = slots.buffers.metadata, self._second_metadata
            both = Lanes(self._stream).run(
                lambda: half(slice(cut), first, metadata, slots.buffers.lists_of(size)),
                lambda: half(slice(cut, size), second, more, more[HEADER:]),
            )
            if decodes:
                return slots.pick_all(torch.cat(both), size)
            return torch.cat(both, out=slots.buffers.hidden[:size])

        return Step(size, first, run, second)

    def cut_of(self, batch: CudaBatch) -> int:
        """The number of tokens in the first microbatch of a step; 0: it is not cut."""
        num, sizes = batch.num_tokens, (self._decode if batch.decodes else self._mixed).sizes
        cut = self.cuts.get((batch.decodes, sizes[bisect_left(sizes, num)]), 0)
        return cut if num > cut else 0

    def takes(self, batch: CudaBatch) -> bool:
        if batch.has_lora or batch.asks_prompt or not self.cut_of(batch):
            return False
        return not self._mixed.by_flash(batch)

    def run(self, batch: CudaBatch) -> Sampled:
        attention, table = self._attention, batch.table
        kind = self._decode if batch.decodes else self._mixed
        tiles = attention.members_per_tile, attention.prompt_tile, attention.at_once
        samples = table[:, 3].astype(bool)
        cut = self.cut_of(batch)
        work = make_microbatches(table[:, :3], samples, cut, attention.tables, *tiles)
        num = work.rows.size
        size = kind.sizes[bisect_left(kind.sizes, num)]
        has_lists = work.shares if batch.decodes else work.has_singles
        graph = self.graphs[batch.decodes, GraphKey(size, has_lists)]
        where = self.replay(graph, work)
        if batch.decodes:
            # The next replay writes over the tokens.
            return graph.out.clone(), self._slots.buffers.logits[:num]
        return self._mixed.last.finish(batch, work, graph, where, by_flash=False)

    def replay(self, graph: Graph, work: Work) -> tuple[int, int]:
        """Replays the graph of a step, with the work of the second microbatch, if there is one."""
        buffers = self._slots.buffers
        where = buffers.write(work, graph.size, graph.grid)
        if work.second_half is not None:
            staging = self._staging[buffers.turn]
            target, row = staging.numpy(), buffers.padding_row
            num = work.second_half.write(target, 0, row, graph.second_grid)
            self._second_metadata[:num].copy_(staging[:num], non_blocking=True)
        graph.replay(work)
        return where
