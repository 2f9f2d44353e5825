"""Attention over a KV cache of 8-bit values with a scale for each token and head, fp8 (e4m3) or
int8; or of 4-bit values, int4, with a scale and an offset.

The same work lists, splits and order of summation as paged_attention.py, whose parts it uses. A
tile is loaded as it is stored, two values (or four) in a word of 16 bits, and becomes bfloat16 in
registers: value times scale, rounded once. So matmuls stay those of bfloat16 with sums in float32,
and no copy of a cache in bfloat16 is in memory (but of what a step's prompts read in a layer:
page_copies.py).

A word goes through the matrix unit's loads as 16-bit values do and is taken apart there. So
dimensions come in parts: the even ones, then the odd ones; of int4, those of the first half of a
head, then those of the second. Scores add the products of one part after the other, in every
kernel; results of a split are kept in parts until they are written.

Single tokens have few rows, so keys and values are the first operand of their matmuls, whose tile
has 16 rows at least, and queries the second, with 8. Sums over dimensions and over keys have the
same order either way, and so the same bits.

Scales of fp8 are powers of two. So they may as well meet scores and weights as keys and values: no
bit changes. Single tokens, of which each has its keys and values to itself, do that: it takes half
the instructions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.attention_lists import Lists, prompt_rows, shared_rows, single_rows
from tidemill.kernels.cuda.launch import begin, launch
from tidemill.kernels.cuda.paged_attention import (
    _add_up,
    _biased,
    _capped,
    _first_seen,
    _in_all,
    _merge,
    _merge_parts,
    _sink,
    _weigh,
)
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
    SINGLE_TOKENS,
    SINGLE_WIDTH,
)
from tidemill.kernels.cuda.scaled_values import KINDS, _parts, _places, _plain, _scales, places


@triton.jit
def _scores(
    q,
    values_ptr,
    scales_ptr,
    there,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`values_ptr`, `scales_ptr`: of a page's keys of a head."""
    k = _parts(values_ptr, scales_ptr, there, False, DIM, BLOCK, KIND, AHEAD)
    scores = tl.dot(q[1], k[1], tl.dot(q[0], k[0]))
    if KIND == 2:
        scores = tl.dot(q[3], k[3], tl.dot(q[2], k[2], scores))
    return scores


