"""Causal attention over the paged cache: any number of query tokens per request, grouped query heads packed into one tile.

The order of summation depends on a query's position alone. Keys are taken in blocks of 64 from position 0 on; blocks within
a split of 512 positions are merged by the online softmax, splits are merged in order afterwards. A decoding step may give each
split to a program of its own; a prompt's tile takes its splits one after the other. The sum of probabilities is a product with
ones: the matrix unit adds in one order whatever the tile, a reduction across threads would not.

A row of a tile is one (token, query head of the KV head's group). A tile is up to ROWS / R tokens of one request. The grid
follows a list of tiles, or of (tile, split), that the host makes for the step: work is proportional to live tokens, and nobody
is padded to the longest request.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

SPLIT, BLOCK = 512, 64
WARPS, STAGES = (2, 8), (3, 3)  # of small and of large tiles; two warps read memory at 3.9 of 4.25 TB/s, four at 2.5
_LOG2_E = 1.4426950408889634


class Mode(IntEnum):
    """How a tile's splits are computed."""

    SINGLE = 0  # there is one
    APART = 1  # each by a program of its own, then merged; a tile is one token
    IN_TURN = 2


@triton.jit
def _one_split(
    q, cache_ptr, table_ptr, keys_offset, values_offset, page_stride, positions, begin, end, scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions begin .. end - 1: sums of weighted values, highest score, sum of weights (in 16 equal columns)."""
    columns = tl.arange(0, DIM)
    acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 16), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    ones = tl.full((BLOCK, 16), 1.0, cache_ptr.dtype.element_ty)
    for first in range(begin, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        there = keys < end
        page = tl.load(table_ptr + keys // PAGE, mask=there, other=0).to(tl.int64)
        at = page * page_stride + keys % PAGE * DIM
        k = tl.load(cache_ptr + keys_offset + at[None, :] + columns[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees none of these keys
        weights = tl.exp2(scores - shift[:, None]).to(cache_ptr.dtype.element_ty)
        shrink = tl.exp2(top - shift)
        v = tl.load(cache_ptr + values_offset + at[:, None] + columns[None, :], mask=there[:, None], other=0.0)
        acc = tl.dot(weights, v, acc * shrink[:, None])
        total = tl.dot(weights, ones, total * shrink[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def _merge_two(acc, top, total, more_acc, more_top, more_total):
    new_top = tl.maximum(top, more_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - shift), tl.exp2(more_top - shift)
    return acc * old[:, None] + more_acc * new[:, None], new_top, total * old + more_total * new


@triton.jit
def _attend(
    qkv_ptr, cache_ptr, table_ptr, out_ptr, partial_ptr, tiles_ptr, layer_offset, page_stride, table_width, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # A tile: first token in the step, tokens, first position, row of the table, split. No tokens: padding.
    tiles_ptr += tile * 5
    token0, num = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + 1)
    start, table_row = tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3).to(tl.int64)
    split = tl.load(tiles_ptr + 4)
    end = start + num
    if num > 0:
        rows = tl.arange(0, ROWS)
        token, head = token0 + rows // group, kv_head * group + rows % group
        valid = rows // group < num
        positions = start + rows // group
        columns = tl.arange(0, DIM)
        q_at = (token[:, None] * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM + columns[None, :]
        q = tl.load(qkv_ptr + q_at, mask=valid[:, None], other=0.0)
        keys_offset = layer_offset + kv_head * PAGE * DIM
        values_offset = keys_offset + NUM_KV_HEADS * PAGE * DIM
        table = table_ptr + table_row * table_width
        acc, top, total = _one_split(
            q, cache_ptr, table, keys_offset, values_offset, page_stride, positions,
            split * SPLIT, min(split * SPLIT + SPLIT, end), scale, ROWS, DIM, PAGE, BLOCK,
        )  # fmt: skip
        weight = tl.max(total, 1)  # its 16 columns are equal
        if MODE == 2:
            for begin in range(SPLIT, end, SPLIT):
                more_acc, more_top, more_total = _one_split(
                    q, cache_ptr, table, keys_offset, values_offset, page_stride, positions,
                    begin, min(begin + SPLIT, end), scale, ROWS, DIM, PAGE, BLOCK,
                )  # fmt: skip
                acc, top, weight = _merge_two(acc, top, weight, more_acc, more_top, tl.max(more_total, 1))
        if MODE == 1:
            partial = (tile.to(tl.int64) * NUM_HEADS + head) * (DIM + 2)
            valid = rows < group
            tl.store(partial_ptr + partial[:, None] + columns[None, :], acc, mask=valid[:, None])
            tl.store(partial_ptr + partial + DIM, top, mask=valid)
            tl.store(partial_ptr + partial + DIM + 1, weight, mask=valid)
        else:
            out_at = (token[:, None] * NUM_HEADS + head[:, None]) * DIM + columns[None, :]
            tl.store(out_ptr + out_at, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _merge(partial_ptr, out_ptr, merges_ptr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """One head of one token. A merge: token, its first tile, its tiles."""
    merge, head = tl.program_id(0), tl.program_id(1)
    token, first, num = (
        tl.load(merges_ptr + merge * 3).to(tl.int64),
        tl.load(merges_ptr + merge * 3 + 1),
        tl.load(merges_ptr + merge * 3 + 2),
    )
    if num > 0:
        columns, one = tl.arange(0, DIM), tl.arange(0, 1)
        at = partial_ptr + (first.to(tl.int64) * NUM_HEADS + head) * (DIM + 2)
        acc = tl.load(at + one[:, None] + columns[None, :])
        top, weight = tl.load(at + DIM + one), tl.load(at + DIM + 1 + one)
        for _ in range(1, num):
            at += NUM_HEADS * (DIM + 2)
            more = tl.load(at + one[:, None] + columns[None, :])
            acc, top, weight = _merge_two(acc, top, weight, more, tl.load(at + DIM + one), tl.load(at + DIM + 1 + one))
        out_at = (token * NUM_HEADS + head) * DIM + one[:, None] + columns[None, :]
        tl.store(out_ptr + out_at, (acc / weight[:, None]).to(out_ptr.dtype.element_ty))


def attend(
    qkv_TC: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    tiles: torch.Tensor,
    out_TC: torch.Tensor,
    num_heads: int,
    mode: Mode,
    rows: int,
    merges: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
) -> None:
    """`tiles`: int32 [n, 5]. With splits apart: `merges`, int32 [n, 3], and `partial`, float32 [tiles, heads, D + 2]."""
    _, _, _, num_kv_heads, page_size, dim = cache.shape
    _attend[(num_kv_heads, tiles.shape[0])](
        qkv_TC, cache, table, out_TC, out_TC if partial is None else partial, tiles,
        layer * cache.stride(1), cache.stride(0), table.shape[1], dim**-0.5 * _LOG2_E,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, PAGE=page_size, ROWS=rows,
        SPLIT=SPLIT, BLOCK=BLOCK, MODE=int(mode), num_warps=WARPS[rows > 64], num_stages=STAGES[rows > 64],
    )  # fmt: skip
    if mode == Mode.APART:
        assert merges is not None
        _merge[(merges.shape[0], num_heads)](partial, out_TC, merges, NUM_HEADS=num_heads, DIM=dim, num_warps=1)
