"""The attention of steps on a GPU, and states where layers have them: work lists, grids of kernels,
and what layers are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda import flash
from tidemill.kernels.cuda.attention_lists import (
    SPLIT,
    Lists,
    by_roles,
    num_prompt_programs,
    prompt_rows,
    shared_rows,
    single_rows,
)
from tidemill.kernels.cuda.scan import CudaStates, StateLists
from tidemill.kernels.flex_attention import FlexAttention, refused_if_not_compiled
from tidemill.kernels.kv_cache import PagedKV
from tidemill.layers.attention import AttentionStep
from tidemill.runner.cuda_graphs import Grid
from tidemill.runner.cuda_step import CudaStep, new_copies
from tidemill.runner.cuda_work import Work, make_work, state_sequences
from tidemill.runner.state import RowState
from tidemill.types.model_config import ModelConfig

if TYPE_CHECKING:
    from tidemill.runner.cuda_slots import CudaBatch

_SHARED_GRID = 128
_STATES_AT_ONCE = 32  # sequences of a step with prompts


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's tokens on the device, and where its metadata has the work lists of attention."""

    rows_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    metadata: torch.Tensor
    lists: torch.Tensor
    grid: Grid
    flash: bool = False


class Attention(Protocol):
    """The attention in graphs and in steps that are launched kernel by kernel."""

    variants: tuple[bool, ...]  # graphs with further lists (`GraphKey.has_lists`), and without
    captures_prompts: bool  # steps with prompts can be captured
    compiles_alone: bool  # its kernels are compiled without being run
    num_slots: int  # for partial results
    num_copies: int  # of pages of prompts

    def compiling(self) -> AbstractContextManager[None]:
        """Around whatever compiles it."""
        ...

    def decode_grid(self, size: int, shares: bool) -> Grid: ...
    def mixed_grid(self, size: int, has_decodes: bool, by_flash: bool = False) -> Grid: ...
    def work(self, batch: CudaBatch, by_flash: bool = False) -> Work:
        """The work of a step."""
        ...

    def work_of(self, tokens: np.ndarray) -> Work:
        """The work of some tokens, each on its own, that all yield logits: row, position, 1."""
        ...

    def step(self, tokens: StepTokens, work: Work | None) -> AttentionStep:
        """The step that layers are given. `work`: as `Step.run` has it."""
        ...


class ListAttention:
    """By our kernels."""

    captures_prompts = compiles_alone = True

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        kv: PagedKV,
        state: RowState,
        tables: list[np.ndarray],
        states: CudaStates | None,
    ) -> None:
        """`tables`: the host's page tables, of groups with keys and values."""
        device, group = state.tokens.device, shape.num_heads // max(1, shape.num_kv_heads)
        has_scales = kv.scales is not None
        self.kv, self.tables, self._state = kv, tables, state
        self._biases, self._states, self._max_draws = kv.by_distance(), states, config.max_draws
        self._numbers = (np.cumsum([spec.reads_tokens for spec in shape.layers]) - 1).tolist()
        self._has_attention, self._num_kv_heads = bool(shape.token_layers), shape.num_kv_heads
        self.variants: tuple[bool, ...] = (False, True) if shape.token_layers else (False,)
        self.warp_specialized = by_roles(kv.specs, has_scales) and config.kv_dtype != "int4"
        self._copies, self.num_copies = new_copies(config, shape, device, self.warp_specialized)
        self.at_once, self.members_per_tile, self.prompt_tile = (
            rows // max(1, group)
            for rows in (
                single_rows(group, has_scales),
                shared_rows(group),
                prompt_rows(group, self.warp_specialized),
            )
        )
        # A prompt that is cut in two may have two single tokens.
        self.num_slots = (config.max_draws + 1) * -(-config.max_context // SPLIT)
        width = shape.head_dim + 2
        self.partial = torch.empty(self.num_slots, shape.num_heads, width, device=device)
        size = config.token_budget, shape.num_kv_heads
        self.done = torch.zeros(size, dtype=torch.int32, device=device)

    def compiling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decode_grid(self, size: int, shares: bool) -> Grid:
        num_decode = _decode_grid(size) if self._has_attention else 0
        return Grid(num_decode, _SHARED_GRID if shares else 0, 0, size if self._states else 0)

    def mixed_grid(self, size: int, has_decodes: bool, by_flash: bool = False) -> Grid:
        decode = _decode_grid(min(size, self._max_draws)), _SHARED_GRID
        num_tiles = -(-size // self.prompt_tile)
        num_prompts = num_prompt_programs(num_tiles, self._num_kv_heads, self.warp_specialized)
        return Grid(
            *(decode if has_decodes else (0, 0)),
            flash.MOST_PROMPTS if by_flash else num_prompts,
            min(size, _STATES_AT_ONCE) if self._states else 0,
        )

    def work(self, batch: CudaBatch, by_flash: bool = False) -> Work:
        table = batch.table
        tile = flash.WHOLE if by_flash else self.prompt_tile
        work = self._make_work(table[:, :3], table[:, 3].astype(bool), tile)
        if self._states is not None:
            work.state_sequences = state_sequences(table[:, :3])
        return work

    def work_of(self, tokens: np.ndarray) -> Work:
        return self._make_work(tokens, np.ones(len(tokens), bool), self.prompt_tile)

    def _make_work(self, table: np.ndarray, samples: np.ndarray, tile: int) -> Work:
        tiles = self.members_per_tile, tile, self.at_once
        return make_work(table, samples, self.tables, *tiles, room=self.num_copies)

    def step(self, tokens: StepTokens, work: Work | None) -> AttentionStep:
        num, grid = tokens.rows_T.numel(), tokens.grid
        step = self.part_step(tokens, self.done)
        step.lists.alone, step.lists.copies = num == 1, self._copies
        if tokens.flash:
            step.lists.prompts = flash.Prompts.of(tokens.metadata, self._state.tables[0])
        if self._states is not None:
            about = tokens.rows_T, tokens.positions_T, tokens.metadata, grid.states
            step.states = self._states.step(StateLists(*about))
        return step

    def part_step(
        self, tokens: StepTokens, done: torch.Tensor, paths: torch.Tensor | None = None
    ) -> CudaStep:
        """The lists of a microbatch, or of drafts that are trees, each of which attends along its
        path."""
        grid = tokens.grid
        lists = Lists(
            tokens.metadata,
            tokens.lists,
            grid.decode,
            grid.shared,
            grid.prompts,
            self.partial,
            done,
            None,
            self.warp_specialized,
        )
        lists.paths = paths
        at = tokens.positions_T, tokens.slots_GT, self._numbers
        return CudaStep(self.kv, self._biases, lists, *at)


class FlexListAttention(ListAttention):
    """By torch's FlexAttention, where a layer's attention has something that our kernels have not."""

    compiles_alone = False  # torch's ops would read what was not computed

    def __init__(self, flex: FlexAttention, *about: Any) -> None:
        """`about`: as `ListAttention` has it."""
        super().__init__(*about)
        self._flex = flex

    def compiling(self) -> AbstractContextManager[None]:
        return refused_if_not_compiled()

    def step(self, tokens: StepTokens, work: Work | None) -> AttentionStep:
        return self._flex.step(tokens.rows_T, tokens.positions_T, tokens.slots_GT)


def _decode_grid(num_requests: int) -> int:
    """The grid for requests with one token each: for all their splits in a usual context, and for
    long ones of a few."""
    return max(2 * num_requests, min(64 * num_requests, 512))