@triton.jit
def _scores_by_key(
    q,
    values_ptr,
    scales_ptr,
    there,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The same of queries as `_columns_of` makes them."""
    if KIND == 1:
        k = _plain(tl.load(values_ptr + _places(True, DIM, BLOCK, KIND)), True, AHEAD)
        scores = tl.trans(tl.dot(k[1], q[1], tl.dot(k[0], q[0])))
        return scores * _scales(scales_ptr, there, False, BLOCK)[None, :] * q[2][:, None]
    else:
        k = _parts(values_ptr, scales_ptr, there, True, DIM, BLOCK, KIND, AHEAD)
        scores = tl.dot(k[1], q[1], tl.dot(k[0], q[0]))
        if KIND == 2:
            scores = tl.dot(k[3], q[3], tl.dot(k[2], q[2], scores))
        return tl.trans(scores)


@triton.jit
def _add_values(
    acc, weights, shrink, values_ptr, scales_ptr, there,
    DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    values = _parts(values_ptr, scales_ptr, there, True, DIM, BLOCK, KIND, AHEAD)
    weights = weights.to(values[0].dtype)
    made = ()  # type: tuple
    for i in tl.static_range(4 if KIND == 2 else 2):
        made = made + (tl.dot(weights, values[i], acc[i] * shrink[:, None]),)
    return made


@triton.jit
def _add_values_by_key(
    acc, weights, shrink, values_ptr, scales_ptr, there,
    DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """To results whose parts have a column for each query; of fp8, times 2**-20."""
    if KIND == 1:
        values = _plain(tl.load(values_ptr + _places(False, DIM, BLOCK, KIND)), False, AHEAD)
        scales = _scales(scales_ptr, there, False, BLOCK) * 1.2676506002282294e30  # 2**100
        weights = weights.to(values[0].dtype) * scales.to(values[0].dtype)[None, :]
    else:
        values = _parts(values_ptr, scales_ptr, there, False, DIM, BLOCK, KIND, AHEAD)
    weights = tl.trans(weights.to(values[0].dtype))
    made = ()  # type: tuple
    for i in tl.static_range(4 if KIND == 2 else 2):
        made = made + (tl.dot(values[i], weights, acc[i] * shrink[None, :]),)
    return made


@triton.jit
def _columns_of(q, KIND: tl.constexpr, AHEAD: tl.constexpr):
    """Queries with a column for each. For fp8 they become float16: times a power of two that brings
    the largest value of a query to between 2**14 and 2**15; and what scores are multiplied by, to
    be what they would be without."""
    if KIND == 1:
        even, odd = q[0].to(tl.float32), q[1].to(tl.float32)
        top = (
            tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)).to(tl.int32, bitcast=True)
            & 0x7F800000
        )
        top = tl.minimum(tl.maximum(top, 30 << 23), 253 << 23)
        up, down = (
            ((254 << 23) - top).to(tl.float32, bitcast=True) * 16384.0,
            top.to(tl.float32, bitcast=True) / 16384.0,
        )
        even, odd = even * up[:, None], odd * up[:, None]
        if AHEAD:
            even, odd = even.to(tl.float16), odd.to(tl.float16)
        return tl.trans(even), tl.trans(odd), down
    else:
        return _turned(q, KIND)


@triton.jit
def _turned(parts, KIND: tl.constexpr):
    """Parts with a row for each query as parts with a column for each, or the other way round."""
    made = ()  # type: tuple
    for i in tl.static_range(4 if KIND == 2 else 2):
        made = made + (tl.trans(parts[i]),)
    return made


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr):
    """The parts of a result of zeros."""
    made = ()  # type: tuple
    for _ in tl.static_range(4 if KIND == 2 else 2):
        made = made + (tl.zeros((ROWS, DIM // 4 if KIND == 2 else DIM // 2), tl.float32),)
    return made


@triton.jit
def _merge_all(acc, top, total, more, more_top, more_total, factor, KIND: tl.constexpr):
    made = ()  # type: tuple
    for i in tl.static_range(4 if KIND == 2 else 2):
        one, new_top, new_total = _merge(acc[i], top, total, more[i], more_top, more_total, factor)
        made = made + (one,)
    return made, new_top, new_total


@triton.jit
def _queries(
    qkv_ptr,
    token,
    head,
    valid,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
):
    at = (token[:, None] * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM + tl.arange(
        0, DIM
    )[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    if KIND == 2:
        first, second = tl.split(
            tl.permute(tl.reshape(q, (q.shape[0], 2, DIM // 4, 2)), (0, 2, 3, 1))
        )
        return tl.split(first) + tl.split(second)
    else:
        return tl.split(tl.reshape(q, (q.shape[0], DIM // 2, 2)))


@triton.jit
def _put(out_ptr, acc, weight, valid, DIM: tl.constexpr, KIND: tl.constexpr):
    """The parts over the sums of weights. `out_ptr`: of each row."""
    for i in tl.static_range(4 if KIND == 2 else 2):
        to = (
            out_ptr[:, None]
            + (2 * tl.arange(0, acc[i].shape[1]) + i % 2 + i // 2 * (DIM // 2))[None, :]
        )
        tl.store(to, (acc[i] / weight[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _put_part(part, acc, top, weight, valid, DIM: tl.constexpr, KIND: tl.constexpr):
    for i in tl.static_range(4 if KIND == 2 else 2):
        to = part[:, None] + (tl.arange(0, acc[i].shape[1]) + i * acc[i].shape[1])[None, :]
        tl.store(to, acc[i], mask=valid[:, None])
    tl.store(part + DIM, top, mask=valid)
    tl.store(part + DIM + 1, weight, mask=valid)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_prompts_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, out_ptr, lists_ptr, sinks_ptr, bias_ptr, layer_run, page_words, page_scales,
    table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, WORD: tl.constexpr, KIND: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention over 8-bit and 4-bit keys and values. Reference: `attention.attention_reference`."""
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # of a page's keys or values of one head
    num_words: tl.constexpr = BLOCK * DIM // 4 if KIND == 2 else BLOCK * DIM // 2
    num_scales: tl.constexpr = BLOCK if KIND == 2 else BLOCK // 2
    rows = tl.arange(0, ROWS)
    lowest = tl.full((ROWS,), float("-inf"), tl.float32)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * PROMPT_WIDTH
    num = tl.load(tile + PROMPT_TOKENS)
    while num > 0:
        token0 = tl.load(tile + PROMPT_TOKEN).to(tl.int64)
        start, row = tl.load(tile + PROMPT_POSITION), tl.load(tile + PROMPT_ROW).to(tl.int64)
        token, head, valid = (
            token0 + rows // group,
            kv_head * group + rows % group,
            rows // group < num,
        )
        positions = start + rows // group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM, KIND)
        acc, top, total = _nothing(ROWS, DIM, KIND), lowest, tl.zeros((ROWS, 4), tl.float32)
        all_acc = _nothing(ROWS, DIM, KIND)
        all_top, all_total = _sink(
            sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS
        )
        end = start + num  # after the last key
        first = 0
        if WINDOW:
            first = tl.maximum(start - window + 1, 0) // BLOCK
        for block in range(first, tl.cdiv(end, BLOCK)):
            if (block % (SPLIT // BLOCK) == 0) & (block > first):
                all_acc, all_top, all_total = _merge_all(
                    all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), factor, KIND
                )
                acc, top, total = _nothing(ROWS, DIM, KIND), lowest, tl.zeros((ROWS, 4), tl.float32)
            keys = block * BLOCK + tl.arange(0, BLOCK)
            there = keys < end
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - window
            page = tl.load(table_ptr + row * table_width + block).to(tl.int64)
            words = values_ptr + page * page_words + (layer_run + kv_head) * num_words
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * num_scales
            scores = _scores(q, words, scales_at, there, DIM, BLOCK, KIND, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(
                scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS
            )
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales_at += NUM_KV_HEADS * num_scales
            words += NUM_KV_HEADS * num_words
            acc = _add_values(
                acc, weights, shrink, words, scales_at, there, DIM, BLOCK, KIND, AHEAD
            )
        all_acc, all_top, all_total = _merge_all(
            all_acc, all_top, all_total, acc, top, _in_all(total, ROWS), factor, KIND
        )
        _put(out_ptr + (token * NUM_HEADS + head) * DIM, all_acc, all_total, valid, DIM, KIND)
        tile += tl.num_programs(1) * PROMPT_WIDTH
        num = tl.load(tile + PROMPT_TOKENS)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_shared_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, partial_ptr, lists_ptr, positions_ptr, bias_ptr, layer_run, page_words,
    page_scales, table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, WORD: tl.constexpr, KIND: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention over 8-bit and 4-bit keys and values. Reference: `attention.attention_reference`."""
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # of a page's keys or values of one head
    num_words: tl.constexpr = BLOCK * DIM // 4 if KIND == 2 else BLOCK * DIM // 2
    num_scales: tl.constexpr = BLOCK if KIND == 2 else BLOCK // 2
    members_ptr = lists_ptr + tl.load(lists_ptr + WORD + 1)  # the list after this one
    rows = tl.arange(0, ROWS)
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
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM, KIND)
        acc = _nothing(ROWS, DIM, KIND)
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        first = 0
        if WINDOW:
            first = _first_seen(positions, valid, window, split, SPLIT, BLOCK)
        for block in range(first, SPLIT // BLOCK):
            keys = split * SPLIT + block * BLOCK + tl.arange(0, BLOCK)
            there = keys >= 0
            page = tl.load(table + block).to(tl.int64)
            words = values_ptr + page * page_words + (layer_run + kv_head) * num_words
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * num_scales
            scores = _scores(q, words, scales_at, there, DIM, BLOCK, KIND, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            if BIAS:
                whole = valid[:, None] & there[None, :]
                scores = _biased(
                    scores, bias_ptr, bias_width, head, positions, keys, whole, scale, SOFTCAP, BIAS
                )
            if WINDOW:
                scores = tl.where(
                    keys[None, :] > positions[:, None] - window, scores, float("-inf")
                )
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales_at += NUM_KV_HEADS * num_scales
            words += NUM_KV_HEADS * num_words
            acc = _add_values(
                acc, weights, shrink, words, scales_at, there, DIM, BLOCK, KIND, AHEAD
            )
        part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
        _put_part(part, acc, top, _in_all(total, ROWS), valid, DIM, KIND)
        tile += tl.num_programs(1) * SHARED_WIDTH
        num = tl.load(tile + SHARED_MEMBERS)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_single_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, sinks_ptr, bias_ptr, layer_run,
    page_words, page_scales, table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Attention over 8-bit and 4-bit keys and values. Reference: `attention.attention_reference`."""
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # of a page's keys or values of one head
    num_words: tl.constexpr = BLOCK * DIM // 4 if KIND == 2 else BLOCK * DIM // 2
    num_scales: tl.constexpr = BLOCK if KIND == 2 else BLOCK // 2
    rows = tl.arange(0, ROWS)
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
        token, slot0, table = (
            token.to(tl.int64),
            slot0.to(tl.int64),
            table_ptr + row.to(tl.int64) * table_width,
        )
        valid, positions, end = behind < num_tokens, position + behind, position + num_tokens
        q = _columns_of(
            _queries(qkv_ptr, token + behind, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM, KIND),
            KIND,
            AHEAD,
        )
        acc = _turned(_nothing(ROWS, DIM, KIND), KIND)
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        begins = split * SPLIT
        if WINDOW:
            begins = tl.maximum(begins, tl.maximum(position - window + 1, 0) // BLOCK * BLOCK)
        for first in range(begins, min(split * SPLIT + SPLIT, end), BLOCK):
            keys = first + tl.arange(0, BLOCK)
            there = keys < end
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - window
            page = tl.load(table + first // BLOCK).to(tl.int64)
            words = values_ptr + page * page_words + (layer_run + kv_head) * num_words
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * num_scales
            scores = _scores_by_key(q, words, scales_at, there, DIM, BLOCK, KIND, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(
                scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS
            )
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales_at += NUM_KV_HEADS * num_scales
            words += NUM_KV_HEADS * num_words
            acc = _add_values_by_key(
                acc, weights, shrink, words, scales_at, there, DIM, BLOCK, KIND, AHEAD
            )
        if KIND == 1:
            acc = (acc[0] * 1048576.0, acc[1] * 1048576.0)  # 2**20
        acc, weight = _turned(acc, KIND), _in_all(total, ROWS)
        if num_splits == 1:
            if SINKS:
                sink, one = _sink(
                    sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS
                )
                acc, top, weight = _merge_all(
                    _nothing(ROWS, DIM, KIND), sink, one, acc, top, weight, factor, KIND
                )
            _put(
                out_ptr + ((token + behind) * NUM_HEADS + head) * DIM, acc, weight, valid, DIM, KIND
            )
        else:
            part = partial_ptr + ((slot0 + split + behind * num_splits) * NUM_HEADS + head) * (
                DIM + 2
            )
            _put_part(part, acc, top, weight, valid, DIM, KIND)
            tl.debug_barrier()
            for _i in range(num_tokens):
                done = tl.atomic_add(
                    done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu"
                )
                if done == num_here - 1:  # the last of them merges all
                    tl.store(done_ptr + token * NUM_KV_HEADS + kv_head, 0)
                    _merge_parts(
                        partial_ptr, out_ptr, sinks_ptr, token, slot0, num_splits, kv_head, factor, NUM_HEADS, NUM_KV_HEADS,
                        DIM, TOGETHER, SINKS, 4 if KIND == 2 else 2,
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


def single_how(num_tokens: int) -> dict[str, int]:
    """Measured on an H200. One or two tokens have programs to spare: four warps each. A few may
    have long contexts, where four take longer than two. Of many, one reads fastest."""
    return {
        "num_warps": 4 if num_tokens <= 2 else 2 if num_tokens <= 16 else 1,
        "num_stages": 5,
        "TOGETHER": 4,
    }


def hopper() -> Any:
    from tidemill.kernels.cuda import hopper_fp8

    return hopper_fp8


def attend_scaled(
    qkv_TC: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, layer: int, table: torch.Tensor, out_TC: torch.Tensor,
    positions_T: torch.Tensor, lists: Lists, sinks: torch.Tensor, bias: torch.Tensor,
    how_much: tuple[float, float, float, int, int], has_sinks: bool, common: dict[str, Any],
) -> None:  # fmt: skip
    """The same as `attend`, which has made all this of its arguments."""
    words, pairs, page_words, page_scales = places(cache, scales)
    num_kv_heads, group = common["NUM_KV_HEADS"], common["NUM_HEADS"] // common["NUM_KV_HEADS"]
    where = (layer * 2 * num_kv_heads, page_words, page_scales, table.stride(0))
    common = common | {"KIND": KINDS[cache.dtype]}
    if lists.num_shared:
        launch(
            _attend_shared_scaled, (num_kv_heads, lists.num_shared),
            qkv_TC, words, pairs, table, lists.partial, lists.words, positions_T, bias, *where, *how_much, WORD=SHARED,
            ROWS=shared_rows(group), num_warps=4, num_stages=3, **common,
        )  # fmt: skip
    if lists.num_single and lists.by_roles and hopper().covers(cache, group, qkv_TC.shape[0]):
        hopper().attend_single(
            qkv_TC, cache, scales, layer, table, out_TC, lists.singles, lists.partial, lists.done, how_much[0], lists.num_single,
            common["NUM_HEADS"], common["SPLIT"], common["AHEAD"] == 2,
        )  # fmt: skip
    elif lists.num_single:
        launch(
            _attend_single_scaled, (num_kv_heads, lists.num_single),
            qkv_TC, words, pairs, table, out_TC, lists.partial, lists.done, lists.singles, sinks, bias, *where, *how_much,
            SINKS=has_sinks, ROWS=single_rows(group, has_scales=True), **single_how(qkv_TC.shape[0]), **common,
        )  # fmt: skip
    if lists.num_prompts and lists.by_roles:
        from tidemill.kernels.cuda import hopper_attention, page_copies

        if lists.copies is not None:
            page_copies.copy_pages(cache, scales, layer, table, lists.words, lists.copies)
        hopper_attention.attend_prompts_scaled(
            qkv_TC, cache, qkv_TC if lists.copies is None else lists.copies, scales, layer, table, out_TC, lists.words,
            how_much[0], lists.num_prompts, PROMPTS, common["NUM_HEADS"], common["SPLIT"],
        )  # fmt: skip
    elif lists.num_prompts:
        launch(
            _attend_prompts_scaled, (num_kv_heads, lists.num_prompts),
            qkv_TC, words, pairs, table, out_TC, lists.words, sinks, bias, *where, *how_much, WORD=PROMPTS, SINKS=has_sinks,
            ROWS=prompt_rows(group, by_roles=False), num_warps=4, num_stages=3, **common,
        )  # fmt: skip
