"""CudaRunner: executes StepPlans on a GPU, one step ahead of the host.

A launch stages what changed, copies it over in one go and starts the step's kernels; nothing waits for the device. The next
input token is read from the row on the device, never from the host. A step in which every request decodes is one replay of a
recorded graph, from token lookup to the sampled token in its row; other steps launch kernel by kernel. Tokens come back on a
stream of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.attention import SPLIT, Mode, attend
from tidemill.kernels.cuda.elementwise import enter_heads
from tidemill.kernels.kv_cache import PagedKV, copy_pages
from tidemill.models.base import CausalLM
from tidemill.runner.base import StepResult, prompt_logprobs
from tidemill.runner.sampler import Sampler
from tidemill.runner.state import RowState, upload
from tidemill.sampling import SamplingParams
from tidemill.sched.plan import StepItem, StepPlan

_PREFILL_ROWS = 128  # of a tile: (token, query head of a KV head's group)
_DECODE_ROWS = 16
_STEPS_IN_FLIGHT = 2


@dataclass(slots=True)
class Layout:
    """A step's attention as lists of work on the device."""

    decode_tiles: torch.Tensor | None  # int32 [n, 5]
    merges: torch.Tensor | None  # int32 [n, 3]; None: no request has more than one split
    prefill_tiles: torch.Tensor | None


