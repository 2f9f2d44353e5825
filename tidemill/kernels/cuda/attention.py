"""Causal attention over the paged cache: any number of query tokens per request, grouped query heads in one tile.

The order of summation depends on a query's position alone. Keys are taken in blocks of 64 from position 0 on; blocks within
a split of 512 positions are merged by the online softmax, splits are merged in order. Three kernels keep that order:

- `_attend_prompts`: tiles of a request's new tokens, which take their splits one after the other;
- `_attend_single`: one token of a request, each of its splits by a program of its own; the last to finish merges them;
- `_attend_shared`: a split that several requests have in common (they share its pages), read once for all of them.

The sum of weights is a tree of additions of two, written out: a reduction across threads would add in an order that depends on
the tile. Every eighth pair of keys is added up, so that the threads that hold a row meet once a split, not once a block.

A row of a tile is one (token, query head of the KV head's group). The work is lists that the host makes for the step: it is
proportional to live tokens, and nobody is padded to the longest request. A program takes every n-th entry of its list, n being
the number of programs, until one that is zero: so a recorded graph serves any number of requests and splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.launch import HOW, IS_INTERPRETED, begin, launch
from tidemill.kernels.cuda.records import (
    MEMBER_SLOT,
    MEMBER_TOKEN,
    MEMBER_WIDTH,
    PROMPT_POSITION,
    PROMPT_ROW,
    PROMPT_TOKEN,
    PROMPT_TOKENS,
    PROMPT_WIDTH,
    PROMPTS,
    SHARED,
    SHARED_MEMBER,
    SHARED_MEMBERS,
    SHARED_ROW,
    SHARED_SPLIT,
    SHARED_WIDTH,
    SINGLE_LISTED,
    SINGLE_POSITION,
    SINGLE_ROW,
    SINGLE_SLOT,
    SINGLE_SPLIT,
    SINGLE_SPLITS,
    SINGLE_TOKEN,
    SINGLE_WIDTH,
)

SPLIT, BLOCK = 512, 64  # a block is a page
SINGLE_ROWS, SHARED_ROWS, PROMPT_ROWS = 16, 64, 64
_LOG2_E = 1.4426950408889634


@triton.jit
def _weigh(scores, top, scale):
    """Weights of a block's scores, the highest score so far, and by how much the sums so far shrink."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # of a row that sees none of these keys
    shift = tl.zeros_like(scores) - (safe_top * scale)[:, None]
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, shift))
    shrink = tl.exp2((top - safe_top) * scale)  # 1 if these keys change nothing
    return weights, new_top, shrink


@triton.jit
def _add_up(weights, total, shrink, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """To four sums a row, those of keys 2i and 2i + 1 modulo 8: what one thread of the matrix unit's four has of a row."""
    two: tl.constexpr = 2 if BLOCK == 64 else 1  # tests have blocks of 16
    parts = tl.reshape(weights, (ROWS, two, two, 2, 4, 2))
    sums = tl.sum(tl.sum(tl.sum(tl.sum(parts, 5), 1), 1), 1)
    return tl.fma(total, tl.zeros_like(total) + shrink[:, None], sums)


@triton.jit
def _in_all(total, ROWS: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(total, (ROWS, 2, 2)), 1), 1)


