"""Attention over the paged cache: any number of query tokens per request, grouped query heads in
one tile. Causal; or, of prompts that are computed whole, bidirectional.

The order of summation depends on a query's position alone. Keys are taken in blocks of 64 from
position 0 on; blocks within a split of 512 positions are merged by the online softmax, splits are
merged in order. Three kernels keep that order (and those made for one kind of GPU:
hopper_attention.py, hopper_single.py):

- `_attend_prompts`: tiles of a request's new tokens, which take their splits one after the other;
- `_attend_single`: one token of a request, each of its splits by a program of its own; the last to finish merges them. A token
  and the drafts after it have their last split in common, which is read once;
- `_attend_shared`: a split that several requests have in common (they share its pages), read once for all of them.

With a window, blocks and splits that a row does not see change none of its bits, so they are left
out where no row sees them. A sink is a split that comes before all others, of one key without a
value.

The sum of weights is a tree of additions of two, written out: a reduction across threads would add
in an order that depends on the tile. Every eighth pair of keys is added up, so that the threads
that hold a row meet once a split, not once a block.

A row of a tile is one (token, query head of the KV head's group). The work is lists that the host
makes for the step: it is proportional to live tokens, and nobody is padded to the longest request.
A program takes every n-th entry of its list, n being the number of programs, until one that is
zero: so a recorded graph serves any number of requests and splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import begin
from tidemill.kernels.cuda.records import (
    MEMBER_SLOT,
    MEMBER_TOKEN,
    MEMBER_WIDTH,
    PROMPT_POSITION,
    PROMPT_ROW,
    PROMPT_TOKEN,
    PROMPT_TOKENS,
    PROMPT_WIDTH,
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
    SINGLE_TOKENS,
    SINGLE_WIDTH,
)

# Weights are relative to the highest score of a split's first block, and from then on to one that
# is higher by more than this, as a power of two: they are 256 at most, sums so far are hardly ever
# multiplied, and the results are as exact.
ROOM = tl.constexpr(8.0)


@triton.jit
def _weigh(scores, top, scale):
    """Weights of a block's scores, the score that they are relative to, and by how much the sums so
    far shrink."""
    highest = tl.max(scores, 1)
    new_top = tl.where((highest - top) * scale > ROOM, highest, top)
    # of a row that sees none of these keys
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    shift = tl.zeros_like(scores) - (safe_top * scale)[:, None]
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, shift))
    shrink = tl.exp2((top - safe_top) * scale)  # 1 if these keys change nothing
    return weights, new_top, shrink


@triton.jit
def _add_up(weights, total, shrink, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """To four sums a row, those of keys 2i and 2i + 1 modulo 8: what one thread of the matrix
    unit's four has of a row."""
    two: tl.constexpr = 2 if BLOCK == 64 else 1  # tests have blocks of 16
    parts = tl.reshape(weights, (ROWS, two, two, 2, 4, 2))
    sums = tl.sum(tl.sum(tl.sum(tl.sum(parts, 5), 1), 1), 1)
    return tl.fma(total, tl.zeros_like(total) + shrink[:, None], sums)


@triton.jit
def _in_all(total, ROWS: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(total, (ROWS, 2, 2)), 1), 1)


