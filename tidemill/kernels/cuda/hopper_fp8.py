"""Attention of single tokens over fp8 keys and values on Hopper GPUs: programs of one warp, as many
as fit.

The same sums in the same order as `_attend_single_scaled` of scaled_attention.py, so the same bits.
There a program has whole pages in shared memory and registers, and six or eight of them fit on a
multiprocessor: they do not cover each other's waits, and a batch is done in two or three rounds of
which the last is not full. Here parts of pages come by bulk copies into a ring of small buffers,
and what a buffer has next is asked for as soon as it has been read: a program needs half as much of
both. Written in Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill.kernels.cuda.hopper_attention import barrier, fetch, moved_top
from tidemill.kernels.cuda.hopper_single import copy_ahead
from tidemill.kernels.cuda.launch import launch
from tidemill.kernels.cuda.records import (
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
from tidemill.kernels.cuda.scaled_values import FP8_HALVES, FP8_PLAIN

# A name that has changed with Triton's versions.
_buffer = gl.shared_memory_descriptor
reinterpret = _buffer.reinterpret if hasattr(_buffer, "reinterpret") else _buffer._reinterpret
ROWS = 8  # queries, times tokens of a record
_ROWS = gl.constexpr(ROWS)
_OLD = gl.constexpr(256)  # keys so many positions before a step's token were there before the step


@dataclass(frozen=True, slots=True)
class Ring:
    parts: int  # of a page's keys, and of its values
    buffers: int
    registers: int  # of a thread, at most


RINGS = Ring(1, 3, 255), Ring(2, 3, 128)  # of up to 16 tokens, whose programs have room; of more
PER_MULTIPROCESSOR = 16  # programs
FEW = 2  # tokens of a step, up to which four warps for each split are done sooner than one


def covers(cache: torch.Tensor, group: int, num_tokens: int) -> bool:
    return (
        cache.dtype == torch.float8_e4m3fn
        and cache.shape[-1] == 128
        and group in (1, 2, 4, 8)
        and num_tokens > FEW
    )


@gluon.jit
def _ask(
    cache_desc, page, rows_per_page, run, item: gl.constexpr, count, bufs, full, NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Asks for a part of a page: first those of its keys, then those of its values. `count`: of all
    that were asked for before."""
    num_buffers: gl.constexpr = bufs.type.shape[0]
    row = (
        page * rows_per_page
        + run * BLOCK
        + (item // PARTS) * NUM_KV_HEADS * BLOCK
        + (item % PARTS) * (BLOCK // PARTS)
    )
    i = count % num_buffers
    mbarrier.expect(full.index(i), cache_desc.block_type.nbytes)
    fetch(cache_desc, [row, 0], full.index(i), bufs.index(i))


@gluon.jit
def _ask_first(
    cache_desc, page, page_next, num_blocks, rows_per_page, run, count, bufs, full, NUM_KV_HEADS: gl.constexpr,
    BLOCK: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = bufs.type.shape[0]
    for i in gl.static_range(num_buffers):
        if i // (2 * PARTS) < num_blocks:
            from_page = page if i < 2 * PARTS else page_next
            _ask(
                cache_desc,
                from_page,
                rows_per_page,
                run,
                i % (2 * PARTS),
                count + i,
                bufs,
                full,
                NUM_KV_HEADS,
                BLOCK,
                PARTS,
            )


@gluon.jit
def _ask_again(
    cache_desc, page, page1, page2, num_left, rows_per_page, run, item: gl.constexpr, count, bufs, full,
    NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """When a part has been read: for that which comes into its buffer next. `num_left`: pages from
    this one on."""
    num_buffers: gl.constexpr = bufs.type.shape[0]
    later: gl.constexpr = (item + num_buffers) // (2 * PARTS)
    following: gl.constexpr = (item + num_buffers) % (2 * PARTS)
    if num_left > later:
        from_page = page if later == 0 else page1 if later == 1 else page2
        _ask(
            cache_desc,
            from_page,
            rows_per_page,
            run,
            following,
            count,
            bufs,
            full,
            NUM_KV_HEADS,
            BLOCK,
            PARTS,
        )


@gluon.jit
def _ask_for_scales(scales_ptr, at, bufs, i, NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr):
    """Asks for the scales of a page: its keys' and its values'. Two are a word, the least that can
    be copied."""
    pairs = gl.arange(0, BLOCK // 2, layout=gl.BlockedLayout([1], [32], [1], [0]))
    copy_ahead(bufs.index(2 * i), scales_ptr + (at + pairs))
    copy_ahead(bufs.index(2 * i + 1), scales_ptr + (at + NUM_KV_HEADS * (BLOCK // 2) + pairs))
    async_copy.commit_group()


@gluon.jit
def _sums(parts, PARTS: gl.constexpr):
    """The sums of the keys of a page, in the order of paged_attention.py's `_add_up`."""
    if PARTS == 2:
        first, second = (
            gl.reshape(parts[0], (2, 2, 4, 2, _ROWS)),
            gl.reshape(parts[1], (2, 2, 4, 2, _ROWS)),
        )
        sums = gl.sum(first, 3) + gl.sum(second, 3)
    else:
        sums = gl.sum(gl.sum(gl.reshape(parts[0], (2, 2, 2, 4, 2, _ROWS)), 4), 0)
    return gl.sum(gl.sum(sums, 0), 0)


@gluon.jit
def _merge_parts(
    partial_ptr, out_ptr, token, slot, num_splits, kv_head, scale,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """In order; as paged_attention.py has it. A query after the other."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    rows = gl.arange(0, group, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    part = partial_ptr + (slot * NUM_HEADS + kv_head * group + rows) * (DIM + 2)
    acc = gl.zeros((group, DIM), gl.float32, layout)
    top = gl.full((group,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros((group,), gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, num_splits, TOGETHER):
        parts = ()  # type: tuple
        for i in gl.static_range(TOGETHER):  # so many are under way at a time
            there = rows * 0 + first + i < num_splits
            at = part + i * NUM_HEADS * (DIM + 2)
            more = gl.load(
                at[:, None] + columns[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
            )
            more_top = gl.load(at + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
            parts = parts + (
                (
                    more,
                    more_top,
                    gl.load(at + DIM + 1, mask=there, other=0.0, cache_modifier=".cg"),
                ),
            )
        for i in gl.static_range(TOGETHER):
            more, more_top, more_total = parts[i]
            new_top = gl.maximum(top, more_top)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)
            old, new = gl.exp2((top - shift) * scale), gl.exp2((more_top - shift) * scale)
            acc = gl.fma(acc, gl.zeros_like(acc) + old[:, None], more * new[:, None])
            top, total = new_top, gl.fma(more_total, new, total * old)
        part += TOGETHER * NUM_HEADS * (DIM + 2)
    columns = 2 * (columns % (DIM // 2)) + columns // (DIM // 2)
    out_at = (token * NUM_HEADS + kv_head * group + rows)[:, None] * DIM + columns[None, :]
    gl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


@gluon.jit
def _queries(qkv_ptr, token, num_tokens, kv_head, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr,
             by_score: gl.constexpr):  # fmt: skip
    """The queries in the form that scaled_attention.py's `_columns_of` makes."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    layout: gl.constexpr = gl.DotOperandLayout(1, by_score, 2)
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, layout))
    columns = gl.arange(0, DIM // 2, layout=gl.SliceLayout(1, layout))
    at = (
        (token + rows // group) * (NUM_HEADS + 2 * NUM_KV_HEADS) + kv_head * group + rows % group
    ) * (DIM // 2)
    words = gl.load(
        qkv_ptr + (at[None, :] + columns[:, None]),
        mask=(rows // group < num_tokens)[None, :],
        other=0,
    )
    even, odd = (
        (words << 16).to(gl.float32, bitcast=True),
        (words & -65536).to(gl.float32, bitcast=True),
    )
    top = gl.max(gl.maximum(gl.abs(even), gl.abs(odd)), 0).to(gl.int32, bitcast=True) & 0x7F800000
    top = gl.minimum(gl.maximum(top, 30 << 23), 253 << 23)
    up, down = (
        ((254 << 23) - top).to(gl.float32, bitcast=True) * 16384.0,
        top.to(gl.float32, bitcast=True) / 16384.0,
    )
    even, odd = (even * up[None, :]).to(gl.float16), (odd * up[None, :]).to(gl.float16)
    return even, odd, gl.convert_layout(down, gl.SliceLayout(0, by_score))


@gluon.jit(do_not_specialize=["layer_run", "table_width"])
def _attend_single_fp8(
    qkv_ptr, cache_desc, scales_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, layer_run, rows_per_page,
    page_scales, table_width, scale,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr, BLOCK: gl.constexpr,
    PARTS: gl.constexpr, BUFFERS: gl.constexpr, TOGETHER: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """`qkv_ptr`: two values in a word. Reference: `attention.attention_reference`."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    half: gl.constexpr = DIM // 2
    size: gl.constexpr = BLOCK // PARTS
    bf16: gl.constexpr = gl.bfloat16
    by_score: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    first_operand: gl.constexpr = gl.DotOperandLayout(0, by_score, 2)
    second_operand: gl.constexpr = gl.DotOperandLayout(1, by_score, 2)
    by_key: gl.constexpr = gl.SliceLayout(1, by_score)
    by_query: gl.constexpr = gl.SliceLayout(0, by_score)
    bufs = gl.allocate_shared_memory(cache_desc.dtype, [BUFFERS, size, half], cache_desc.layout)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs_bufs = gl.allocate_shared_memory(gl.int32, [4, BLOCK // 2], in_order)
    scales_bufs = reinterpret(pairs_bufs, gl.bfloat16, [4, BLOCK], in_order)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    keys = gl.arange(0, size, layout=by_key)
    rows = gl.arange(0, _ROWS, layout=by_query)
    dims = gl.arange(0, half, layout=by_key)

    kv_head = gl.program_id(0)
    run, head, behind = layer_run + kv_head, kv_head * group + rows % group, rows // group
    # The records, page tables and most keys were there long before the kernel that this one waits
    # for.
    tile = singles_ptr + gl.program_id(1) * SINGLE_WIDTH
    num_splits = gl.load(tile + SINGLE_SPLITS)
    count = 0  # of parts of pages so far
    waited = 0
    if num_splits == 0:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    while num_splits > 0:
        num_next = gl.load(tile + gl.num_programs(1) * SINGLE_WIDTH + SINGLE_SPLITS)
        token, slot0 = (
            gl.load(tile + SINGLE_TOKEN).to(gl.int64),
            gl.load(tile + SINGLE_SLOT).to(gl.int64),
        )
        num_here, num_tokens = gl.load(tile + SINGLE_LISTED), gl.load(tile + SINGLE_TOKENS)
        position, split = gl.load(tile + SINGLE_POSITION), gl.load(tile + SINGLE_SPLIT)
        table = (
            table_ptr
            + gl.load(tile + SINGLE_ROW).to(gl.int64) * table_width
            + split * (SPLIT // BLOCK)
        )
        position -= split * SPLIT  # counted from the split's first
        num_blocks = gl.minimum(gl.cdiv(position + num_tokens, BLOCK), SPLIT // BLOCK)
        last = num_blocks - 1
        page, page1 = gl.load(table), gl.load(table + gl.minimum(1, last))
        page2 = gl.load(table + gl.minimum(2, last))
        is_old = position >= _OLD
        if is_old | (waited > 0):
            _ask_first(
                cache_desc,
                page,
                page1,
                num_blocks,
                rows_per_page,
                run,
                count,
                bufs,
                full,
                NUM_KV_HEADS,
                BLOCK,
                PARTS,
            )
        if waited == 0:
            gdc_wait()
            if EARLY:
                gdc_launch_dependents()
            if position < _OLD:
                _ask_first(
                    cache_desc,
                    page,
                    page1,
                    num_blocks,
                    rows_per_page,
                    run,
                    count,
                    bufs,
                    full,
                    NUM_KV_HEADS,
                    BLOCK,
                    PARTS,
                )
        waited = 1
        _ask_for_scales(
            scales_ptr,
            page.to(gl.int64) * page_scales + run * (BLOCK // 2),
            pairs_bufs,
            0,
            NUM_KV_HEADS,
            BLOCK,
        )
        q_even, q_odd, down = _queries(
            qkv_ptr, token, num_tokens, kv_head, NUM_HEADS, NUM_KV_HEADS, DIM, by_score
        )
        acc_even, acc_odd = (
            gl.zeros((half, _ROWS), gl.float32, by_score),
            gl.zeros((half, _ROWS), gl.float32, by_score),
        )
        top = gl.full((_ROWS,), float("-inf"), gl.float32, by_query)
        nothing = gl.zeros((size, _ROWS), gl.float32, by_score)
        total = _sums((nothing, nothing), PARTS)
        for block in range(num_blocks):
            at = page1.to(gl.int64) * page_scales + run * (BLOCK // 2)
            _ask_for_scales(scales_ptr, at, pairs_bufs, (block + 1) % 2, NUM_KV_HEADS, BLOCK)
            page3 = gl.load(table + gl.minimum(block + 3, last))
            async_copy.wait_group(1)
            barrier()
            left = position + num_tokens - block * BLOCK  # keys that are there
            scores = ()  # type: tuple
            for i in gl.static_range(PARTS):
                buf = bufs.index(count % BUFFERS)
                mbarrier.wait(full.index(count % BUFFERS), (count // BUFFERS) & 1)
                even, odd = gl.inline_asm_elementwise(
                    FP8_HALVES,
                    "=r,=r,r",
                    [buf.load(first_operand)],
                    dtype=(gl.float16, gl.float16),
                    is_pure=True,
                    pack=2,
                )
                made = mma_v2(odd, q_odd, mma_v2(even, q_even, nothing))
                barrier()
                _ask_again(
                    cache_desc, page, page1, page2, num_blocks - block, rows_per_page, run, i, count, bufs, full,
                    NUM_KV_HEADS, BLOCK, PARTS,
                )  # fmt: skip
                count += 1
                k_scales = (
                    scales_bufs.index(block % 2 * 2)
                    .slice(i * size, size, dim=0)
                    .load(by_key)
                    .to(gl.float32)
                )
                made = made * k_scales[:, None] * down[None, :]
                if block * BLOCK + BLOCK > position:  # else all keys are seen
                    seen = (block * BLOCK + i * size + keys)[:, None] <= (position + behind)[
                        None, :
                    ]
                    made = gl.where(seen, made, float("-inf"))
                scores = scores + (made,)
            highest = gl.max(scores[0], 0)
            if PARTS == 2:
                highest = gl.maximum(highest, gl.max(scores[1], 0))
            new_top, safe_top = moved_top(highest, top, scale)
            shift = nothing - (safe_top * scale)[None, :]
            shrink = gl.exp2((top - safe_top) * scale)
            top = new_top
            weights = ()  # type: tuple
            for i in gl.static_range(PARTS):
                weights = weights + (gl.exp2(gl.fma(scores[i], nothing + scale, shift)),)
            sums = _sums(weights if PARTS == 2 else (weights[0], nothing), PARTS)
            by_sum: gl.constexpr = gl.SliceLayout(0, total.type.layout)
            total = gl.fma(
                total, gl.zeros_like(total) + gl.convert_layout(shrink, by_sum)[None, :], sums
            )
            acc_even, acc_odd = acc_even * shrink[None, :], acc_odd * shrink[None, :]
            for i in gl.static_range(PARTS):
                v_scales = (
                    scales_bufs.index(block % 2 * 2 + 1)
                    .slice(i * size, size, dim=0)
                    .load(by_key)
                    .to(gl.float32)
                )
                # 2**100
                v_scales = gl.where(keys + i * size < left, v_scales, 0.0) * 1.2676506002282294e30
                operand = gl.convert_layout(
                    weights[i].to(bf16) * v_scales.to(bf16)[:, None], second_operand
                )
                buf = bufs.index(count % BUFFERS)
                mbarrier.wait(full.index(count % BUFFERS), (count // BUFFERS) & 1)
                words = buf.permute((1, 0)).load(first_operand)
                even, odd = gl.inline_asm_elementwise(
                    FP8_PLAIN,
                    "=r,=r,r",
                    [words],
                    dtype=(gl.bfloat16, gl.bfloat16),
                    is_pure=True,
                    pack=2,
                )
                acc_even, acc_odd = mma_v2(even, operand, acc_even), mma_v2(odd, operand, acc_odd)
                barrier()
                _ask_again(
                    cache_desc, page, page1, page2, num_blocks - block, rows_per_page, run, PARTS + i, count, bufs, full,
                    NUM_KV_HEADS, BLOCK, PARTS,
                )  # fmt: skip
                count += 1
            page, page1, page2 = page1, page2, page3
        async_copy.wait_group(0)
        acc_even, acc_odd = acc_even * 1048576.0, acc_odd * 1048576.0  # 2**20
        weight = gl.convert_layout(gl.sum(gl.sum(gl.reshape(total, (2, 2, _ROWS)), 0), 0), by_query)
        valid = behind < num_tokens
        if num_splits == 1:
            out_at = ((token + behind) * NUM_HEADS + head)[None, :] * DIM + 2 * dims[:, None]
            gl.store(out_ptr + out_at, (acc_even / weight[None, :]).to(bf16), mask=valid[None, :])
            gl.store(
                out_ptr + out_at + 1, (acc_odd / weight[None, :]).to(bf16), mask=valid[None, :]
            )
        else:
            part = partial_ptr + ((slot0 + split + behind * num_splits) * NUM_HEADS + head) * (
                DIM + 2
            )
            gl.store(part[None, :] + dims[:, None], acc_even, mask=valid[None, :])
            gl.store(part[None, :] + (dims + half)[:, None], acc_odd, mask=valid[None, :])
            gl.store(part + DIM, top, mask=valid)
            gl.store(part + DIM + 1, weight, mask=valid)
            barrier()
            for _ in range(num_tokens):
                done = gl.atomic_add(
                    done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu"
                )
                if done == num_here - 1:  # the last of them merges all
                    gl.store(done_ptr + token * NUM_KV_HEADS + kv_head, 0)
                    _merge_parts(
                        partial_ptr,
                        out_ptr,
                        token,
                        slot0,
                        num_splits,
                        kv_head,
                        scale,
                        NUM_HEADS,
                        NUM_KV_HEADS,
                        DIM,
                        TOGETHER,
                    )
                token, slot0 = token + 1, slot0 + num_splits
        tile += gl.num_programs(1) * SINGLE_WIDTH
        num_splits = num_next


def attend_single(
    qkv_TC: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, layer: int, table: torch.Tensor, out_TC: torch.Tensor,
    singles: torch.Tensor, partial: torch.Tensor, done: torch.Tensor, scale: float, num_programs: int, num_heads: int, split: int,
    early: bool,
) -> None:  # fmt: skip
    """The pool, of which `cache` and `scales` are parts, is fetched from as rows of one head's
    words. Programs that do not fit would wait only to find that there is nothing to do: those that
    do take their records, too."""
    num_kv_heads, block, dim = cache.shape[3:]
    fit = PER_MULTIPROCESSOR * torch.cuda.get_device_properties().multi_processor_count
    num_programs = min(num_programs, max(fit // num_kv_heads, 1))
    codes, pairs, ring = (
        cache.view(torch.int16),
        scales.view(torch.int32),
        RINGS[qkv_TC.shape[0] > 16],
    )
    rows_per_page, height = codes.stride(0) // (dim // 2), block // ring.parts
    pool = codes.as_strided((cache.shape[0] * rows_per_page, dim // 2), (dim // 2, 1))
    layout = gl.NVMMASharedLayout.get_default_for([height, dim // 2], gl.int16)
    launch(
        _attend_single_fp8, (num_kv_heads, num_programs),
        qkv_TC.view(torch.int32), TensorDescriptor.from_tensor(pool, [height, dim // 2], layout), pairs, table, out_TC, partial,
        done, singles, layer * 2 * num_kv_heads, rows_per_page, pairs.stride(0), table.stride(0), scale,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, SPLIT=split, BLOCK=block, PARTS=ring.parts,
        BUFFERS=ring.buffers, TOGETHER=4, EARLY=early, num_warps=1, maxnreg=ring.registers, launch_pdl=True,
    )  # fmt: skip
