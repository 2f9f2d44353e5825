"""CudaEncoder: executes the StepPlans of an encoder on a GPU.

An encoder computes an input whole, in one step, and draws no token: a step needs nothing of those
before it. So its tokens, positions, page tables and tiles of attention are gathered on the host and
copied over in one go. Then one CUDA graph is replayed, up to the hidden states of its tokens,
padded to a few sizes, and these are pooled for all inputs at once. The next step is gathered
meanwhile.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.attention_lists import Lists, num_prompt_programs, prompt_rows
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.cuda.pooling import pool
from tidemill.kernels.cuda.records import HEADER, PROMPT_WIDTH, PROMPTS
from tidemill.kernels.flex_attention import FlexAttention, refused_if_not_compiled
from tidemill.kernels.kv_cache import PagedKV, attention_specs
from tidemill.models.base import Model
from tidemill.runner.base import StepResult
from tidemill.runner.batch import Batch, gather_batch
from tidemill.runner.cuda_graphs import Graph, Grid, Step, capture, one_of_each_kind, sizes
from tidemill.runner.cuda_step import CudaStep
from tidemill.runner.cuda_work import Work, padded, prompts
from tidemill.runner.page_moves import PageMover
from tidemill.runner.reports import to_host
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepPlan
from tidemill.types.coverage import uncovered

_STEPS_IN_FLIGHT = 2


@dataclass(slots=True)
class Launched:
    rows: list[int]
    pooled: torch.Tensor  # pinned, valid once `ready` has passed
    each: dict[int, torch.Tensor]  # the same, of rows that ask for the states of each token
    ready: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Words:
    """The offsets in a step's words of 32 bits: first what each token has, then what each input
    has, then the tiles of attention. A slot has two words."""

    size: int  # tokens
    max_requests: int
    table_width: int

    @property
    def slots(self) -> int:
        return HEADER + 4 * padded(self.size)

    @property
    def ends(self) -> int:
        return self.slots + 2 * padded(self.size)

    @property
    def tables(self) -> int:
        return self.ends + padded(self.max_requests)

    @property
    def tiles(self) -> int:
        return self.tables + self.max_requests * self.table_width

    def of_tokens(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Ids, positions, numbers of the inputs, and types."""
        return [words[at : at + self.size] for at in range(HEADER, self.slots, padded(self.size))]

    def write(
        self,
        batch: Batch,
        table: np.ndarray,
        tiles: np.ndarray,
        num_programs: int,
        target: np.ndarray,
    ) -> int:
        """`table`: of the inputs. Returns the end."""
        num, num_requests = batch.ids_T.shape[0], batch.rows.size
        target[: self.tiles] = 0
        target[PROMPTS] = self.tiles
        types = 0 if batch.types_T is None else batch.types_T.numpy()
        own = (
            batch.ids_T.numpy(),
            batch.positions_T.numpy(),
            np.repeat(np.arange(num_requests), batch.counts),
            types,
        )
        for at, values in zip(range(HEADER, self.slots, padded(self.size)), own, strict=True):
            target[at : at + num] = values
        target[self.slots : self.slots + 2 * num].view(np.int64)[:] = batch.slots_GT[0].numpy()
        target[self.ends : self.ends + num_requests] = batch.counts
        target[self.tables : self.tables + num_requests * self.table_width] = table.reshape(-1)
        end = self.tiles + tiles.size
        target[self.tiles : end] = tiles.reshape(-1)
        target[end : end + 2 * num_programs * tiles.shape[1]] = 0
        return end + 2 * num_programs * tiles.shape[1]