@triton.jit
def _merge(acc, top, total, more_acc, more_top, more_total, scale):
    new_top = tl.maximum(top, more_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2((top - shift) * scale), tl.exp2((more_top - shift) * scale)
    acc = tl.fma(acc, tl.zeros_like(acc) + old[:, None], more_acc * new[:, None])
    return acc, new_top, tl.fma(total, old, more_total * new)


@triton.jit
def _queries(qkv_ptr, token, head, valid, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    columns = tl.arange(0, DIM)
    at = (token[:, None] * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM + columns[None, :]
    return tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_prompts(
    qkv_ptr, cache_desc, cache_ptr, table_ptr, out_ptr, lists_ptr, layer_run, runs_per_page, table_width, scale,
    WORD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    per_split: tl.constexpr = SPLIT // BLOCK
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * PROMPT_WIDTH
    num = tl.load(tile + PROMPT_TOKENS)
    while num > 0:
        token0 = tl.load(tile + PROMPT_TOKEN).to(tl.int64)
        start, table = tl.load(tile + PROMPT_POSITION), table_ptr + tl.load(tile + PROMPT_ROW).to(tl.int64) * table_width
        token, head, valid = token0 + rows // group, kv_head * group + rows % group, rows // group < num
        positions = start + rows // group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        all_acc, all_total, all_top = acc, tl.zeros((ROWS,), tl.float32), top
        num_whole = (start + 1) // BLOCK  # blocks of which every row sees every key
        for block in range(num_whole):
            if (block % per_split == 0) & (block > 0):
                all_acc, all_top, all_total = _merge(all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), scale)
                acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
                top = tl.full((ROWS,), float("-inf"), tl.float32)
            run = (tl.load(table + block) * runs_per_page + layer_run + kv_head) * BLOCK
            scores = tl.dot(q, cache_desc.load([run, 0]).T)
            weights, top, shrink = _weigh(scores, top, scale)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            acc = tl.dot(weights, cache_desc.load([run + NUM_KV_HEADS * BLOCK, 0]), acc * shrink[:, None])
        for block in tl.range(num_whole, tl.cdiv(start + num, BLOCK), num_stages=1):
            if (block % per_split == 0) & (block > 0):
                all_acc, all_top, all_total = _merge(all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), scale)
                acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
                top = tl.full((ROWS,), float("-inf"), tl.float32)
            keys = block * BLOCK + tl.arange(0, BLOCK)
            there = keys < start + num  # past the end may lie anything
            keys_ptr = cache_ptr + (tl.load(table + block).to(tl.int64) * runs_per_page + layer_run + kv_head) * (BLOCK * DIM)
            at = tl.arange(0, BLOCK) * DIM
            k = tl.load(keys_ptr + (at[None, :] + columns[:, None]), mask=there[None, :], other=0.0)
            scores = tl.where(keys[None, :] <= positions[:, None], tl.dot(q, k), float("-inf"))
            weights, top, shrink = _weigh(scores, top, scale)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            v = tl.load(keys_ptr + NUM_KV_HEADS * BLOCK * DIM + (at[:, None] + columns[None, :]), mask=there[:, None], other=0.0)
            acc = tl.dot(weights, v, acc * shrink[:, None])
        all_acc, all_top, all_total = _merge(all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), scale)
        out_at = (token[:, None] * NUM_HEADS + head[:, None]) * DIM + columns[None, :]
        tl.store(out_ptr + out_at, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])
        tile += tl.num_programs(1) * PROMPT_WIDTH
        num = tl.load(tile + PROMPT_TOKENS)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_shared(
    qkv_ptr, cache_desc, table_ptr, partial_ptr, lists_ptr, layer_run, runs_per_page, table_width, scale,
    WORD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members_ptr = lists_ptr + tl.load(lists_ptr + WORD + 1)  # the list after this one
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * SHARED_WIDTH
    num = tl.load(tile + SHARED_MEMBERS)
    while num > 0:
        member0, split = tl.load(tile + SHARED_MEMBER), tl.load(tile + SHARED_SPLIT)
        table = table_ptr + tl.load(tile + SHARED_ROW).to(tl.int64) * table_width + split * (SPLIT // BLOCK)
        valid = rows // group < num
        member = members_ptr + (member0 + rows // group) * MEMBER_WIDTH
        token = tl.load(member + MEMBER_TOKEN, mask=valid, other=0).to(tl.int64)
        slot = tl.load(member + MEMBER_SLOT, mask=valid, other=0).to(tl.int64)
        head = kv_head * group + rows % group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for block in range(SPLIT // BLOCK):
            run = (tl.load(table + block) * runs_per_page + layer_run + kv_head) * BLOCK
            scores = tl.dot(q, cache_desc.load([run, 0]).T)
            weights, top, shrink = _weigh(scores, top, scale)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(q.dtype)
            acc = tl.dot(weights, cache_desc.load([run + NUM_KV_HEADS * BLOCK, 0]), acc * shrink[:, None])
        part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
        tl.store(part[:, None] + columns[None, :], acc, mask=valid[:, None])
        tl.store(part + DIM, top, mask=valid)
        tl.store(part + DIM + 1, _in_all(total, ROWS), mask=valid)
        tile += tl.num_programs(1) * SHARED_WIDTH
        num = tl.load(tile + SHARED_MEMBERS)


@triton.jit
def _part(part, there, columns, DIM: tl.constexpr):
    """One split's result, or nothing. Read past the first-level cache, which may hold what was there before."""
    acc = tl.load(part[:, None] + columns[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
    top = tl.load(part + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
    return acc, top, tl.load(part + DIM + 1, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_parts(
    partial_ptr, out_ptr, token, slot, num_splits, kv_head, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """In order."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    num_rows: tl.constexpr = triton.next_power_of_2(group)
    rows, columns = tl.arange(0, num_rows), tl.arange(0, DIM)
    head, there = kv_head * group + rows, rows < group
    part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
    acc, weight = tl.zeros((num_rows, DIM), tl.float32), tl.zeros((num_rows,), tl.float32)
    top = tl.full((num_rows,), float("-inf"), tl.float32)
    for first in range(0, num_splits, TOGETHER):
        parts = ()  # type: tuple
        for i in tl.static_range(TOGETHER):  # so many are under way at a time
            is_there = there & (rows * 0 + first + i < num_splits)
            parts = parts + (_part(part + i * NUM_HEADS * (DIM + 2), is_there, columns, DIM),)
        for i in tl.static_range(TOGETHER):
            more, more_top, more_weight = parts[i]
            acc, top, weight = _merge(acc, top, weight, more, more_top, more_weight, scale)
        part += TOGETHER * NUM_HEADS * (DIM + 2)
    out_at = (token * NUM_HEADS + head)[:, None] * DIM + columns[None, :]
    tl.store(out_ptr + out_at, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["layer_run"])
def _attend_single(
    qkv_ptr, cache_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, layer_run, runs_per_page, table_width, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    head, valid = kv_head * group + rows, rows < group
    # The first record was there long before the kernel that this one waits for.
    tile = singles_ptr + tl.program_id(1) * SINGLE_WIDTH
    token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
    row, split, slot0 = tl.load(tile + SINGLE_ROW), tl.load(tile + SINGLE_SPLIT), tl.load(tile + SINGLE_SLOT)
    num_splits, num_here = tl.load(tile + SINGLE_SPLITS), tl.load(tile + SINGLE_LISTED)
    begin(AHEAD)
    while num_splits > 0:
        tile += tl.num_programs(1) * SINGLE_WIDTH
        num_next = tl.load(tile + SINGLE_SPLITS)  # asked for early, it does not keep the program from ending
        token, slot0, table = token.to(tl.int64), slot0.to(tl.int64), table_ptr + row.to(tl.int64) * table_width
        q = _queries(qkv_ptr, token + rows * 0, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for first in range(split * SPLIT, min(split * SPLIT + SPLIT, position + 1), BLOCK):
            keys = first + tl.arange(0, BLOCK)
            there = keys <= position
            keys_ptr = cache_ptr + (tl.load(table + first // BLOCK).to(tl.int64) * runs_per_page + layer_run + kv_head) * (
                BLOCK * DIM
            )
            at = tl.arange(0, BLOCK) * DIM
            k = tl.load(keys_ptr + (at[None, :] + columns[:, None]), mask=there[None, :], other=0.0)
            scores = tl.where(there[None, :], tl.dot(q, k), float("-inf"))
            weights, top, shrink = _weigh(scores, top, scale)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            v = tl.load(keys_ptr + NUM_KV_HEADS * BLOCK * DIM + (at[:, None] + columns[None, :]), mask=there[:, None], other=0.0)
            acc = tl.dot(weights, v, acc * shrink[:, None])
        weight = _in_all(total, ROWS)
        if num_splits == 1:
            out_at = (token * NUM_HEADS + head)[:, None] * DIM + columns[None, :]
            tl.store(out_ptr + out_at, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])
        else:
            part = partial_ptr + ((slot0 + split) * NUM_HEADS + head) * (DIM + 2)
            tl.store(part[:, None] + columns[None, :], acc, mask=valid[:, None])
            tl.store(part + DIM, top, mask=valid)
            tl.store(part + DIM + 1, weight, mask=valid)
            tl.debug_barrier()
            done = tl.atomic_add(done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
            if done == num_here - 1:  # the last of them merges all
                tl.store(done_ptr + token * NUM_KV_HEADS + kv_head, 0)
                _merge_parts(
                    partial_ptr, out_ptr, token, slot0, num_splits, kv_head, scale, NUM_HEADS, NUM_KV_HEADS, DIM, TOGETHER
                )
        token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
        row, split, slot0 = tl.load(tile + SINGLE_ROW), tl.load(tile + SINGLE_SPLIT), tl.load(tile + SINGLE_SLOT)
        num_splits, num_here = num_next, tl.load(tile + SINGLE_LISTED)


class PromptAttention(Protocol):
    """Somebody else's attention, for the prompts of a step."""

    def attend(self, qkv_TC: torch.Tensor, cache: torch.Tensor, layer: int, out_TC: torch.Tensor, num_heads: int) -> None: ...


@dataclass(slots=True)
class Lists:
    """A step's work on the device, and how many programs each kernel gets (0: it is not launched). Each list ends in as many
    entries of zeros as there are programs."""

    words: torch.Tensor  # int32: HEADER, and lists where it says
    singles: torch.Tensor  # int32
    num_single: int
    num_shared: int
    num_prompts: int
    partial: torch.Tensor  # float32 [slots, heads, D + 2]
    done: torch.Tensor  # int32 [tokens, KV heads], zeros
    prompts: PromptAttention | None = None  # None: ours


def attend(
    qkv_TC: torch.Tensor, cache: torch.Tensor, layer: int, table: torch.Tensor, lists: Lists, out_TC: torch.Tensor, num_heads: int
) -> None:
    """`cache`: [P, layers, 2, G, S, D] with pages of a block. Queries are read from `qkv_TC`, results go to `out_TC`."""
    _, num_layers, _, num_kv_heads, page_size, dim = cache.shape
    assert page_size == BLOCK
    desc = TensorDescriptor.from_tensor(cache.view(-1, dim), [BLOCK, dim]) if lists.num_shared or lists.num_prompts else None
    where = (layer * 2 * num_kv_heads, num_layers * 2 * num_kv_heads, table.shape[1], dim**-0.5 * _LOG2_E)
    group = num_heads // num_kv_heads
    common = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "DIM": dim, "SPLIT": SPLIT, "BLOCK": BLOCK, **HOW}
    if lists.num_shared:
        launch(
            _attend_shared, (num_kv_heads, lists.num_shared),
            qkv_TC, desc, table, lists.partial, lists.words, *where, WORD=SHARED, ROWS=shared_rows(group),
            num_warps=4, num_stages=2, **common,
        )  # fmt: skip
    if lists.num_single:
        launch(
            _attend_single, (num_kv_heads, lists.num_single),
            qkv_TC, cache, table, out_TC, lists.partial, lists.done, lists.singles, *where,
            ROWS=max(SINGLE_ROWS, triton.next_power_of_2(group)), **_single_how(qkv_TC.shape[0], group), **common,
        )  # fmt: skip
    if lists.prompts is not None:
        lists.prompts.attend(qkv_TC, cache, layer, out_TC, num_heads)
    elif lists.num_prompts and by_roles(dim):
        from tidemill.kernels.cuda import hopper_attention

        hopper_attention.attend_prompts(
            qkv_TC, cache, table, out_TC, lists.words, where, lists.num_prompts, PROMPTS, num_heads, SPLIT
        )
    elif lists.num_prompts:
        launch(
            _attend_prompts, (num_kv_heads, lists.num_prompts),
            qkv_TC, desc, cache, table, out_TC, lists.words, *where, WORD=PROMPTS,
            ROWS=prompt_rows(group, dim), num_warps=4, num_stages=2, **common,
        )  # fmt: skip


def _single_how(num_tokens: int, group: int) -> dict[str, int]:
    """A few requests are done soonest by four warps for each of their splits, and so are many whose tiles are mostly empty; else
    two read memory fastest."""
    if num_tokens <= 16 or group <= 2:
        return {"num_warps": 4, "num_stages": 5, "TOGETHER": 8 if num_tokens <= 16 else 4}
    return {"num_warps": 2, "num_stages": 3, "TOGETHER": 4}


@cache
def by_roles(dim: int) -> bool:
    """Whether prompts go through the kernel made for this GPU."""
    return not IS_INTERPRETED and 64 <= dim <= 128 and torch.cuda.get_device_capability()[0] == 9


def num_prompt_programs(num_tiles: int, num_kv_heads: int, dim: int) -> int:
    """The kernel by roles has one program a multiprocessor, for all heads; of the other, each head has one for every tile."""
    if not by_roles(dim):
        return num_tiles + 16
    return min(num_tiles * num_kv_heads, torch.cuda.get_device_properties().multi_processor_count)


def shared_rows(group: int) -> int:
    return max(SHARED_ROWS, triton.next_power_of_2(group))


def prompt_rows(group: int, dim: int) -> int:
    return max(128 if by_roles(dim) else PROMPT_ROWS, triton.next_power_of_2(group))