@triton.jit
def _capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(score * scale / softcap). Without a softcap the scale is applied with the
    softmax."""
    if SOFTCAP:
        power = tl.exp2(scores * (2.0 * 1.4426950408889634 * scale / softcap))
        scores = softcap - 2.0 * softcap / (power + 1.0)
    return scores


@triton.jit
def _biased(
    scores,
    bias_ptr,
    bias_width,
    head,
    positions,
    keys,
    seen,
    scale,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The scores with the value that the head's row of the table has for the distance of each key,
    that of 0 in the middle."""
    if BIAS:
        at = (head * bias_width + bias_width // 2 - positions)[:, None] + keys[None, :]
        bias = tl.load(bias_ptr + at, mask=seen, other=0.0)
        scores = scores + bias if SOFTCAP else tl.fma(scores, tl.zeros_like(scores) + scale, bias)
    return scores


@triton.jit
def _sink(sinks_ptr, head, valid, like, factor, SINKS: tl.constexpr):
    """The top and the total of a row before its first key. `factor`: of the softmax's exponents."""
    if SINKS:
        return tl.load(sinks_ptr + head, mask=valid, other=0.0).to(
            tl.float32
        ) * 1.4426950408889634 / factor, like + 1.0
    return like + float("-inf"), like


@triton.jit
def _merge(acc, top, total, more_acc, more_top, more_total, scale):
    new_top = tl.maximum(top, more_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2((top - shift) * scale), tl.exp2((more_top - shift) * scale)
    acc = tl.fma(acc, tl.zeros_like(acc) + old[:, None], more_acc * new[:, None])
    # This way round: a total that is known to be 1, as a sink's, gives the same sum.
    return acc, new_top, tl.fma(more_total, new, total * old)


@triton.jit
def _queries(
    qkv_ptr,
    token,
    head,
    valid,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    columns = tl.arange(0, DIM)
    at = (token[:, None] * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM + columns[None, :]
    return tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_prompts(
    qkv_ptr, cache_desc, cache_ptr, table_ptr, out_ptr, lists_ptr, sinks_ptr, bias_ptr, ends_ptr, layer_run, runs_per_page,
    table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, BOTH_WAYS: tl.constexpr,
    WORD: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention. Reference: `attention.attention_reference`."""
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    per_split: tl.constexpr = SPLIT // BLOCK
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * PROMPT_WIDTH
    num = tl.load(tile + PROMPT_TOKENS)
    while num > 0:
        token0 = tl.load(tile + PROMPT_TOKEN).to(tl.int64)
        start, row = tl.load(tile + PROMPT_POSITION), tl.load(tile + PROMPT_ROW).to(tl.int64)
        table = table_ptr + row * table_width
        token, head, valid = (
            token0 + rows // group,
            kv_head * group + rows % group,
            rows // group < num,
        )
        positions = start + rows // group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        all_acc = acc
        all_top, all_total = _sink(
            sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS
        )
        end = start + num  # after the last key
        num_whole = (start + 1) // BLOCK  # blocks of which every row sees every key
        if BOTH_WAYS:
            end = tl.load(ends_ptr + row)
            num_whole = end // BLOCK
        first = 0
        if WINDOW:  # none is known to be whole
            first = tl.maximum(start - window + 1, 0) // BLOCK
            num_whole = first
        for block in range(first, num_whole):
            if (block % per_split == 0) & (block > first):
                all_acc, all_top, all_total = _merge(
                    all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), factor
                )
                acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
                top = tl.full((ROWS,), float("-inf"), tl.float32)
            run = (tl.load(table + block) * runs_per_page + layer_run + kv_head) * BLOCK
            scores = _capped(tl.dot(q, cache_desc.load([run, 0]).T), scale, softcap, SOFTCAP)
            keys = block * BLOCK + tl.arange(0, BLOCK)
            whole = valid[:, None] & (keys >= 0)[None, :]
            scores = _biased(
                scores, bias_ptr, bias_width, head, positions, keys, whole, scale, SOFTCAP, BIAS
            )
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            acc = tl.dot(
                weights, cache_desc.load([run + NUM_KV_HEADS * BLOCK, 0]), acc * shrink[:, None]
            )
        for block in tl.range(num_whole, tl.cdiv(end, BLOCK), num_stages=1):
            if (block % per_split == 0) & (block > first):
                all_acc, all_top, all_total = _merge(
                    all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), factor
                )
                acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
                top = tl.full((ROWS,), float("-inf"), tl.float32)
            keys = block * BLOCK + tl.arange(0, BLOCK)
            there = keys < end  # past the end may lie anything
            keys_ptr = cache_ptr + (
                tl.load(table + block).to(tl.int64) * runs_per_page + layer_run + kv_head
            ) * (BLOCK * DIM)
            at = tl.arange(0, BLOCK) * DIM
            k = tl.load(keys_ptr + (at[None, :] + columns[:, None]), mask=there[None, :], other=0.0)
            seen = keys[None, :] <= positions[:, None]
            if BOTH_WAYS:
                seen = (rows >= 0)[:, None] & there[None, :]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - window
            scores = _capped(tl.dot(q, k), scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(
                scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS
            )
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            v = tl.load(
                keys_ptr + NUM_KV_HEADS * BLOCK * DIM + (at[:, None] + columns[None, :]),
                mask=there[:, None],
                other=0.0,
            )
            acc = tl.dot(weights, v, acc * shrink[:, None])
        all_acc, all_top, all_total = _merge(
            all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), factor
        )
        out_at = (token[:, None] * NUM_HEADS + head[:, None]) * DIM + columns[None, :]
        tl.store(
            out_ptr + out_at,
            (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty),
            mask=valid[:, None],
        )
        tile += tl.num_programs(1) * PROMPT_WIDTH
        num = tl.load(tile + PROMPT_TOKENS)


@triton.jit
def _first_seen(positions, valid, window, split, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """The first block of a split that a member sees. Those before it are given back: there, the
    table has the null page, to which padding is written, and no weight of 0 makes 0 of what is no
    number."""
    lowest = tl.min(tl.where(valid, positions, 2**30), 0)
    return tl.maximum(lowest - window + 1 - split * SPLIT, 0) // BLOCK


@triton.jit(do_not_specialize=["layer_run"])
def _attend_shared(
    qkv_ptr, cache_desc, table_ptr, partial_ptr, lists_ptr, positions_ptr, bias_ptr, layer_run, runs_per_page, table_width,
    scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, WORD: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention. Reference: `attention.attention_reference`."""
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members_ptr = lists_ptr + tl.load(lists_ptr + WORD + 1)  # the list after this one
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * SHARED_WIDTH
    num = tl.load(tile + SHARED_MEMBERS)
    while num > 0:
        member0, split = tl.load(tile + SHARED_MEMBER), tl.load(tile + SHARED_SPLIT)
        table = (
            table_ptr
            + tl.load(tile + SHARED_ROW).to(tl.int64) * table_width
            + split * (SPLIT // BLOCK)
        )
        valid = rows // group < num
        member = members_ptr + (member0 + rows // group) * MEMBER_WIDTH
        token = tl.load(member + MEMBER_TOKEN, mask=valid, other=0).to(tl.int64)
        slot = tl.load(member + MEMBER_SLOT, mask=valid, other=0).to(tl.int64)
        if WINDOW or BIAS:
            positions = tl.load(positions_ptr + token, mask=valid, other=0)
        head = kv_head * group + rows % group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        first = 0
        if WINDOW:
            first = _first_seen(positions, valid, window, split, SPLIT, BLOCK)
        for block in range(first, SPLIT // BLOCK):
            run = (tl.load(table + block) * runs_per_page + layer_run + kv_head) * BLOCK
            scores = _capped(tl.dot(q, cache_desc.load([run, 0]).T), scale, softcap, SOFTCAP)
            keys = split * SPLIT + block * BLOCK + tl.arange(0, BLOCK)
            if BIAS:
                whole = valid[:, None] & (keys >= 0)[None, :]
                scores = _biased(
                    scores, bias_ptr, bias_width, head, positions, keys, whole, scale, SOFTCAP, BIAS
                )
            if WINDOW:
                scores = tl.where(
                    keys[None, :] > positions[:, None] - window, scores, float("-inf")
                )
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(q.dtype)
            acc = tl.dot(
                weights, cache_desc.load([run + NUM_KV_HEADS * BLOCK, 0]), acc * shrink[:, None]
            )
        part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
        tl.store(part[:, None] + columns[None, :], acc, mask=valid[:, None])
        tl.store(part + DIM, top, mask=valid)
        tl.store(part + DIM + 1, _in_all(total, ROWS), mask=valid)
        tile += tl.num_programs(1) * SHARED_WIDTH
        num = tl.load(tile + SHARED_MEMBERS)


@triton.jit
def _part(part, there, columns, DIM: tl.constexpr):
    """One split's result, or nothing. Read past the first-level cache, which may hold what was
    there before."""
    acc = tl.load(
        part[:, None] + columns[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
    )
    top = tl.load(part + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
    return acc, top, tl.load(part + DIM + 1, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_parts(
    partial_ptr, out_ptr, sinks_ptr, token, slot, num_splits, kv_head, factor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr, SINKS: tl.constexpr,
    PARTS: tl.constexpr = 1,
):  # fmt: skip
    """In order. `PARTS`: 2: they have the even columns first, then the odd ones; 4: so have the
    first half and the second."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    num_rows: tl.constexpr = triton.next_power_of_2(group)
    rows, columns = tl.arange(0, num_rows), tl.arange(0, DIM)
    head, there = kv_head * group + rows, rows < group
    part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
    acc = tl.zeros((num_rows, DIM), tl.float32)
    top, weight = _sink(sinks_ptr, head, there, tl.zeros((num_rows,), tl.float32), factor, SINKS)
    for first in range(0, num_splits, TOGETHER):
        parts = ()  # type: tuple
        for i in tl.static_range(TOGETHER):  # so many are under way at a time
            is_there = there & (rows * 0 + first + i < num_splits)
            parts = parts + (_part(part + i * NUM_HEADS * (DIM + 2), is_there, columns, DIM),)
        for i in tl.static_range(TOGETHER):
            more, more_top, more_weight = parts[i]
            acc, top, weight = _merge(acc, top, weight, more, more_top, more_weight, factor)
        part += TOGETHER * NUM_HEADS * (DIM + 2)
    if PARTS > 1:
        part_of = columns // (DIM // PARTS)
        columns = 2 * (columns % (DIM // PARTS)) + part_of % 2 + part_of // 2 * (DIM // 2)
    out_at = (token * NUM_HEADS + head)[:, None] * DIM + columns[None, :]
    tl.store(
        out_ptr + out_at, (acc / weight[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None]
    )


@triton.jit(do_not_specialize=["layer_run", "table_width", "head_width"])
def _attend_single(
    qkv_ptr, cache_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, sinks_ptr, bias_ptr, paths_ptr, layer_run,
    runs_per_page, table_width, head_width, scale, factor, softcap, window, bias_width, path_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, TREES: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """`TREES`: a token may be a draft of a tree. Its record in `paths` says from which position on
    its ancestors are not where they would be in a sequence, and where they are; they are read into
    the places of their positions, so bits are the same. Reference:
    `attention.attention_reference`."""
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)
    # `behind`: its token after the record's first
    head, behind = kv_head * group + rows % group, rows // group
    # The first record was there long before the kernel that this one waits for.
    tile = singles_ptr + tl.program_id(1) * SINGLE_WIDTH
    token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
    row, split, slot0 = (
        tl.load(tile + SINGLE_ROW),
        tl.load(tile + SINGLE_SPLIT),
        tl.load(tile + SINGLE_SLOT),
    )
    num_splits, num_here = tl.load(tile + SINGLE_SPLITS), tl.load(tile + SINGLE_LISTED)
    num_tokens = tl.load(tile + SINGLE_TOKENS)
    begin(AHEAD)
    while num_splits > 0:
        tile += tl.num_programs(1) * SINGLE_WIDTH
        # asked for early, it does not keep the program from ending
        num_next = tl.load(tile + SINGLE_SPLITS)
        token, slot0 = token.to(tl.int64), slot0.to(tl.int64)
        table = table_ptr + row.to(tl.int64) * table_width + kv_head * head_width
        valid, positions, end = behind < num_tokens, position + behind, position + num_tokens
        q = _queries(qkv_ptr, token + behind, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        acc, total = tl.zeros((ROWS, DIM), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        begins = split * SPLIT
        if WINDOW:
            begins = tl.maximum(begins, tl.maximum(position - window + 1, 0) // BLOCK * BLOCK)
        for first in range(begins, min(split * SPLIT + SPLIT, end), BLOCK):
            keys = first + tl.arange(0, BLOCK)
            there = keys < end
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - window
            if TREES:
                path = paths_ptr + token * path_width
                base = tl.load(path)
                moved = there & (keys >= base)
                place = tl.where(moved, tl.load(path + 1 + keys - base, mask=moved, other=0), keys)
                page = tl.load(table + place // BLOCK, mask=there, other=0).to(tl.int64)
                keys_ptr = cache_ptr
                at = (page * runs_per_page + layer_run + kv_head) * (
                    BLOCK * DIM
                ) + place % BLOCK * DIM
            else:
                keys_ptr = cache_ptr + (
                    tl.load(table + first // BLOCK).to(tl.int64) * runs_per_page
                    + layer_run
                    + kv_head
                ) * (BLOCK * DIM)
                at = tl.arange(0, BLOCK) * DIM
            k = tl.load(keys_ptr + (at[None, :] + columns[:, None]), mask=there[None, :], other=0.0)
            scores = _capped(tl.dot(q, k), scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(
                scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS
            )
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            weights = weights.to(cache_ptr.dtype.element_ty)
            v = tl.load(
                keys_ptr + NUM_KV_HEADS * BLOCK * DIM + (at[:, None] + columns[None, :]),
                mask=there[:, None],
                other=0.0,
            )
            acc = tl.dot(weights, v, acc * shrink[:, None])
        weight = _in_all(total, ROWS)
        if num_splits == 1:
            if SINKS:
                sink, one = _sink(
                    sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS
                )
                acc, top, weight = _merge(
                    tl.zeros((ROWS, DIM), tl.float32), sink, one, acc, top, weight, factor
                )
            out_at = ((token + behind) * NUM_HEADS + head)[:, None] * DIM + columns[None, :]
            tl.store(
                out_ptr + out_at,
                (acc / weight[:, None]).to(out_ptr.dtype.element_ty),
                mask=valid[:, None],
            )
        else:
            part = partial_ptr + ((slot0 + split + behind * num_splits) * NUM_HEADS + head) * (
                DIM + 2
            )
            tl.store(part[:, None] + columns[None, :], acc, mask=valid[:, None])
            tl.store(part + DIM, top, mask=valid)
            tl.store(part + DIM + 1, weight, mask=valid)
            tl.debug_barrier()
            for _ in range(num_tokens):
                done = tl.atomic_add(
                    done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu"
                )
                if done == num_here - 1:  # the last of them merges all
                    tl.store(done_ptr + token * NUM_KV_HEADS + kv_head, 0)
                    _merge_parts(
                        partial_ptr, out_ptr, sinks_ptr, token, slot0, num_splits, kv_head, factor, NUM_HEADS, NUM_KV_HEADS,
                        DIM, TOGETHER, SINKS,
                    )  # fmt: skip
                token, slot0 = token + 1, slot0 + num_splits
        token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
        row, split, slot0 = (
            tl.load(tile + SINGLE_ROW),
            tl.load(tile + SINGLE_SPLIT),
            tl.load(tile + SINGLE_SLOT),
        )
        num_splits, num_here = num_next, tl.load(tile + SINGLE_LISTED)
        num_tokens = tl.load(tile + SINGLE_TOKENS)
