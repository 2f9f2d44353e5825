"""Attention of a step in which some rows have a KV policy: what kernels/policy_attention.py
computes, on a GPU.

A query sees all slots up to its own, so the kernels of paged_attention.py compute it, over slots
instead of positions. Between rounds tokens are given up: few operations on large pieces, by torch.
Two kernels of their own sum up the attention that slots get; the sums are whole numbers, so they do
not depend on the order. A query that reads few pages has a page table for each KV head.

Nothing here waits for the device, but the number of launches depends on the step: such steps are
not captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.attention import _LOG2_E, attend
from tidemill.kernels.cuda.attention_lists import Lists, single_rows
from tidemill.kernels.cuda.kv_write import enter_heads
from tidemill.kernels.cuda.launch import FEW, HOW, begin, launch
from tidemill.kernels.cuda.paged_attention import _queries
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV
from tidemill.kernels.policies import Placed
from tidemill.kernels.policy_attention import pooled, random_scores, turn_on

_ONE = 2.0**32  # a probability of 1 in the sums of attention
PAGES = 16  # of a program that bounds scores


@triton.jit
def _keys_of(
    cache_ptr,
    table,
    block,
    kv_head,
    layer_run,
    runs_per_page,
    end,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[D, keys] of a page; past the end zeros."""
    keys = tl.arange(0, BLOCK)
    run = cache_ptr + (
        tl.load(table + block).to(tl.int64) * runs_per_page + layer_run + kv_head
    ) * (BLOCK * DIM)
    at = keys[None, :] * DIM + tl.arange(0, DIM)[:, None]
    return tl.load(run + at, mask=(block * BLOCK + keys < end)[None, :], other=0.0)


