"""Attention of a mixed step over paged KV, in torch: any number of query tokens per request,
grouped query heads. Causal, or over the whole sequence.

The result of a query depends on its position and the tokens before it, never on how the step was
cut:

- Keys are taken in blocks whose boundaries depend on the position alone (0, 64, 128, 256, 512, 1024, 1536, ...), merged in
  order by the online softmax. The first blocks are short, so that short contexts pay little.
- Queries are taken in tiles of one token (decoding) or 32 tokens (prompts), all matmuls of a kind having one shape.
  With a BLAS a row of such a matmul keeps its bits from two rows up (one row would take another routine), so a tile has at
  least two. That is probed once per model shape; where it does not hold, decoding takes the larger tiles, too.
- Tiles of all requests that reach a block are computed together, longest first: work follows live tokens, nobody is padded to
  the longest request, and only the block at hand is gathered out of the cache.

A query row of a tile is one (token, head of the KV head's group). Shape letters of
kernels/__init__; M rows of a tile, B keys of a block, n tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.kernels import kvquant, masks
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV, read_pages, read_slots, write_kv
from tidemill.kernels.rope import apply_rope
from tidemill.kernels.trees import Paths
from tidemill.types.cache_layout import Place
from tidemill.types.model_config import AttentionSpec

PREFILL_TILE = 32
_FIRST_BLOCK, _LAST_BLOCK = 64, 512
_LOWEST = -1e30  # than any score
_MAX_SCORE_BYTES = 64 * 2**20  # of one block's scores; more tiles than that are computed in turns


def attention_reference(
    q_TND: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    positions_T: torch.Tensor,
    spec: AttentionSpec,
    sinks_N: torch.Tensor | None = None,
    bias_NW: torch.Tensor | None = None,
) -> torch.Tensor:
    """One request, keys in a row: what the paged version must compute. `bias_NW`: by distance, that
    of 0 in the middle."""
    num_repeats = q_TND.shape[1] // k_LGD.shape[1]
    k = k_LGD.repeat_interleave(num_repeats, dim=1)
    v = v_LGD.repeat_interleave(num_repeats, dim=1)
    scores = torch.einsum("tnd,lnd->ntl", q_TND, k) * spec.scale
    heads, queries, keys = (
        torch.arange(q_TND.shape[1])[:, None, None],
        positions_T[:, None],
        torch.arange(k.shape[0]),
    )
    change = masks.change_of(spec, bias_NW)
    if change is not None:
        scores = change(scores, heads, queries, keys)
    scores = scores.masked_fill(~masks.mask_of(spec, k.shape[0])(queries, keys), float("-inf"))
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    return torch.einsum("ntl,lnd->tnd", scores.softmax(-1)[..., : k.shape[0]], v)


def block_bounds(num_tokens: int) -> list[tuple[int, int]]:
    """The blocks that cover positions 0 .. num_tokens - 1."""
    bounds, start, size = [], 0, _FIRST_BLOCK
    while start < num_tokens:
        bounds.append((start, start + size))
        start += size
        size = min(start, _LAST_BLOCK)
    return bounds


@cache
def decode_tile(num_repeats: int, dim: int, num_threads: int, value_dim: int = 0) -> int:
    """Tokens of a decoding tile: 1 if its rows come out bit for bit as in a prompt's tile, else a
    prompt's tile."""
    generator = torch.Generator().manual_seed(dim)
    small, large = max(2, num_repeats), PREFILL_TILE * num_repeats
    q = torch.randn(4, large, dim, generator=generator)
    for size in {hi - lo for lo, hi in block_bounds(4 * _LAST_BLOCK)}:
        k = torch.randn(4, size, dim, generator=generator)
        v, acc = (torch.randn(4, n, value_dim or dim, generator=generator) for n in (size, large))
        scores = torch.bmm(q, k.transpose(1, 2))
        first, later = torch.bmm(scores, v), torch.baddbmm(acc, scores, v)
        for batch in (1, 4):
            part = scores[:batch, :small].contiguous()
            again = (
                (scores, torch.bmm(q[:batch, :small].contiguous(), k[:batch].transpose(1, 2))),
                (first, torch.bmm(part, v[:batch])),
                (later, torch.baddbmm(acc[:batch, :small], part, v[:batch])),
            )
            if not all(torch.equal(whole[:batch, :small], alone) for whole, alone in again):
                return PREFILL_TILE
    return 1


