"""Attention over a KV cache of 8-bit values with a scale for each token and head: fp8 (e4m3) or int8.

The same work lists, splits and order of summation as attention.py, whose parts it uses. A tile is loaded as it is stored, two
values in a word of 16 bits, and becomes bfloat16 in registers: value times scale, rounded once. So matmuls stay those of
bfloat16 with sums in float32, and no copy of a cache in bfloat16 is ever in memory.

A word goes through the matrix unit's loads as 16-bit values do and is taken apart there. So dimensions come in halves: the even
ones, then the odd ones. Scores add the products of the even dimensions first, in every kernel; results of a split are kept in
halves until they are written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.attention import (
    Lists,
    _add_up,
    _biased,
    _capped,
    _in_all,
    _merge,
    _merge_parts,
    _sink,
    _weigh,
    prompt_rows,
    shared_rows,
    single_rows,
)
from tidemill.kernels.cuda.launch import begin, launch
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

# Two words in $2, two scales in $3; $0: their low bytes as bfloat16, $1: their high bytes.
#
# The bits of an e4m3 number, moved to where bfloat16 has them, are that number times 2**-120, also of the smallest ones: the
# scales come times 2**120.
FP8_PAIRS = tl.constexpr("""{
.reg .b32 a, b, none; mov.b32 none, 0x80008000;
shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0; shl.b32 b, $2, 8; lop3.b32 a, b, 0x80008000, a, 0xEA;
fma.rn.bf16x2 $0, a, $3, none;
shr.u32 a, $2, 4; and.b32 a, a, 0x07f007f0; lop3.b32 a, $2, 0x80008000, a, 0xEA;
fma.rn.bf16x2 $1, a, $3, none;
}""")
# The lower seven bits of an int8 added to 128 are the bits of a bfloat16; the upper one makes a -128 of it or a -256.
INT8_PAIRS = tl.constexpr("""{
.reg .b32 a, b, c, one, none; mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000;
lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xEA; lop3.b32 b, $2, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 $0, a, $3, none; shr.u32 c, $2, 8;
lop3.b32 a, c, 0x007f007f, 0x43004300, 0xEA; lop3.b32 b, c, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 $1, a, $3, none;
}""")


@triton.jit
def _number(byte, FP8: tl.constexpr):
    """Of a byte in an int32; e4m3 times 2**-120."""
    if FP8:
        return (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).to(tl.float32, bitcast=True)
    else:
        return ((byte ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def unpack(words, scales, FP8: tl.constexpr, AHEAD: tl.constexpr):
    """The values in words' low bytes and those in their high bytes, times `scales`, which have the words' shape."""
    if AHEAD:
        asm: tl.constexpr = FP8_PAIRS if FP8 else INT8_PAIRS
        given = [words, scales.to(tl.bfloat16)]
        return tl.inline_asm_elementwise(asm, "=r,=r,r,r", given, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:  # interpreted
        wide = words.to(tl.int32)
        return _number(wide & 0xFF, FP8) * scales, _number((wide >> 8) & 0xFF, FP8) * scales


@triton.jit
def _scales(scales_ptr, there, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Of a page's keys or values; what is not there becomes zero, whatever its bytes are. Two are read as one word, since
    that is the least an asynchronous copy takes."""
    place = tl.arange(0, BLOCK)
    words = tl.load(scales_ptr + place // 2)
    scales = tl.where(place % 2 == 0, words << 16, words & -65536).to(tl.float32, bitcast=True)
    if FP8:
        scales = scales * 1.329227995784916e36  # 2**120
    return tl.where(there, scales, 0.0)


@triton.jit
def _scores(q, values_ptr, scales, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr):
    at = tl.arange(0, BLOCK)[None, :] * (DIM // 2) + tl.arange(0, DIM // 2)[:, None]
    even, odd = unpack(tl.load(values_ptr + at), tl.broadcast_to(scales[None, :], (DIM // 2, BLOCK)), FP8, AHEAD)
    return tl.dot(q[1], odd, tl.dot(q[0], even))


@triton.jit
def _add_values(
    even, odd, weights, shrink, values_ptr, scales, DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr
):
    at = tl.arange(0, BLOCK)[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :]
    more_even, more_odd = unpack(tl.load(values_ptr + at), tl.broadcast_to(scales[:, None], (BLOCK, DIM // 2)), FP8, AHEAD)
    weights = weights.to(more_even.dtype)
    return tl.dot(weights, more_even, even * shrink[:, None]), tl.dot(weights, more_odd, odd * shrink[:, None])


@triton.jit
def _queries(qkv_ptr, token, head, valid, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    at = (token[:, None] * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    return tl.split(tl.reshape(q, (q.shape[0], DIM // 2, 2)))


@triton.jit
def _put(out_ptr, even, odd, valid, DIM: tl.constexpr):
    """`out_ptr`: of each row."""
    to = out_ptr[:, None] + 2 * tl.arange(0, DIM // 2)[None, :]
    tl.store(to, even.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(to + 1, odd.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _put_part(part, even, odd, top, weight, valid, DIM: tl.constexpr):
    to = part[:, None] + tl.arange(0, DIM // 2)[None, :]
    tl.store(to, even, mask=valid[:, None])
    tl.store(to + DIM // 2, odd, mask=valid[:, None])
    tl.store(part + DIM, top, mask=valid)
    tl.store(part + DIM + 1, weight, mask=valid)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_prompts_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, out_ptr, lists_ptr, sinks_ptr, bias_ptr, layer_run, page_words, page_scales,
    table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, WORD: tl.constexpr, FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows = tl.arange(0, ROWS)
    none, lowest = tl.zeros((ROWS, DIM // 2), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * PROMPT_WIDTH
    num = tl.load(tile + PROMPT_TOKENS)
    while num > 0:
        token0 = tl.load(tile + PROMPT_TOKEN).to(tl.int64)
        start, row = tl.load(tile + PROMPT_POSITION), tl.load(tile + PROMPT_ROW).to(tl.int64)
        token, head, valid = token0 + rows // group, kv_head * group + rows % group, rows // group < num
        positions = start + rows // group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        even, odd, top, total = none, none, lowest, tl.zeros((ROWS, 4), tl.float32)
        all_even, all_odd = none, none
        all_top, all_total = _sink(sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS)
        end = start + num  # after the last key
        first = 0
        if WINDOW:
            first = tl.maximum(start - window + 1, 0) // BLOCK
        for block in range(first, tl.cdiv(end, BLOCK)):
            if (block % (SPLIT // BLOCK) == 0) & (block > first):
                weight = _in_all(total, ROWS)
                all_even, _, _ = _merge(all_even, all_top, all_total, even, top, weight, factor)
                all_odd, all_top, all_total = _merge(all_odd, all_top, all_total, odd, top, weight, factor)
                even, odd, top, total = none, none, lowest, tl.zeros((ROWS, 4), tl.float32)
            keys = block * BLOCK + tl.arange(0, BLOCK)
            there = keys < end
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen &= keys[None, :] > positions[:, None] - window
            page = tl.load(table_ptr + row * table_width + block).to(tl.int64)
            words = values_ptr + page * page_words + (layer_run + kv_head) * (BLOCK * DIM // 2)
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * (BLOCK // 2)
            scores = _scores(q, words, _scales(scales_at, there, FP8, BLOCK), DIM, BLOCK, FP8, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS)
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales = _scales(scales_at + NUM_KV_HEADS * (BLOCK // 2), there, FP8, BLOCK)
            words += NUM_KV_HEADS * (BLOCK * DIM // 2)
            even, odd = _add_values(even, odd, weights, shrink, words, scales, DIM, BLOCK, FP8, AHEAD)
        weight = _in_all(total, ROWS)
        all_even, _, _ = _merge(all_even, all_top, all_total, even, top, weight, factor)
        all_odd, all_top, all_total = _merge(all_odd, all_top, all_total, odd, top, weight, factor)
        to = out_ptr + (token * NUM_HEADS + head) * DIM
        _put(to, all_even / all_total[:, None], all_odd / all_total[:, None], valid, DIM)
        tile += tl.num_programs(1) * PROMPT_WIDTH
        num = tl.load(tile + PROMPT_TOKENS)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_shared_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, partial_ptr, lists_ptr, positions_ptr, bias_ptr, layer_run, page_words,
    page_scales, table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, WORD: tl.constexpr, FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members_ptr = lists_ptr + tl.load(lists_ptr + WORD + 1)  # the list after this one
    rows = tl.arange(0, ROWS)
    tile = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * SHARED_WIDTH
    num = tl.load(tile + SHARED_MEMBERS)
    while num > 0:
        member0, split = tl.load(tile + SHARED_MEMBER), tl.load(tile + SHARED_SPLIT)
        table = table_ptr + tl.load(tile + SHARED_ROW).to(tl.int64) * table_width + split * (SPLIT // BLOCK)
        valid = rows // group < num
        member = members_ptr + (member0 + rows // group) * MEMBER_WIDTH
        token = tl.load(member + MEMBER_TOKEN, mask=valid, other=0).to(tl.int64)
        slot = tl.load(member + MEMBER_SLOT, mask=valid, other=0).to(tl.int64)
        if WINDOW or BIAS:
            positions = tl.load(positions_ptr + token, mask=valid, other=0)
        head = kv_head * group + rows % group
        q = _queries(qkv_ptr, token, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        even, odd = tl.zeros((ROWS, DIM // 2), tl.float32), tl.zeros((ROWS, DIM // 2), tl.float32)
        top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, 4), tl.float32)
        for block in range(SPLIT // BLOCK):
            keys = split * SPLIT + block * BLOCK + tl.arange(0, BLOCK)
            there = keys >= 0
            page = tl.load(table + block).to(tl.int64)
            words = values_ptr + page * page_words + (layer_run + kv_head) * (BLOCK * DIM // 2)
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * (BLOCK // 2)
            scores = _scores(q, words, _scales(scales_at, there, FP8, BLOCK), DIM, BLOCK, FP8, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            if BIAS:
                whole = valid[:, None] & there[None, :]
                scores = _biased(scores, bias_ptr, bias_width, head, positions, keys, whole, scale, SOFTCAP, BIAS)
            if WINDOW:
                scores = tl.where(keys[None, :] > positions[:, None] - window, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales = _scales(scales_at + NUM_KV_HEADS * (BLOCK // 2), there, FP8, BLOCK)
            words += NUM_KV_HEADS * (BLOCK * DIM // 2)
            even, odd = _add_values(even, odd, weights, shrink, words, scales, DIM, BLOCK, FP8, AHEAD)
        part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
        _put_part(part, even, odd, top, _in_all(total, ROWS), valid, DIM)
        tile += tl.num_programs(1) * SHARED_WIDTH
        num = tl.load(tile + SHARED_MEMBERS)


@triton.jit(do_not_specialize=["layer_run"])
def _attend_single_scaled(
    qkv_ptr, values_ptr, scales_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, sinks_ptr, bias_ptr, layer_run,
    page_words, page_scales, table_width, scale, factor, softcap, window, bias_width,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows = tl.arange(0, ROWS)
    head, behind = kv_head * group + rows % group, rows // group  # `behind`: its token after the record's first
    # The first record was there long before the kernel that this one waits for.
    tile = singles_ptr + tl.program_id(1) * SINGLE_WIDTH
    token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
    row, split, slot0 = tl.load(tile + SINGLE_ROW), tl.load(tile + SINGLE_SPLIT), tl.load(tile + SINGLE_SLOT)
    num_splits, num_here = tl.load(tile + SINGLE_SPLITS), tl.load(tile + SINGLE_LISTED)
    num_tokens = tl.load(tile + SINGLE_TOKENS)
    begin(AHEAD)
    while num_splits > 0:
        tile += tl.num_programs(1) * SINGLE_WIDTH
        num_next = tl.load(tile + SINGLE_SPLITS)  # asked for early, it does not keep the program from ending
        token, slot0, table = token.to(tl.int64), slot0.to(tl.int64), table_ptr + row.to(tl.int64) * table_width
        valid, positions, end = behind < num_tokens, position + behind, position + num_tokens
        q = _queries(qkv_ptr, token + behind, head, valid, NUM_HEADS, NUM_KV_HEADS, DIM)
        even, odd = tl.zeros((ROWS, DIM // 2), tl.float32), tl.zeros((ROWS, DIM // 2), tl.float32)
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
            words = values_ptr + page * page_words + (layer_run + kv_head) * (BLOCK * DIM // 2)
            scales_at = scales_ptr + page * page_scales + (layer_run + kv_head) * (BLOCK // 2)
            scores = _scores(q, words, _scales(scales_at, there, FP8, BLOCK), DIM, BLOCK, FP8, AHEAD)
            scores = _capped(scores, scale, softcap, SOFTCAP)
            biased = valid[:, None] & there[None, :]
            scores = _biased(scores, bias_ptr, bias_width, head, positions, keys, biased, scale, SOFTCAP, BIAS)
            scores = tl.where(seen, scores, float("-inf"))
            weights, top, shrink = _weigh(scores, top, factor)
            total = _add_up(weights, total, shrink, ROWS, BLOCK)
            scales = _scales(scales_at + NUM_KV_HEADS * (BLOCK // 2), there, FP8, BLOCK)
            words += NUM_KV_HEADS * (BLOCK * DIM // 2)
            even, odd = _add_values(even, odd, weights, shrink, words, scales, DIM, BLOCK, FP8, AHEAD)
        weight = _in_all(total, ROWS)
        if num_splits == 1:
            if SINKS:
                sink, one = _sink(sinks_ptr, head, valid, tl.zeros((ROWS,), tl.float32), factor, SINKS)
                nothing = tl.zeros((ROWS, DIM // 2), tl.float32)
                even, _, _ = _merge(nothing, sink, one, even, top, weight, factor)
                odd, top, weight = _merge(nothing, sink, one, odd, top, weight, factor)
            to = out_ptr + ((token + behind) * NUM_HEADS + head) * DIM
            _put(to, even / weight[:, None], odd / weight[:, None], valid, DIM)
        else:
            part = partial_ptr + ((slot0 + split + behind * num_splits) * NUM_HEADS + head) * (DIM + 2)
            _put_part(part, even, odd, top, weight, valid, DIM)
            tl.debug_barrier()
            for _i in range(num_tokens):
                done = tl.atomic_add(done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
                if done == num_here - 1:  # the last of them merges all
                    tl.store(done_ptr + token * NUM_KV_HEADS + kv_head, 0)
                    _merge_parts(
                        partial_ptr, out_ptr, sinks_ptr, token, slot0, num_splits, kv_head, factor, NUM_HEADS, NUM_KV_HEADS,
                        DIM, TOGETHER, SINKS, True,
                    )  # fmt: skip
                token, slot0 = token + 1, slot0 + num_splits
        token, position = tl.load(tile + SINGLE_TOKEN), tl.load(tile + SINGLE_POSITION)
        row, split, slot0 = tl.load(tile + SINGLE_ROW), tl.load(tile + SINGLE_SPLIT), tl.load(tile + SINGLE_SLOT)
        num_splits, num_here = num_next, tl.load(tile + SINGLE_LISTED)
        num_tokens = tl.load(tile + SINGLE_TOKENS)


def single_how(num_tokens: int) -> dict[str, int]:
    """Measured on an H200: of few tokens, four warps share the work of turning words into values; of many, one reads fastest."""
    if num_tokens <= 16:
        return {"num_warps": 4, "num_stages": 7, "TOGETHER": 8}
    return {"num_warps": 1, "num_stages": 3, "TOGETHER": 4}


def places(cache: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Values as words of 16 bits and scales as words of 32, and how many of each a page is further on."""
    words, pairs = cache.view(torch.int16), scales.view(torch.int32)
    return words, pairs, words.stride(0), pairs.stride(0)


def attend_scaled(
    qkv_TC: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, layer: int, table: torch.Tensor, out_TC: torch.Tensor,
    positions_T: torch.Tensor, lists: Lists, sinks: torch.Tensor, bias: torch.Tensor,
    how_much: tuple[float, float, float, int, int], has_sinks: bool, common: dict[str, Any],
) -> None:  # fmt: skip
    """As `attend`, which has made all this of its arguments."""
    words, pairs, page_words, page_scales = places(cache, scales)
    num_kv_heads, group = common["NUM_KV_HEADS"], common["NUM_HEADS"] // common["NUM_KV_HEADS"]
    where = (layer * 2 * num_kv_heads, page_words, page_scales, table.stride(0))
    common = common | {"FP8": cache.dtype == torch.float8_e4m3fn}
    if lists.num_shared:
        launch(
            _attend_shared_scaled, (num_kv_heads, lists.num_shared),
            qkv_TC, words, pairs, table, lists.partial, lists.words, positions_T, bias, *where, *how_much, WORD=SHARED,
            ROWS=shared_rows(group), num_warps=4, num_stages=3, **common,
        )  # fmt: skip
    if lists.num_single:
        launch(
            _attend_single_scaled, (num_kv_heads, lists.num_single),
            qkv_TC, words, pairs, table, out_TC, lists.partial, lists.done, lists.singles, sinks, bias, *where, *how_much,
            SINKS=has_sinks, ROWS=single_rows(group), **single_how(qkv_TC.shape[0]), **common,
        )  # fmt: skip
    if lists.num_prompts and lists.by_roles:
        from tidemill.kernels.cuda import hopper_attention

        hopper_attention.attend_prompts_scaled(
            qkv_TC, cache, scales, layer, table, out_TC, lists.words, how_much[0], lists.num_prompts, PROMPTS,
            common["NUM_HEADS"], common["SPLIT"],
        )  # fmt: skip
    elif lists.num_prompts:
        launch(
            _attend_prompts_scaled, (num_kv_heads, lists.num_prompts),
            qkv_TC, words, pairs, table, out_TC, lists.words, sinks, bias, *where, *how_much, WORD=PROMPTS, SINKS=has_sinks,
            ROWS=prompt_rows(group, by_roles=False), num_warps=4, num_stages=3, **common,
        )  # fmt: skip