class CudaEncoder:
    steps_ahead = 1
    loras = None
    mover: PageMover | None = None

    @torch.inference_mode()
    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model, shape = model, model.config
        device = self._device = torch.device("cuda")
        self.state = RowState(
            config.max_requests, config.max_context, config.page_size, groups=config.layout.groups
        )
        self._max_requests, self._table_width = config.max_requests, self.state.tables[0].shape[1]
        self._last_type = max(shape.num_token_types - 1, 0)
        self._sizes = sizes(
            config.token_budget, ((64, 16), (256, 32), (1024, 64), (2048, 128), (16384, 256))
        )
        self._tile = prompt_rows(shape.num_heads // shape.num_kv_heads, by_roles=False) // (
            shape.num_heads // shape.num_kv_heads
        )
        most = self._words_of(config.token_budget).tiles
        most += PROMPT_WIDTH.value * (
            self._num_tiles(config.token_budget) + 2 * self._num_programs(config.token_budget)
        )
        self._words = torch.zeros(most, dtype=torch.int32, device=device)
        self._staging = [
            torch.empty(most, dtype=torch.int32, pin_memory=True)
            for _ in range(_STEPS_IN_FLIGHT + 1)
        ]
        self._turn = 0
        cache = torch.zeros(
            config.num_pages + 1, config.layout.layers_per_page, 2, shape.num_kv_heads, config.page_size, shape.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        self.cache = cache
        self._hidden = torch.empty(
            config.token_budget, shape.hidden_size, dtype=torch.bfloat16, device=device
        )
        angles, biases = (
            model.angles(config.max_context, device),
            model.distance_biases(config.max_context),
        )
        self._kv_of = lambda table: PagedKV(
            cache, [table], attention_specs(shape.layers), angles, config.layout.places, biases
        )
        kv = self._kv_of(self._words[: self._table_width].view(1, -1))
        self._biases = kv.by_distance()
        missing = uncovered("Triton", shape.token_layers)
        self._uses_flex = bool(missing)
        self.fallback = (
            f"{missing}; torch's FlexAttention computes it, several times slower" if missing else ""
        )
        self._copies = torch.cuda.Stream()
        with refused_if_not_compiled() if missing else nullcontext():
            self.compile()
        memory = torch.cuda.graph_pool_handle()
        self.graphs = {
            size: capture(self._step(size), memory, run_first=bool(missing))
            for size in reversed(self._sizes)
        }
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()

    def _words_of(self, size: int) -> _Words:
        return _Words(size, self._max_requests, self._table_width)

    def _num_tiles(self, size: int) -> int:
        """At most, in a step of so many tokens."""
        return size // self._tile + self._max_requests

    def _num_programs(self, size: int) -> int:
        num_tiles = -(-size // self._tile)
        return num_prompt_programs(num_tiles, self.model.config.num_kv_heads, by_roles=False)

    def _step(self, size: int) -> Step:
        words, grid = self._words_of(size), Grid(0, 0, self._num_programs(size), 0)

        def run(work: Work | None = None, model: Model | None = None) -> torch.Tensor:
            ids, positions, numbers, types = words.of_tokens(self._words)
            slots = self._words[words.slots : words.ends].view(torch.int64)[None, :size]
            ends = self._words[words.ends : words.ends + self._max_requests]
            table = self._words[words.tables : words.tiles].view(self._max_requests, -1)
            kv, layers = self._kv_of(table), model or self.model
            embedded = layers.embed_at(ids, positions, types)
            if self._uses_flex:
                made = layers(
                    embedded, FlexAttention(kv).step(numbers, positions, slots, ends[numbers])
                )
            else:
                lists = Lists(
                    self._words, self._words, *grid[:3], self._hidden, self._words, ends=ends
                )
                made = layers(embedded, CudaStep(kv, self._biases, lists, positions, slots))
            return self._hidden[:size].copy_(made)

        return Step(size, grid, run)

    def compile(self) -> None:
        """Every kernel, in parallel processes; then each runs once, which loads it."""
        nums_rows = set(self._sizes)
        steps = [self._step(size) for size in one_of_each_kind(self._sizes)]
        few_layers = self.model.one_layer_of_each_kind()
        with compile_elsewhere(), compile_only():
            # torch's ops would read what was not computed
            for step in steps if not self._uses_flex else ():
                step.run(model=few_layers)
            self._pool(np.zeros((self._max_requests, 2), np.int32))
            few_layers.compile(nums_rows)
        self.model.prepare(nums_rows)
        self._pool(np.zeros((self._max_requests, 2), np.int32))
        for step in steps:
            step.run(model=few_layers)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    # ---- a step

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        if plan.page_zeroes:
            self.cache[upload(np.array(plan.page_zeroes, np.int64), self._device)] = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.state.stage(plan)
        self.state.apply()
        self.change_pages(plan)
        batch = gather_batch(plan.items, self.state)
        if batch.types_T is not None:
            batch.types_T.clamp_(max=self._last_type)  # an index past a table would stop the GPU
        graph = self.graphs[self._sizes[bisect_left(self._sizes, batch.ids_T.shape[0])]]
        self._replay(graph, batch)
        pooled, each = self._pool(self._spans(batch)), self._each(batch)
        ready = torch.cuda.Event()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            made = to_host(pooled[: batch.rows.size])
            states = {row: to_host(one) for row, one in each.items()}
            ready.record()
        return Launched(batch.rows.tolist(), made, states, ready)

    def collect(self, launched: Launched) -> StepResult:
        """A sequence of which something is not a number fails: its token is -1."""
        launched.ready.synchronize()
        made = launched.pooled.numpy()
        by_row = dict(zip(launched.rows, made, strict=True)) | {
            row: one.numpy() for row, one in launched.each.items()
        }
        return StepResult(
            {row: [0 if np.isfinite(one).all() else -1] for row, one in by_row.items()},
            pooled=by_row,
        )

    def _replay(self, graph: Graph, batch: Batch) -> None:
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]  # of a step that is collected by now
        firsts = batch.last_token + 1 - batch.counts
        tiles = prompts(np.arange(batch.rows.size), batch.starts, batch.counts, firsts, self._tile)
        table = self.state.tables[0].numpy()[batch.rows]
        end = self._words_of(graph.size).write(
            batch, table, tiles, graph.grid.prompts, staging.numpy()
        )
        self._words[:end].copy_(staging[:end], non_blocking=True)
        graph.replay()

    def _spans(self, batch: Batch) -> np.ndarray:
        """The tokens of each input whose states are added up: all, or one."""
        spans = np.zeros((self._max_requests, 2), np.int32)
        for i, (row, last, count) in enumerate(
            zip(batch.rows, batch.last_token, batch.counts, strict=True)
        ):
            params = self.state.params[row]
            assert params is not None
            first = last + 1 - count
            spans[i] = {"mean": (first, count), "last": (last, 1)}.get(
                params.pooling or "", (first, 1)
            )
        return spans

    def _each(self, batch: Batch) -> dict[int, torch.Tensor]:
        """The states of all tokens of inputs that are not pooled, by row, out of the way of the
        next step's."""
        made = {}
        for row, last, count in zip(
            batch.rows.tolist(), batch.last_token, batch.counts, strict=True
        ):
            params = self.state.params[row]
            if params is not None and params.pooling == "none":
                made[row] = self._hidden[last + 1 - count : last + 1].double().flatten()
        return made

    def _pool(self, spans: np.ndarray) -> torch.Tensor:
        """The pooled states of as many inputs as there may be, so that matmuls have one shape."""
        made = pool(self._hidden, upload(spans, self._device))
        return (
            made
            if self.model.config.labels is None
            else self.model.scores(made.to(self._hidden.dtype))
        )