@triton.jit(do_not_specialize=["layer_run"])
def _weigh_slots(
    qkv_ptr, cache_ptr, table_ptr, weights_ptr, tiles_ptr, layer_run, runs_per_page, table_width, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The weight of a slot for each query: the binary logarithm of the sum of its powers of two. A
    tile: token, tokens, slot, row. Reference: `policy_attention.plan_policies`."""
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows, tile = tl.arange(0, ROWS), tiles_ptr + tl.program_id(1) * 4
    token0, num, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table = table_ptr + tl.load(tile + 3).to(tl.int64) * table_width
    token, head, valid = token0 + rows // group, kv_head * group + rows % group, rows // group < num
    q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for block in range(tl.cdiv(slot + num, BLOCK)):
        k = _keys_of(
            cache_ptr, table, block, kv_head, layer_run, runs_per_page, slot + num, DIM, BLOCK
        )
        seen = (block * BLOCK + tl.arange(0, BLOCK))[None, :] <= (slot + rows // group)[:, None]
        scores = tl.where(seen, tl.dot(q, k) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[:, None]), 1)
        top = new_top
    tl.store(weights_ptr + token * NUM_HEADS + head, top + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["layer_run", "layer"])
def _add_to_slots(
    qkv_ptr, cache_ptr, table_ptr, weights_ptr, segments_ptr, sums_ptr, layer_run, runs_per_page, table_width, scale, layer,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ONE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A block of slots gets the attention of a segment's queries. A segment: token, tokens, slot,
    row; `sums_ptr`: for each, where its row's sums [layers, KV heads, slots] begin, and how many
    slots they have. Reference: `policy_attention.plan_policies`."""
    begin(AHEAD)
    kv_head, block = tl.program_id(0), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows, segment = tl.arange(0, ROWS), segments_ptr + tl.program_id(1) * 4
    token0, count, slot = tl.load(segment).to(tl.int64), tl.load(segment + 1), tl.load(segment + 2)
    table = table_ptr + tl.load(segment + 3).to(tl.int64) * table_width
    keys = block * BLOCK + tl.arange(0, BLOCK)
    if block * BLOCK < slot + count:
        k = _keys_of(
            cache_ptr, table, block, kv_head, layer_run, runs_per_page, slot + count, DIM, BLOCK
        )
        total = tl.zeros((BLOCK,), tl.int64)
        for first in range(tl.maximum(block * BLOCK - slot, 0), count, ROWS // group):
            behind, head = first + rows // group, kv_head * group + rows % group
            valid = (behind < count) & (rows // group < ROWS // group)
            q = _queries(qkv_ptr, token0 + behind, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
            weight = tl.load(
                weights_ptr + (token0 + behind) * NUM_HEADS + head, mask=valid, other=0.0
            )
            probs = tl.exp2(tl.dot(q, k) * scale - weight[:, None])
            seen = valid[:, None] & (keys[None, :] <= (slot + behind)[:, None])
            total += tl.sum(tl.where(seen, probs * ONE, 0.0).to(tl.int64), 0)
        own = sums_ptr + tl.program_id(1) * 2
        width = tl.load(own + 1)
        at = (
            tl.load(own).to(tl.pointer_type(tl.int64))
            + (layer.to(tl.int64) * NUM_KV_HEADS + kv_head) * width
            + keys
        )
        there = keys < slot + count
        tl.store(at, tl.load(at, mask=there, other=0) + total, mask=there)


@triton.jit(do_not_specialize=["layer", "num_pages"])
def _bound_pages(
    qkv_ptr, summary_ptr, table_ptr, bounds_ptr, queries_ptr, layer, num_layers, table_width, num_pages,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The most that the queries of a KV head can score with a key of a page, summed over them; its
    first and its last page come before all others, those past the last after. A query: token, row,
    its last page. `summary_ptr`: [P, layers, 2, G, D]. Reference:
    `policy_attention.plan_policies`."""
    begin(AHEAD)
    kv_head, group = tl.program_id(1), NUM_HEADS // NUM_KV_HEADS
    query = queries_ptr + tl.program_id(0) * 4
    token, row, last = (
        tl.load(query).to(tl.int64),
        tl.load(query + 1).to(tl.int64),
        tl.load(query + 2),
    )
    places, columns = tl.program_id(2) * PAGES + tl.arange(0, PAGES), tl.arange(0, DIM)
    inside = (places > 0) & (places < last)
    page = tl.load(table_ptr + row * table_width + places, mask=inside, other=0).to(tl.int64)
    at = ((page * num_layers + layer) * (2 * NUM_KV_HEADS) + kv_head)[:, None] * DIM + columns[
        None, :
    ]
    low = tl.load(summary_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    high = tl.load(summary_ptr + at + NUM_KV_HEADS * DIM, mask=inside[:, None], other=0.0).to(
        tl.float32
    )
    total = tl.zeros((PAGES,), tl.float32)
    for i in range(group):
        q = tl.load(
            qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + kv_head * group + i) * DIM + columns
        ).to(tl.float32)
        total += tl.sum(tl.maximum(q[None, :] * low, q[None, :] * high), 1)
    bound = tl.where(
        inside, total, tl.where((places == 0) | (places == last), float("inf"), float("-inf"))
    )
    to = bounds_ptr + (tl.program_id(0).to(tl.int64) * NUM_KV_HEADS + kv_head) * num_pages + places
    tl.store(to, bound, mask=places < num_pages)


# ---- what a step does


@dataclass(slots=True)
class Watched:
    """Segments whose queries' attention is summed up."""

    tiles: torch.Tensor  # int32 [n, 4]
    segments: torch.Tensor  # int32 [m, 4]
    sums: torch.Tensor  # int64 [m, 2]
    num_blocks: int  # of the longest


@dataclass(slots=True)
class Moved:
    """Rows of one head in the cache, [.., S, D] flattened to [rows, D], for the first layer of a
    page: what goes where."""

    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(slots=True)
class Sparse:
    """Queries that read few pages, in layers from `dense_layers` on; before, and where there are no
    more pages, all of them."""

    dense_layers: int
    dense: list[Lists]
    queries: torch.Tensor | None = None  # int32 [n, 4]: token, row, last page, pages that it reads
    few: list[Lists] = field(default_factory=list)  # rows are those of `queries`
    num_pages: int = 0  # of the longest, a multiple of PAGES


@dataclass(slots=True)
class RoundWork:
    lists: Lists | None
    tokens: slice  # of the step: those that it writes are among them
    slots_T: torch.Tensor  # of these; -1: written in another round. Later rounds find keys rotated.
    watched: Watched | None = None
    moved: Moved | None = None
    evictions: list[Placed] = field(default_factory=list)  # those with more to do than `moved`


@dataclass(slots=True)
class CudaPolicyStep:
    kv: PagedKV
    positions_T: torch.Tensor
    rounds: list[RoundWork]
    sparse: list[Sparse]
    full_pages: torch.Tensor | None  # that have no summary yet
    summary: torch.Tensor  # [P, layers, 2, G, D]: the lowest and highest keys of pages

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        kv, at = self.kv, self.kv.places[layer].index
        out = qkv_TC.new_empty(qkv_TC.shape[0], kv.num_heads * kv.head_dim)
        for number, one in enumerate(self.rounds):
            some, angles, weights = (
                (qkv_TC[one.tokens], None, PLAIN) if number else (qkv_TC, kv.angles[layer], learned)
            )
            enter_heads(
                some, kv.cache, at, self.positions_T, one.slots_T, angles, kv.num_heads, weights
            )
            if one.lists is not None:
                self._attend(layer, qkv_TC, out, one.lists, learned)
            if number == 0 and self.sparse:
                self._sum_up(at)
                for some_queries in self.sparse:
                    self._attend_sparse(layer, qkv_TC, out, some_queries, learned)
            if one.watched is not None:
                self._watch(layer, qkv_TC, one.watched)
            self._evict(layer, one)
        return out

    def _attend(
        self, layer: int, qkv_TC: torch.Tensor, out_TC: torch.Tensor, lists: Lists, learned: HeadWeights,
        table: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        kv, at = self.kv, self.kv.places[layer]
        table = kv.tables[at.group] if table is None else table
        attend(
            qkv_TC,
            kv.cache,
            at.index,
            table,
            lists,
            out_TC,
            kv.specs[layer],
            self.positions_T,
            learned.sinks,
        )

    # ---- the attention that slots get

    def _watch(self, layer: int, qkv_TC: torch.Tensor, watched: Watched) -> None:
        kv, at = self.kv, self.kv.places[layer].index
        table, weights = (
            kv.tables[0],
            qkv_TC.new_empty(qkv_TC.shape[0], kv.num_heads, dtype=torch.float32),
        )
        num_runs = 2 * kv.num_kv_heads
        where = (
            at * num_runs,
            kv.cache.shape[1] * num_runs,
            table.stride(0),
            kv.specs[layer].scale * _LOG2_E,
        )
        common = {
            "NUM_HEADS": kv.num_heads,
            "NUM_KV_HEADS": kv.num_kv_heads,
            "DIM": kv.head_dim,
            "BLOCK": kv.page_size,
        }
        common |= {"ROWS": single_rows(kv.num_heads // kv.num_kv_heads), "num_warps": 4, **HOW}
        launch(
            _weigh_slots, (kv.num_kv_heads, watched.tiles.shape[0]),
            qkv_TC, kv.cache, table, weights, watched.tiles, *where, **common,
        )  # fmt: skip
        launch(
            _add_to_slots, (kv.num_kv_heads, watched.segments.shape[0], watched.num_blocks),
            qkv_TC, kv.cache, table, weights, watched.segments, watched.sums, *where, layer, ONE=_ONE, **common,
        )  # fmt: skip

    # ---- what is given up

    def _evict(self, layer: int, one: RoundWork) -> None:
        if one.moved is not None:
            flat, first = self._flat(layer)
            flat[one.moved.targets + first] = flat[one.moved.sources + first]
        for segment in one.evictions:
            if segment.owner.policy.kind == "streaming":
                self._move_sinks(layer, segment)
            else:
                self._keep_best(layer, segment)

    def _flat(self, layer: int) -> tuple[torch.Tensor, int]:
        """The cache as rows of one head, and where the layer's begin in a page."""
        kv = self.kv
        return kv.cache.view(-1, kv.head_dim), self.kv.places[
            layer
        ].index * 2 * kv.num_kv_heads * kv.page_size

    def _rows_of(self, row: int, slots_GN: torch.Tensor) -> torch.Tensor:
        """The rows of `_flat` where the keys of slots are, for each KV head its own."""
        kv = self.kv
        pages = kv.tables[0][row].to(torch.int64)[slots_GN // kv.page_size]
        heads = torch.arange(kv.num_kv_heads, device=slots_GN.device).unsqueeze(1)
        return (
            pages * (kv.cache.shape[1] * 2 * kv.num_kv_heads) + heads
        ) * kv.page_size + slots_GN % kv.page_size

    def _keep_best(self, layer: int, segment: Placed) -> None:
        kv, policy, sums = self.kv, segment.owner.policy, segment.owner.on_device
        num, device = segment.slot + segment.count, kv.cache.device
        older = num - policy.recent
        if policy.kind == "random":
            end = segment.position + segment.count
            scores = torch.stack(
                [
                    random_scores(layer * kv.num_kv_heads + head, end, older)
                    for head in range(kv.num_kv_heads)
                ]
            ).to(device)
        else:
            assert sums is not None
            scores = (
                pooled(sums[layer, :, :older].double())
                if policy.kind == "snapkv"
                else sums[layer, :, :older]
            )
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[
            :, : policy.kept - policy.recent
        ]
        recent = torch.arange(older, num, device=device).expand(kv.num_kv_heads, -1)
        stay = torch.cat([best.sort(dim=-1).values, recent], dim=1)
        flat, first = self._flat(layer)
        kept = torch.arange(policy.kept, device=device).expand_as(stay)
        sources, targets = (
            self._rows_of(segment.row, stay) + first,
            self._rows_of(segment.row, kept) + first,
        )
        values = kv.num_kv_heads * kv.page_size  # further on than keys
        flat[torch.stack([targets, targets + values])] = flat[
            torch.stack([sources, sources + values])
        ]
        if policy.kind == "h2o":
            assert sums is not None
            sums[layer, :, : policy.kept] = sums[layer].gather(1, stay)
            sums[layer, :, policy.kept :] = 0

    def _move_sinks(self, layer: int, segment: Placed) -> None:
        kv, policy, angles = self.kv, segment.owner.policy, self.kv.angles[layer]
        if angles is None or not policy.sinks:
            return
        assert segment.owner.on_device is not None
        # [G, sinks, D]
        memory, end = segment.owner.on_device[layer], segment.position + segment.count
        flat, first = self._flat(layer)
        slots = torch.arange(policy.sinks, device=flat.device).expand(kv.num_kv_heads, -1)
        rows = self._rows_of(segment.row, slots) + first
        if end == policy.capacity:
            memory.copy_(flat[rows])
        flat[rows] = turn_on(memory, angles, end - policy.kept).to(flat.dtype)

    # ---- few pages

    def _sum_up(self, at: int) -> None:
        if self.full_pages is not None:
            keys = self.kv.cache[self.full_pages, at, 0]  # [n, G, S, D]
            self.summary[self.full_pages, at] = torch.stack([keys.amin(2), keys.amax(2)], 1)

    def _attend_sparse(
        self,
        layer: int,
        qkv_TC: torch.Tensor,
        out_TC: torch.Tensor,
        sparse: Sparse,
        learned: HeadWeights,
    ) -> None:
        kv, queries = self.kv, sparse.queries
        if layer < sparse.dense_layers or queries is None:
            for lists in sparse.dense:
                self._attend(layer, qkv_TC, out_TC, lists, learned)
            return
        bounds = self._bounds(layer, qkv_TC, queries, sparse.num_pages)
        read = few_pages(bounds, queries[:, 3], kv.tables[0][queries[:, 1].long()])
        for lists in sparse.few:
            self._attend(layer, qkv_TC, out_TC, lists, learned, read)

    def _bounds(
        self, layer: int, qkv_TC: torch.Tensor, queries: torch.Tensor, num_pages: int
    ) -> torch.Tensor:
        kv, num, table = self.kv, queries.shape[0], self.kv.tables[0]
        bounds = qkv_TC.new_empty(num, kv.num_kv_heads, num_pages, dtype=torch.float32)
        launch(
            _bound_pages, (num, kv.num_kv_heads, num_pages // PAGES),
            qkv_TC, self.summary, table, bounds, queries, kv.places[layer].index, self.summary.shape[1], table.stride(0),
            num_pages, NUM_HEADS=kv.num_heads, NUM_KV_HEADS=kv.num_kv_heads, DIM=kv.head_dim, PAGES=PAGES, num_warps=4, **HOW,
        )  # fmt: skip
        return bounds

    def warm_up(self) -> None:
        """Every kernel that no other step has, once, on nothing."""
        kv = self.kv
        qkv = kv.cache.new_zeros(FEW + 1, (kv.num_heads + 2 * kv.num_kv_heads) * kv.head_dim)
        none = torch.zeros(4, 4, dtype=torch.int32, device=qkv.device)
        for num in (FEW, FEW + 1):
            positions = torch.zeros(num, dtype=torch.int32, device=qkv.device)
            enter_heads(
                qkv[:num],
                kv.cache,
                0,
                positions,
                torch.full_like(positions, -1, dtype=torch.int64),
                None,
                kv.num_heads,
            )
        self._watch(
            0, qkv, Watched(none, none, torch.zeros(4, 2, dtype=torch.int64, device=qkv.device), 1)
        )
        self._bounds(0, qkv, none[:1], PAGES)


def few_pages(
    bounds_NGP: torch.Tensor, num_N: torch.Tensor, tables_NP: torch.Tensor
) -> torch.Tensor:
    """The pages with the highest bounds for each query and KV head, so many, in their order: [N, G
    * P] int32."""
    num_pages = bounds_NGP.shape[-1]
    places = torch.arange(num_pages, device=bounds_NGP.device)
    order = torch.sort(bounds_NGP, dim=-1, descending=True, stable=True).indices
    chosen = torch.where(places < num_N[:, None, None], order, num_pages).sort(dim=-1).values
    pages = tables_NP[:, None, :num_pages].expand(*chosen.shape[:2], -1)
    if pages.shape[-1] < num_pages:
        pages = torch.nn.functional.pad(pages, (0, num_pages - pages.shape[-1]))
    return torch.gather(pages, 2, chosen.clamp(max=num_pages - 1)).flatten(1).contiguous()
