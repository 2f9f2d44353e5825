"""Drafts that are trees, on a GPU (see kernels/trees.py): where each lies, what it sees, and what
happens when the right ones are known. A draft is an entry of the step like a request of its own,
which reads its ancestors' keys by its record in `paths`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.trees import move_tokens
from tidemill.models.base import CausalLM
from tidemill.runner.base import accept, right_drafts
from tidemill.runner.cuda_attention import ListAttention, StepTokens
from tidemill.runner.cuda_graphs import Graph, Grid, Step, one_of_each_kind, uncaptured
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, Launched, Sampled, look_up_in
from tidemill.runner.cuda_work import Work, make_work
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.tree import ancestors_of, depths_of

_NEVER = 2**30  # a position that no key has


class CudaTrees:
    """The inputs beside the words that graphs of steps with trees read."""

    def __init__(self, num_tokens: int, max_drafts: int, device: torch.device) -> None:
        self.places = torch.zeros(
            num_tokens, dtype=torch.int32, device=device
        )  # in its row, of each token
        # From which position on keys are those of ancestors, and their places.
        self.paths = torch.full(
            (num_tokens, 1 + max_drafts), _NEVER, dtype=torch.int32, device=device
        )

    def write(
        self, items: Iterable[StepItem], table: np.ndarray, trees: Mapping[int, Sequence[int]]
    ) -> np.ndarray:
        """`table`: row, start and count of the step's entries, drafts one by one; starts of those
        of trees become their positions. Returns the position of each entry from which on keys are
        its own."""
        starts, counts = table[:, 1], table[:, 2]
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int32)
        bases, paths = (
            np.full(len(table), _NEVER, np.int32),
            np.full((places.size, self.paths.shape[1]), _NEVER, np.int32),
        )
        end = 0  # of the item's entries
        for item in items:
            end += 1 + item.num_drafts + (item.num_drafts > 0 and item.count > item.num_draws)
            parents = trees.get(item.row)
            if parents is None:
                continue
            base, first = item.start + item.count - item.num_drafts, end - item.num_drafts
            table[first:end, 1] = np.array(depths_of(parents)) + (base - 1)
            bases[first:end] = base
            for draft in range(item.num_drafts):
                path = [base, *(base + one for one in ancestors_of(parents, draft))]
                paths[ends[first + draft] - 1, : len(path)] = path
        self.places[: places.size].copy_(upload(places.astype(np.int32), self.places.device))
        self.paths[: places.size].copy_(upload(paths, self.paths.device))
        return bases


def settle(
    kv: PagedKV, state: RowState, tables: Sequence[np.ndarray], plan: StepPlan, drawn: Sequence[int]
) -> None:
    """Tokens, and keys and values of right drafts, go where the next step looks for them. `tables`:
    page tables of each KV group, on the host."""
    items = [item for item in plan.items if item.num_draws]
    paths = right_drafts(items, plan.drafts, plan.trees, drawn)
    tokens = accept(items, plan.drafts, drawn, paths)
    writes, moves = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for item in items:
        if item.row in paths:
            first = item.start + item.count - item.num_drafts
            writes += [(item.row, first + i, token) for i, token in enumerate(tokens[item.row])]
            moves += [
                (item.row, first + draft, first + i)
                for i, draft in enumerate(paths[item.row])
                if draft != i
            ]
    rows, positions, ids = upload(np.array(writes, np.int64).T.copy(), state.tokens.device)
    state.append(rows, positions, ids)
    if moves:
        owners, sources, targets = np.array(moves, np.int64).T
        move_tokens(kv, owners, sources, targets, tables)


class NoTrees:
    """Drafts are chains, in every step."""

    are_taken = False

    def launched(self, launched: Launched) -> None:
        return

    def collected(self, launched: Launched) -> None:
        return

    def settle(self) -> None:
        return


class TreeSteps:
    """A kind of step: some drafts are trees. It is a graph of its own where all sequences decode,
    and is launched kernel by kernel where prompts are among them."""

    are_taken = True

    def __init__(self, slots: CudaSlots, attention: ListAttention, trees: CudaTrees) -> None:
        self._slots, self._attention, self._trees = slots, attention, trees
        self.graphs: dict[int, Graph] = {}  # of decode steps, by size
        # A step whose right drafts are not yet where the next one reads them.
        self._unsettled: Launched | None = None

    def trials(self) -> list[Step]:
        slots = self._slots
        kinds = ((True, slots.decode_sizes), (False, slots.mixed_sizes))
        return [
            self.step(decodes, size) for decodes, sizes in kinds for size in one_of_each_kind(sizes)
        ]

    def capture(self) -> None:
        for size in reversed(self._slots.decode_sizes):
            self.graphs[size] = self._slots.graphs.capture(self.step(True, size), run_first=True)

    def step(self, decodes: bool, size: int) -> Step:
        slots, attention = self._slots, self._attention
        grid = (attention.decode_grid if decodes else attention.mixed_grid)(size, True)

        def run(work: Work | None = None, model: CausalLM | None = None) -> torch.Tensor:
            hidden_TH = slots.states.keep(self._forward(size, grid, model or slots.model))
            return slots.pick_all(hidden_TH, size) if decodes else hidden_TH

        return Step(size, grid, run)

    def _forward(self, size: int, grid: Grid, model: CausalLM) -> torch.Tensor:
        """Tokens lie at their places in the row, and are at their positions in the sequence."""
        slots, state = self._slots, self._slots.state
        rows_T, positions_T = slots.buffers.tokens_of(size)
        places_T = self._trees.places[:size]
        ids, at = look_up_in(state, rows_T, places_T)
        metadata, lists = slots.buffers.metadata, slots.buffers.lists_of(size)
        tokens = StepTokens(rows_T, positions_T, at, metadata, lists, grid)
        step = self._attention.part_step(tokens, self._attention.done, self._trees.paths)
        return slots.all_layers(model, ids, positions_T, step)

    def takes(self, batch: CudaBatch) -> bool:
        return bool(batch.plan.trees)

    def run(self, batch: CudaBatch) -> Sampled:
        slots, attention, table = self._slots, self._attention, batch.table
        bases = self._trees.write(batch.items, table, batch.plan.trees)
        tiles = attention.members_per_tile, attention.prompt_tile, 1
        work = make_work(table[:, :3], table[:, 3].astype(bool), attention.tables, *tiles, bases)
        num = work.rows.size
        if batch.decodes:
            graph = self.graphs[slots.decode_sizes[bisect_left(slots.decode_sizes, num)]]
            slots.replay(graph, work)
            return graph.out.clone(), slots.buffers.logits[:num]
        size = slots.mixed_sizes[bisect_left(slots.mixed_sizes, num)]
        graph = uncaptured(self.step(False, size), slots.buffers.hidden)
        return slots.finish_prefill(batch, size, slots.replay(graph, work))

    def launched(self, launched: Launched) -> None:
        self._unsettled = launched if launched.plan.trees else None

    def collected(self, launched: Launched) -> None:
        if launched is self._unsettled:
            self.settle()

    def settle(self) -> None:
        """A step with trees is waited for before anything else is launched: which drafts are right
        is not known before."""
        launched, self._unsettled = self._unsettled, None
        if launched is not None and launched.items:
            launched.ready.synchronize()
            drawn, attention = launched.tokens.tolist(), self._attention
            settle(attention.kv, self._slots.state, attention.tables, launched.plan, drawn)