@dataclass(slots=True)
class _Block:
    num_tiles: int
    pages: torch.Tensor  # [n, pages]
    # [n, 1, M, B]: keys after the query, or before its window; None if there are none
    hidden: torch.Tensor | None
    # keys that lie elsewhere: their tiles, numbers and slots
    moved: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    first_key: int
    num_keys: int


@dataclass(slots=True)
class _Tiles:
    """Tiles of one shape, those with most blocks first."""

    num_tiles: int
    tile_len: int  # tokens
    # [n * tile_len] into the step's tokens; padding repeats the tile's first token
    tokens: torch.Tensor
    valid: torch.Tensor | None  # which of them are not padding; None: all
    blocks: list[_Block]
    positions: torch.Tensor  # [n, tile_len] of the tokens


@dataclass(slots=True)
class AttentionPlan:
    """The plan of one step's attention; made once, used by every layer."""

    groups: list[_Tiles]
    num_tokens: int


def plan_attention(
    starts: np.ndarray,
    counts: np.ndarray,
    page_tables: np.ndarray,
    kv: PagedKV,
    spec: AttentionSpec,
    paths: Paths | None = None,
) -> AttentionPlan:
    """Cut the step into tiles. Token i of request r is number sum(counts[:r]) + i of the step, at
    position starts[r] + i. `page_tables`: [requests, pages], at least as wide as the last block.
    `spec`: of the layers, for their mask."""
    first_token = np.cumsum(counts) - counts
    groups: list[_Tiles] = []
    small = decode_tile(
        spec.num_heads // spec.num_kv_heads, spec.head_dim, torch.get_num_threads(), spec.value_dim
    )
    decoding = np.flatnonzero(counts == 1) if small == 1 else np.array([], np.int64)
    if decoding.size:
        ones = np.ones_like(decoding)
        ends = starts[decoding] + 1
        groups += _make_groups(
            decoding,
            first_token[decoding],
            starts[decoding],
            ones,
            ends,
            1,
            page_tables,
            kv,
            spec,
            paths,
        )
    prefilling = np.flatnonzero(counts >= (2 if small == 1 else 1))
    if prefilling.size:
        num_tiles = -(-counts[prefilling] // PREFILL_TILE)
        request = np.repeat(prefilling, num_tiles)
        offset = (
            np.arange(request.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        ) * PREFILL_TILE
        lens = np.minimum(counts[request] - offset, PREFILL_TILE)
        first = starts[request] + offset
        ends = (starts + counts)[request] if spec.is_bidirectional else first + lens
        groups += _make_groups(
            request,
            first_token[request] + offset,
            first,
            lens,
            ends,
            PREFILL_TILE,
            page_tables,
            kv,
            spec,
            paths,
        )
    return AttentionPlan(groups, int(counts.sum()))


def _make_groups(
    request: np.ndarray, token: np.ndarray, position: np.ndarray, lens: np.ndarray, ends: np.ndarray, tile_len: int,
    page_tables: np.ndarray, kv: PagedKV, spec: AttentionSpec, paths: Paths | None,
) -> list[_Tiles]:  # fmt: skip
    """Tiles of one shape, sorted by reach and cut into groups of bounded memory. `ends`: after the
    last key each tile sees."""
    order = np.argsort(-ends, kind="stable")
    rows = max(2, tile_len * (spec.num_heads // spec.num_kv_heads))
    at_once = max(1, _MAX_SCORE_BYTES // (4 * spec.num_kv_heads * rows * _LAST_BLOCK))
    groups = []
    for begin in range(0, order.size, at_once):
        part = order[begin : begin + at_once]
        in_tile = np.arange(tile_len)[None, :]
        valid = in_tile < lens[part, None]
        step_tokens = np.where(valid, token[part, None] + in_tile, token[part, None])
        positions = np.where(valid, position[part, None] + in_tile, position[part, None])
        reach = ends[part]
        blocks = []
        for lo, hi in block_bounds(int(reach[0])):
            n = int(np.count_nonzero(reach > lo))
            if hi <= masks.first_seen(spec, positions[:n].min()):
                continue  # nobody sees it
            pages = page_tables[request[part[:n]], lo // kv.page_size : hi // kv.page_size]
            unseen = _unseen(
                masks.mask_of(spec, reach[:n, None, None]), positions[:n, :, None], lo, hi
            )
            hidden = (
                None
                if unseen is None
                else torch.from_numpy(np.repeat(unseen, rows // tile_len, axis=1)[:, None])
            )
            moved = (
                None
                if paths is None
                else _moved(
                    paths, request[part[:n]], ends[part[:n]], page_tables, kv.page_size, lo, hi
                )
            )
            blocks.append(_Block(n, torch.from_numpy(pages), hidden, moved, lo, hi - lo))
        groups.append(
            _Tiles(
                part.size,
                tile_len,
                torch.from_numpy(step_tokens.reshape(-1)),
                None if valid.all() else torch.from_numpy(valid.reshape(-1)),
                blocks,
                torch.from_numpy(positions),
            )
        )
    return groups


def _moved(
    paths: Paths,
    request: np.ndarray,
    ends: np.ndarray,
    page_tables: np.ndarray,
    page_size: int,
    lo: int,
    hi: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The keys of a block whose tokens are on a path."""
    firsts, lasts = np.maximum(paths.bases[request], lo), np.minimum(ends, hi)
    places = [
        (tile, at)
        for tile, (first, last) in enumerate(zip(firsts, lasts, strict=True))
        for at in range(first, last)
    ]
    if not places:
        return None
    tiles, positions = np.array(places).T
    at = paths.places[request[tiles], positions - paths.bases[request[tiles]]]
    slots = (
        page_tables[request[tiles], at // page_size].astype(np.int64) * page_size + at % page_size
    )
    return torch.from_numpy(tiles), torch.from_numpy(positions - lo), torch.from_numpy(slots)


def _unseen(mask: masks.Mask, queries: np.ndarray, lo: int, hi: int) -> np.ndarray | None:
    """The mask of the keys of a block that queries do not see; None: they see all, as they do if
    they see the first and last."""
    if np.all(mask(queries, np.array([lo, hi - 1]))):
        return None
    return ~np.asarray(mask(queries, np.arange(lo, hi)))


def paged_attention(
    q_TND: torch.Tensor,
    kv: PagedKV,
    layer: int,
    plan: AttentionPlan,
    spec: AttentionSpec,
    sinks_N: torch.Tensor | None = None,
    bias_NW: torch.Tensor | None = None,
) -> torch.Tensor:
    out = q_TND.new_empty(*q_TND.shape[:2], spec.value_dim)
    for group in plan.groups:
        result = _attend(q_TND, kv, layer, group, spec, sinks_N, bias_NW)
        tokens = group.tokens
        if group.valid is not None:
            result, tokens = result[group.valid], tokens[group.valid]
        out.index_copy_(0, tokens, result)
    return out


def _attend(
    q_TND: torch.Tensor, kv: PagedKV, layer: int, group: _Tiles, spec: AttentionSpec, sinks_N: torch.Tensor | None,
    bias_NW: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """All tiles of a group over all their blocks. Returns [n * tile_len, N, values]."""
    num_kv_heads, dim = spec.num_kv_heads, spec.head_dim
    n, tile_len = group.num_tiles, group.tile_len
    num_repeats = q_TND.shape[1] // num_kv_heads
    q = (
        q_TND.index_select(0, group.tokens)
        .mul_(spec.scale)
        .view(n, tile_len, num_kv_heads, num_repeats, dim)
    )
    q = q.transpose(1, 2).reshape(n * num_kv_heads, tile_len * num_repeats, dim)
    if q.shape[1] == 1:
        q = q.expand(-1, 2, -1).contiguous()
    rows = q.shape[1]
    # A sink is a key that was seen before all others, of which only the score counts.
    top = q.new_full((q.shape[0], rows, 1), _LOWEST)
    if sinks_N is not None:
        sinks = (
            sinks_N.view(1, num_kv_heads, 1, num_repeats)
            .expand(n, -1, tile_len, -1)
            .reshape(n * num_kv_heads, -1, 1)
        )
        top[:, : sinks.shape[1]] = sinks
    total, acc = (
        torch.full_like(top, sinks_N is not None),
        q.new_zeros(*q.shape[:2], spec.value_dim),
    )
    change = masks.change_of(spec, bias_NW)
    heads, queries = _rows_of(group, rows, num_kv_heads, num_repeats)
    for block in group.blocks:
        batch = block.num_tiles * num_kv_heads
        k = _read(kv, block, layer, 0)
        scores = torch.bmm(q[:batch], k.transpose(1, 2))
        if change is not None:
            keys = torch.arange(block.first_key, block.first_key + block.num_keys)
            scores = scores.view(block.num_tiles, num_kv_heads, rows, -1)
            scores = change(scores, heads, queries[: block.num_tiles], keys).view(batch, rows, -1)
        if block.hidden is not None:
            scores.view(block.num_tiles, num_kv_heads, rows, -1).masked_fill_(
                block.hidden, float("-inf")
            )
        block_top = scores.amax(-1, keepdim=True)
        v = _read(kv, block, layer, 1)
        # Longer tiles come first, so those that reach this block are a leading part of the state.
        old_top, new_top = top[:batch], torch.maximum(top[:batch], block_top)
        shrink = old_top.sub_(new_top).exp_()
        scores.sub_(new_top).exp_()
        total[:batch].mul_(shrink).add_(scores.sum(-1, keepdim=True))
        _mix(acc[:batch].mul_(shrink), scores, v, block.hidden)
        top[:batch] = new_top
    out = acc.div_(total)[:, : tile_len * num_repeats]
    out = out.view(n, num_kv_heads, tile_len, num_repeats, spec.value_dim).transpose(1, 2)
    return out.reshape(n * tile_len, num_kv_heads * num_repeats, spec.value_dim)


def _read(kv: PagedKV, block: _Block, layer: int, part: int) -> torch.Tensor:
    """A block's keys (part 0) or values, [n * G, B, D]."""
    if kv.quant is not None:
        made = kvquant.read_block(
            kv, layer, block.pages, block.first_key, block.num_keys, part == 1
        )
    else:
        made = read_pages(kv, block.pages, layer, part)
    if block.moved is not None:
        tiles, keys, slots = block.moved
        if kv.quant is not None:
            made[tiles, :, keys] = kvquant.read_slots(
                kv, layer, slots, block.first_key + keys, part == 1
            )
        else:
            made[tiles, :, keys] = read_slots(kv, slots, layer, part)
    return made.flatten(0, 1)


def _mix(
    acc: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> None:
    """Add the values of a block. One that is not finite, 0 times which is not 0, spoils only the
    rows that see it."""
    if hidden is None or v.isfinite().all():
        acc.baddbmm_(weights, v)
        return
    is_broken = ~v.isfinite().all(-1)
    acc.baddbmm_(weights, v.masked_fill(is_broken.unsqueeze(-1), 0.0))
    is_spoiled = (
        (is_broken.view(hidden.shape[0], -1, 1, v.shape[1]) & ~hidden)
        .any(-1)
        .view(acc.shape[0], -1, 1)
    )
    acc.masked_fill_(is_spoiled, float("nan"))


def _rows_of(
    group: _Tiles, rows: int, num_kv_heads: int, num_repeats: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads [1, G, M, 1] and positions [n, 1, M, 1] of the rows of tiles."""
    row = torch.arange(rows)
    heads = torch.arange(num_kv_heads)[:, None] * num_repeats + row % num_repeats
    tokens = (row // num_repeats).clamp_(max=group.tile_len - 1)  # a tile of one row has a second
    return heads[None, :, :, None], group.positions[:, None, tokens, None]


class TorchAttention:
    """The backend that runs anywhere torch does."""

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv

    def plan(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
        paths: Paths | None = None,
    ) -> TorchStep:
        kv = self.kv
        kinds = {_kind(place, spec): spec for place, spec in zip(kv.places, kv.specs, strict=True)}
        tables = [table.numpy()[rows] for table in kv.tables]
        plans = {
            kind: plan_attention(starts, counts, tables[kind[0]], kv, spec, paths)
            for kind, spec in kinds.items()
        }
        return TorchStep(kv, plans, slots_GT, positions_T)


@dataclass(slots=True)
class TorchStep:
    kv: PagedKV
    plans: dict[tuple[int, ...], AttentionPlan]  # by what layers have in common, see `_kind`
    slots_GT: torch.Tensor  # where this step's keys and values go, in each group
    positions_T: torch.Tensor

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        kv, spec, at = self.kv, self.kv.specs[layer], self.kv.places[layer]
        queries = enter_heads(kv, layer, qkv_TC, self.positions_T, self.slots_GT, learned)
        plan = self.plans[_kind(at, spec)]
        out = paged_attention(queries, kv, layer, plan, spec, learned.sinks, kv.biases[layer])
        return learned.only_chosen(out).flatten(1)


def _kind(place: Place, spec: AttentionSpec) -> tuple[int, ...]:
    """The values that are equal in layers that have one plan, the group first."""
    sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    return place.group, spec.window, spec.is_bidirectional, *sizes


def enter_heads(
    kv: PagedKV,
    layer: int,
    qkv_TC: torch.Tensor,
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    learned: HeadWeights,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write what the layer stores into the cache. Returns the
    queries [T, N, D]."""
    queries, *stored = rotate_heads(kv, layer, qkv_TC, positions_T, learned)
    slots_T = slots_GT[kv.places[layer].group]
    if kv.quant is not None:
        kvquant.enter(kv, layer, positions_T, slots_T, *stored)
    elif stored:
        write_kv(kv, layer, slots_T, *stored)
    return queries


def rotate_heads(
    kv: PagedKV, layer: int, qkv_TC: torch.Tensor, positions_T: torch.Tensor, learned: HeadWeights
) -> list[torch.Tensor]:
    """Queries, and what the layer stores: keys and values, or nothing, [T, heads, D] each. Queries
    and keys are normed and rotated (keys not, where they are stored as they are before it)."""
    spec, angles = kv.specs[layer], kv.angles[layer]
    heads = [(spec.num_heads, spec.head_dim), *((part.num_heads, part.dim) for part in spec.stored)]
    columns = qkv_TC.split([num * dim for num, dim in heads], dim=1)
    made = [x.unflatten(1, (num, dim)) for x, (num, dim) in zip(columns, heads, strict=True)]
    for i, weight in enumerate((learned.q_norm, learned.k_norm)[: len(made)]):
        if weight is not None:
            made[i] = F.rms_norm(made[i], (spec.head_dim,), weight, learned.eps)
    if angles is not None:
        cos, sin = angles.cos.index_select(0, positions_T), angles.sin.index_select(0, positions_T)
        made[0] = apply_rope(made[0], cos, sin)
        if kv.quant is None and len(made) > 1:
            made[1] = apply_rope(made[1], cos, sin)
    return made