@dataclass(slots=True)
class CudaStep:
    """What a layer's attention needs."""

    kv: PagedKV
    layout: Layout
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    partial: torch.Tensor

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None
    ) -> torch.Tensor:
        kv, layout = self.kv, self.layout
        enter_heads(qkv_TC, kv.cache, layer, self.positions_T, self.slots_T, kv.cos, kv.sin, kv.num_heads, qk_norm)
        out = qkv_TC.new_empty(qkv_TC.shape[0], kv.num_heads * kv.head_dim)
        common = (qkv_TC, kv.cache, layer, kv.table)
        if layout.decode_tiles is not None:
            mode = Mode.SINGLE if layout.merges is None else Mode.APART
            rows = max(_DECODE_ROWS, _power_of_2(kv.num_heads // kv.num_kv_heads))
            attend(*common, layout.decode_tiles, out, kv.num_heads, mode, rows, layout.merges, self.partial)
        if layout.prefill_tiles is not None:
            attend(*common, layout.prefill_tiles, out, kv.num_heads, Mode.IN_TURN, _PREFILL_ROWS)
        return out


@dataclass(slots=True)
class Graph:
    """A recorded decoding step of so many requests and splits: fill its inputs, replay, read its tokens."""

    graph: torch.cuda.CUDAGraph
    tiles: torch.Tensor
    requests: torch.Tensor  # int32 [n, 2]: row, position
    merges: torch.Tensor | None
    tokens: torch.Tensor


@dataclass(slots=True)
class Launched:
    rows: list[int]
    tokens: torch.Tensor | None  # pinned, valid once `ready` has passed
    ready: torch.cuda.Event
    result: StepResult


class CudaRunner:
    steps_ahead = 1

    @torch.inference_mode()
    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        self.model, shape = model, model.config
        self._device = torch.device("cuda")
        self._padding_row = config.max_requests  # its page table stays empty: the null page
        self.state = RowState(config.max_requests + 1, config.max_context, config.page_size, self._device)
        self.sampler = Sampler(self.state)
        self.cache = torch.zeros(
            config.num_pages + 1, shape.num_layers, 2, shape.num_kv_heads, config.page_size, shape.head_dim,
            dtype=torch.bfloat16, device=self._device,
        )  # fmt: skip
        model.rope.build(config.max_context, self._device)
        self._kv = PagedKV(self.cache, self.state.pages, model.rope.cos, model.rope.sin, shape.num_heads)
        self._copies = torch.cuda.Stream()
        self._pinned = [torch.empty(config.max_requests, dtype=torch.int64, pin_memory=True) for _ in range(_STEPS_IN_FLIGHT + 1)]
        self._turn = 0
        self._partial = torch.empty(0, shape.num_heads, shape.head_dim + 2, device=self._device)
        self._sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32)) if n < config.max_requests] + [
            config.max_requests
        ]
        self._logits = torch.empty(config.max_requests, shape.vocab_size, device=self._device)  # of the last replay
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._graph(size, size)
            self._graph(size, 2 * size)  # some requests past the first split
        self._warm_up(min(config.token_budget, config.max_context))

    # ---- a step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.state.stage(plan)
        self.state.apply()
        if plan.page_copies:
            sources, targets = zip(*plan.page_copies, strict=True)
            copy_pages(self.cache, list(sources), list(targets))
        result = StepResult()
        is_plain = self._all_plain(plan.items)
        decoding = all(item.count == 1 and item.samples for item in plan.items)
        asks_prompt = not is_plain and any(self._params(item).prompt_logprobs is not None for item in plan.items)
        tokens: torch.Tensor | None
        sampling = plan.items
        if decoding and not asks_prompt:
            tokens = self._decode(plan.items, result)
        else:
            tokens, sampling = self._mixed(plan.items, result)
        ready = torch.cuda.Event()
        pinned = None
        if tokens is not None:
            self._turn = (self._turn + 1) % len(self._pinned)
            pinned = self._pinned[self._turn][: len(sampling)]
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                pinned.copy_(tokens[: len(sampling)], non_blocking=True)
                ready.record()
            tokens.record_stream(self._copies)
        return Launched([item.row for item in sampling], pinned, ready, result)

    def collect(self, launched: Launched) -> StepResult:
        if launched.tokens is not None:
            launched.ready.synchronize()
            launched.result.tokens = dict(zip(launched.rows, launched.tokens.tolist(), strict=True))
        return launched.result

    def _all_plain(self, items: list[StepItem]) -> bool:
        is_plain = self.state.is_plain
        return all(is_plain[item.row] for item in items)

    def _params(self, item: StepItem) -> SamplingParams:
        params = self.state.params[item.row]
        assert params is not None
        return params

    # ---- every request decodes: one replay

    def _decode(self, items: list[StepItem], result: StepResult) -> torch.Tensor:
        size = self._sizes[bisect_left(self._sizes, len(items))]
        requests = np.full((size, 2), (self._padding_row, 0), np.int32)
        requests[: len(items)] = [(item.row, item.start) for item in items]
        tiles, merges = decode_work(requests[: len(items), 0], requests[: len(items), 1])
        num_tiles = size
        while num_tiles < tiles.shape[0]:
            num_tiles *= 2
        graph = self._graph(size, num_tiles)
        parts = [requests, _padded(tiles, num_tiles)] + ([] if graph.merges is None else [_padded(merges, size)])
        targets = [graph.requests, graph.tiles] + ([] if graph.merges is None else [graph.merges])
        flat = upload(np.concatenate([part.reshape(-1) for part in parts]), self._device)
        for target, part in zip(targets, flat.split([part.size for part in parts]), strict=True):
            target.copy_(part.view(target.shape))
        graph.graph.replay()
        if self._all_plain(items):
            return graph.tokens.clone()  # the next replay writes over them
        return self._draw(items, self._logits[: len(items)].clone(), result)

    def _graph(self, size: int, num_tiles: int) -> Graph:
        """Recorded when first needed; the smallest number of tiles of each size, before the first request."""
        known = self._graphs.get((size, num_tiles))
        if known is not None:
            return known
        device = self._device
        self._grow_partial(num_tiles)
        requests = torch.tensor([[self._padding_row, 0]] * size, dtype=torch.int32, device=device)
        tiles = torch.zeros(num_tiles, 5, dtype=torch.int32, device=device)
        merges = torch.zeros(size, 3, dtype=torch.int32, device=device) if num_tiles > size else None
        layout = Layout(tiles, merges, None)

        def step() -> torch.Tensor:
            rows, positions = requests[:, 0].long(), requests[:, 1].long()
            logits = self.model.logits(self._forward(rows, positions, layout))
            tokens = logits.argmax(-1)
            self.state.append(rows, positions + 1, tokens)
            self._logits[:size].copy_(logits)  # one place for all graphs: each would keep its own
            return tokens

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tokens = step()
        made = self._graphs[size, num_tiles] = Graph(graph, tiles, requests, merges, tokens)
        return made

    # ---- prompts among them: kernel by kernel

    def _mixed(self, items: list[StepItem], result: StepResult) -> tuple[torch.Tensor | None, list[StepItem]]:
        rows, starts, counts = np.array([(item.row, item.start, item.count) for item in items], np.int32).T
        ends = np.cumsum(counts, dtype=np.int32)
        firsts = ends - counts
        row_of, positions = np.repeat(rows, counts), np.repeat(starts - firsts, counts) + np.arange(ends[-1], dtype=np.int32)
        one = counts == 1
        tiles, merges = decode_work(rows[one], starts[one], firsts[one])
        longer = prefill_work(rows[~one], starts[~one], counts[~one], firsts[~one], _PREFILL_ROWS // self._group)
        sampling = [i for i, item in enumerate(items) if item.samples]
        parts = [row_of, positions, tiles, merges, longer, ends[sampling] - 1]
        flat = upload(np.concatenate([part.reshape(-1) for part in parts]), self._device)
        row_T, position_T, tiles_d, merges_d, longer_d, last = flat.split([part.size for part in parts])
        split_apart = tiles.shape[0] > one.sum()
        layout = Layout(
            tiles_d.view(-1, 5) if tiles.size else None,
            merges_d.view(-1, 3) if split_apart else None,
            longer_d.view(-1, 5) if longer.size else None,
        )
        self._grow_partial(tiles.shape[0])
        hidden_TH = self._forward(row_T.long(), position_T.long(), layout)
        for item, first in zip(items, firsts.tolist(), strict=True):
            wanted = self._params(item).prompt_logprobs
            if wanted is not None:
                part = hidden_TH[first : first + item.count]
                result.prompt_logprobs[item.row] = list(prompt_logprobs(self.model, self.state, item, part, wanted))
        if not sampling:
            return None, []
        chosen = [items[i] for i in sampling]
        logits_SV = self.model.logits(hidden_TH[last.long()])
        return self._draw(chosen, logits_SV, result), chosen

    def _warm_up(self, most_tokens: int) -> None:
        """Prompts of all sizes in the null page, so that no request waits for a compiler."""
        for num in sorted({min(2**i, most_tokens) for i in range(1, most_tokens.bit_length() + 1)}):
            row, zero = np.array([self._padding_row], np.int32), np.zeros(1, np.int32)
            tiles = prefill_work(row, zero, np.array([num], np.int32), zero, _PREFILL_ROWS // self._group)
            layout = Layout(None, None, upload(tiles, self._device))
            rows = torch.full((num,), self._padding_row, device=self._device)
            hidden = self._forward(rows, torch.arange(num, device=self._device), layout)
            self.model.logits(hidden[: self._padding_row])
        torch.cuda.synchronize()

    # ---- common to both

    @property
    def _group(self) -> int:
        return self._kv.num_heads // self._kv.num_kv_heads

    def _forward(self, row_T: torch.Tensor, position_T: torch.Tensor, layout: Layout) -> torch.Tensor:
        size = self.state.page_size
        slots = self.state.pages[row_T, position_T // size].long() * size + position_T % size
        step = CudaStep(self._kv, layout, position_T, slots, self._partial)
        return self.model(self.model.embed_tokens(self.state.tokens[row_T, position_T]), step)

    def _draw(self, items: list[StepItem], logits_SV: torch.Tensor, result: StepResult) -> torch.Tensor:
        """Into the rows, where the next step reads them."""
        rows, positions = [item.row for item in items], [item.start + item.count for item in items]
        if self._all_plain(items):
            tokens = logits_SV.argmax(-1)
        else:
            sampled = self.sampler.sample(logits_SV, rows, positions)
            tokens, result.logprobs = sampled.token_ids, sampled.logprobs
        where = upload(np.array([rows, positions], np.int32), self._device).view(2, -1).long()
        self.state.append(where[0], where[1], tokens)
        return tokens

    def _grow_partial(self, num_tiles: int) -> None:
        """Graphs keep the one they were recorded with."""
        if self._partial.shape[0] < num_tiles:
            self._partial = self._partial.new_empty(2 * num_tiles, *self._partial.shape[1:])


def decode_work(rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A tile for each split of each decoding request, and how they are merged."""
    tokens = np.arange(rows.size, dtype=np.int32) if tokens is None else tokens
    num_splits = positions // SPLIT + 1
    first = np.cumsum(num_splits) - num_splits
    request = np.repeat(np.arange(rows.size), num_splits)
    split = np.arange(request.size) - first[request]
    tiles = np.stack([tokens[request], np.ones_like(request), positions[request], rows[request], split], 1)
    return tiles.astype(np.int32), np.stack([tokens, first, num_splits], 1).astype(np.int32)


def prefill_work(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, firsts: np.ndarray, tile_len: int) -> np.ndarray:
    """Tiles of prompts, those with most keys first: the longest should not be the last to start."""
    num_tiles = -(-counts // tile_len)
    request = np.repeat(np.arange(rows.size), num_tiles)
    offset = (np.arange(request.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_len
    lens = np.minimum(counts[request] - offset, tile_len)
    tiles = np.stack([firsts[request] + offset, lens, starts[request] + offset, rows[request], np.zeros_like(request)], 1)
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 1]), kind="stable")].astype(np.int32)


def _padded(rows: np.ndarray, num: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((num - rows.shape[0], rows.shape[1]), np.int32)])


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
