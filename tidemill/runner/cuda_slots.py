"""The slots that kinds of steps on a GPU are made of, and what they all do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from tidemill.kernels.cuda.look_up import look_up
from tidemill.kernels.cuda.sampling import pick_tokens
from tidemill.layers.attention import AttentionStep
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_attention import Attention, StepTokens
from tidemill.runner.cuda_buffers import StepBuffers
from tidemill.runner.cuda_graphs import Graph, GraphKey, GraphPool, Grid, NoGraphs, Step
from tidemill.runner.cuda_sampler import score
from tidemill.runner.cuda_work import Work, parts
from tidemill.runner.reports import Report, look_at_prompt
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepItem, StepPlan

# A model's layers, all or some, from ids and positions of a step's tokens.
ForwardFn = Callable[[CausalLM, torch.Tensor, torch.Tensor, Any], torch.Tensor]
Sampled = tuple[
    torch.Tensor | None, torch.Tensor | None
]  # tokens and logits, in the order of draws
EmbedFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CudaBatch:
    """The items of a step, and what kinds of steps ask about them."""

    def __init__(self, plan: StepPlan, state: RowState, adapters: Adapters) -> None:
        self.plan, self.items, self.reports = plan, plan.items, list[Report]()
        self.has_lora = adapters.are_used_by(plan.items)
        self.asks_prompt = any(map(state.asks_prompt, plan.items))
        self.decodes = not self.asks_prompt and all(
            item.samples and item.count == item.num_draws for item in plan.items
        )
        self.num_tokens = sum([item.count for item in plan.items])

    @cached_property
    def table(self) -> np.ndarray:
        """[n, 4] row, start, count, samples: drafts are entries of their own (`parts`)."""
        return np.array([part for item in self.items for part in parts(item)], np.int32)


@dataclass(slots=True)
class Launched:
    plan: StepPlan
    items: list[StepItem]  # that draw
    tokens: torch.Tensor  # drawn for them: pinned, valid once `ready` has passed
    reports: list[Report]
    ready: torch.cuda.Event
    hidden: torch.Tensor  # of its tokens, if somebody reads them


class Adapters(Protocol):
    """The adapters of a step's tokens."""

    variants: tuple[bool, ...]  # graphs without and with them

    def are_used_by(self, items: Sequence[StepItem]) -> bool: ...
    def write(self, rows: np.ndarray, size: int) -> None:
        """Writes which token of a step has which, for steps with adapters."""
        ...

    def forward(self, forward: ForwardFn) -> ForwardFn:
        """The same forward pass with what they add."""
        ...


class NoAdapters:
    variants: tuple[bool, ...] = (False,)

    def are_used_by(self, items: Sequence[StepItem]) -> bool:
        return False

    def write(self, rows: np.ndarray, size: int) -> None:
        return

    def forward(self, forward: ForwardFn) -> ForwardFn:
        return forward


class RowAdapters:
    variants: tuple[bool, ...] = (False, True)

    def __init__(self, loras: CudaLoras, state: RowState) -> None:
        self._loras, self._state = loras, state

    def are_used_by(self, items: Sequence[StepItem]) -> bool:
        return any(self._state.adapters[item.row] >= 0 for item in items)

    def write(self, rows: np.ndarray, size: int) -> None:
        self._loras.write(self._state.adapters[rows], size)

    def forward(self, forward: ForwardFn) -> ForwardFn:
        return self._loras.forward(forward)


class StatesDropped:
    """Hidden states of a step, of which nobody reads more than logits need."""

    gives_all = False
    _none = torch.empty(0)

    def keep(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return hidden_TH

    def of(self, plan: StepPlan) -> torch.Tensor:
        """Those of a step that is launched."""
        return self._none


class StatesKept:
    """Hidden states of a step that trained heads look at."""

    gives_all = True

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def keep(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return self._hidden[: hidden_TH.shape[0]].copy_(hidden_TH)

    def of(self, plan: StepPlan) -> torch.Tensor:
        return self._hidden[: plan.num_tokens].clone()


def look_up_in(
    state: RowState, rows_T: torch.Tensor, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens' ids and their places in each group's pages. An id less than zero is the number of
    a row of embeddings."""
    tables, page_size = state.kv_tables, state.page_size
    ids, slots = look_up(rows_T, positions_T, state.tokens, tables, page_size)
    return with_inputs(state, rows_T, positions_T, ids), slots


def with_inputs(
    state: RowState, rows_T: torch.Tensor, positions_T: torch.Tensor, ids_T: torch.Tensor
) -> torch.Tensor:
    """The ids, where there are rows of embeddings their numbers, as `look_up_in` returns them."""
    if state.inputs is None:
        return ids_T
    inputs = state.inputs[rows_T.long(), positions_T.long()]
    return torch.where(inputs > 0, -inputs, ids_T)


@dataclass(slots=True)
class CudaSlots:
    model: CausalLM
    state: RowState
    buffers: StepBuffers
    attention: Attention
    adapters: Adapters
    states: StatesDropped | StatesKept
    graphs: GraphPool | NoGraphs
    decode_sizes: list[int]
    mixed_sizes: list[int]
    embed: EmbedFn  # the hidden states that the first layer here starts from

    def all_layers(
        self, model: CausalLM, ids_T: torch.Tensor, positions_T: torch.Tensor, step: Any
    ) -> torch.Tensor:
        hidden: torch.Tensor = model(self.embed(ids_T, positions_T), step)
        return hidden

    def forward(
        self,
        key: GraphKey,
        grid: Grid,
        work: Work | None,
        forward: ForwardFn | None = None,
        model: CausalLM | None = None,
    ) -> torch.Tensor:
        """The hidden states of a step's tokens. `forward`: not through all layers. `model`: with
        only some of them."""
        rows_T, positions_T = self.buffers.tokens_of(key.size)
        state, buffers = self.state, self.buffers
        ids, slots = look_up_in(state, rows_T, positions_T)
        lists = buffers.lists_of(key.size)
        tokens = StepTokens(rows_T, positions_T, slots, buffers.metadata, lists, grid, key.flash)
        step: AttentionStep = self.attention.step(tokens, work)
        forward = forward or self.all_layers
        compute = self.adapters.forward(forward) if key.lora else forward
        return compute(model or self.model, ids, positions_T, step)

    def pick(
        self,
        hidden_SH: torch.Tensor,
        index_S: torch.Tensor,
        tokens: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Logits to where they stay until the next step, a token for each into its row. `tokens`:
        rows and positions; `index_S`: which of them."""
        logits = self.model.logits(hidden_SH, self.buffers.logits[: hidden_SH.shape[0]])
        state = self.state
        return pick_tokens(logits, index_S, *tokens, state.draws, state.tokens)

    def pick_all(self, hidden_TH: torch.Tensor, size: int) -> torch.Tensor:
        """A token for each of a step's."""
        return self.pick(hidden_TH, self.buffers.numbers[:size], self.buffers.tokens_of(size))

    def replay(self, graph: Graph, work: Work, has_lora: bool = False) -> tuple[int, int]:
        """Returns where in the metadata the tokens stand that yield logits."""
        if has_lora:
            self.adapters.write(work.rows, graph.size)
        where = self.buffers.write(work, graph.size, graph.grid)
        graph.replay(work)
        return where

    def finish_prefill(self, batch: CudaBatch, size: int, where: tuple[int, int]) -> Sampled:
        """From the hidden states of a step: what is asked about prompts, and draws. `where`: as
        `StepBuffers.write` has it."""
        (begin, end), first, buffers = where, 0, self.buffers
        for item in batch.items:
            if self.state.asks_prompt(item):
                hidden = buffers.hidden[first : first + item.count]
                about = self.model, self.state, item, hidden, score, buffers.logits
                batch.reports.append(look_at_prompt(*about))
            first += item.count
        if begin == end:
            return None, None
        last = buffers.metadata[begin:end]
        tokens = self.pick(buffers.hidden[last], last, buffers.tokens_of(size))
        return tokens, buffers.logits[: end - begin]


class Captured(Protocol):
    """Graphs that are captured at start."""

    def trials(self) -> list[Step]:
        """Steps that use every kernel of theirs."""
        ...

    def capture(self) -> None: ...


class StepKind(Protocol):
    """A kind of step: which it takes, and how it computes them. The first of a runner's that takes
    a step computes it."""

    def takes(self, batch: CudaBatch) -> bool: ...
    def run(self, batch: CudaBatch) -> Sampled: ...
