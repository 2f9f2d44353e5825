"""Attention of one token on Hopper GPUs: a split at once.

The same sums in the same order as `_attend_single` of paged_attention.py, so the same bits. There a
block waits for the one before it, about a microsecond each, which is most of the time of a small
batch. What has to be in order is little: the highest score so far is the same in any order; the
sums of weights are one fused multiply-add a block, and only the matmuls with values are a chain,
that of a block on top of what the one before has left. So each of the eight warps has the scores of
a block of its own; they tell each other their highest scores, then their weights, and then each
multiplies out all blocks in order for some columns.

All keys and values of a split are under way at once: those that were in the cache before this step,
from before the kernel that enters the new ones is done. To have room for them, a program has half
the columns of the values (`COLUMNS`) and all keys.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tidemill.kernels.cuda.hopper_attention import barrier, moved_top
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

# A name that has changed with Triton's versions.
copy_ahead = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
ROWS, COLUMNS = 16, 64
_ROWS, _COLUMNS = gl.constexpr(ROWS), gl.constexpr(COLUMNS)


@gluon.jit
def _read(tile, table_ptr, table_width, SPLIT: gl.constexpr, BLOCK: gl.constexpr):
    """A record, how many blocks its split has, and their pages."""
    token, slot0 = (
        gl.load(tile + SINGLE_TOKEN).to(gl.int64),
        gl.load(tile + SINGLE_SLOT).to(gl.int64),
    )
    num_here, num_tokens = gl.load(tile + SINGLE_LISTED), gl.load(tile + SINGLE_TOKENS)
    position, row, split = (
        gl.load(tile + SINGLE_POSITION),
        gl.load(tile + SINGLE_ROW),
        gl.load(tile + SINGLE_SPLIT),
    )
    position -= split * SPLIT  # counted from the split's first
    num_blocks: gl.constexpr = SPLIT // BLOCK
    last = gl.minimum(gl.cdiv(position + num_tokens, BLOCK), num_blocks)
    table = table_ptr + row.to(gl.int64) * table_width + split * num_blocks
    pages = ()  # type: tuple
    for i in gl.static_range(num_blocks):
        pages = pages + (gl.load(table + i, mask=i < last, other=0),)
    return token, slot0, num_here, num_tokens, position, split, last, pages


@gluon.jit
def _now(value):
    """Has it computed here: else the compiler does it where it is used, in the chain of matmuls."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _copy(
    cache_ptr, pages, first, last, end, run, runs_per_page, k_bufs, v_bufs, part,
    KEYS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Copies the keys, or this part of the values, of blocks `first` to `last` of a split. `end`:
    after the last key, counted from the split's first. Past it may lie anything: zeros take its
    place."""
    width: gl.constexpr = DIM if KEYS else _COLUMNS
    num_blocks: gl.constexpr = k_bufs.type.shape[0]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // width, width // 8], [1, num_blocks, 1], [2, 1, 0]
    )
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][
        :, :, None
    ]
    columns = gl.arange(0, width, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][
        :, None, :
    ]
    # wide, so that the addresses of a block are one and distances from it
    at = rows.to(gl.int64) * DIM + columns
    for i in gl.static_range(num_blocks):
        if (i >= first) & (i < last):
            from_ptr = cache_ptr + (pages[i].to(gl.int64) * runs_per_page + run) * (BLOCK * DIM)
            there = rows + columns * 0 < end - i * BLOCK
            if KEYS:
                copy_ahead(k_bufs.slice(i, 1, dim=0), from_ptr + at, mask=there)
            else:
                from_ptr += NUM_KV_HEADS * BLOCK * DIM + part * _COLUMNS
                copy_ahead(v_bufs.slice(i, 1, dim=0), from_ptr + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _ask_for(
    cache_ptr, pages, num, run, runs_per_page,
    NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr, NUM_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Has the keys and values of `num` blocks brought to the second-level cache, where all see what
    anybody writes."""
    lines: gl.constexpr = BLOCK * DIM // 64  # of 128 bytes
    line = gl.arange(0, 2 * lines, layout=gl.BlockedLayout([1], [32], [NUM_BLOCKS], [0]))
    at = line % lines * 64 + line // lines * (NUM_KV_HEADS * BLOCK * DIM)
    for i in gl.static_range(NUM_BLOCKS):
        if i < num:
            line_ptr = (
                cache_ptr + (pages[i].to(gl.int64) * runs_per_page + run) * (BLOCK * DIM) + at
            )
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [line_ptr],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


@gluon.jit
def _merge_parts(
    partial_ptr, out_ptr, token, slot, num_splits, kv_head, scale,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """In order; as paged_attention.py has it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    head, there = kv_head * group + rows, rows < group
    part = partial_ptr + (slot * NUM_HEADS + head) * (DIM + 2)
    acc = gl.zeros((_ROWS, DIM), gl.float32, layout)
    top = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros((_ROWS,), gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, num_splits, TOGETHER):
        parts = ()  # type: tuple
        for i in gl.static_range(TOGETHER):  # so many are under way at a time
            is_there = there & (rows * 0 + first + i < num_splits)
            at = part + i * NUM_HEADS * (DIM + 2)
            more = gl.load(
                at[:, None] + columns[None, :],
                mask=is_there[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            more_top = gl.load(at + DIM, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            more_total = gl.load(at + DIM + 1, mask=is_there, other=0.0, cache_modifier=".cg")
            parts = parts + ((more, more_top, more_total),)
        for i in gl.static_range(TOGETHER):
            more, more_top, more_total = parts[i]
            new_top = gl.maximum(top, more_top)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)
            old, new = gl.exp2((top - shift) * scale), gl.exp2((more_top - shift) * scale)
            acc = gl.fma(acc, gl.zeros_like(acc) + old[:, None], more * new[:, None])
            top, total = new_top, gl.fma(more_total, new, total * old)
        part += TOGETHER * NUM_HEADS * (DIM + 2)
    out_at = (token * NUM_HEADS + head)[:, None] * DIM + columns[None, :]
    gl.store(
        out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None]
    )


@gluon.jit(do_not_specialize=["layer_run", "table_width", "head_width"])
def _attend_single_at_once(
    qkv_ptr, cache_ptr, table_ptr, out_ptr, partial_ptr, done_ptr, singles_ptr, layer_run, runs_per_page, table_width,
    head_width, scale,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr, BLOCK: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """The step has one token: all that is read, but what this token has entered, was there before
    the kernel that enters it. Reference: `attention.attention_reference`."""
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    num_blocks: gl.constexpr = SPLIT // BLOCK  # and warps
    num_parts: gl.constexpr = DIM // _COLUMNS
    # Of the scores each warp has a block, of the results some columns of all rows.
    by_score: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_blocks, 1, 1], [1, 16, 8])
    by_result: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1, num_blocks], [1, 16, 8])
    by_sum: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [1, 1, num_blocks], [2, 1, 0])
    score_rows: gl.constexpr = gl.SliceLayout(2, by_score)
    result_rows: gl.constexpr = gl.SliceLayout(2, by_result)
    for_q: gl.constexpr = gl.DotOperandLayout(0, by_score, 2)
    for_k: gl.constexpr = gl.DotOperandLayout(1, by_score, 2)
    for_weights: gl.constexpr = gl.DotOperandLayout(0, by_result, 2)
    for_values: gl.constexpr = gl.DotOperandLayout(1, by_result, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    k_bufs = gl.allocate_shared_memory(dtype, [num_blocks, BLOCK, DIM], swizzled)
    v_bufs = gl.allocate_shared_memory(dtype, [num_blocks, BLOCK, _COLUMNS], swizzled)
    q_buf = gl.allocate_shared_memory(dtype, [1, _ROWS, DIM], swizzled)
    weights_buf = gl.allocate_shared_memory(dtype, [num_blocks, _ROWS, BLOCK], swizzled)
    sums_buf = gl.allocate_shared_memory(
        gl.float32, [num_blocks, _ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    tops_buf = gl.allocate_shared_memory(
        gl.float32, [num_blocks, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )

    by_row: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // DIM, DIM // 8], [1, num_blocks, 1], [2, 1, 0]
    )
    q_rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_row)))[None, :][
        :, :, None
    ]
    q_columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_row)))[None, :][
        :, None, :
    ]
    blocks = gl.arange(0, num_blocks, layout=gl.SliceLayout(1, score_rows))[:, None]
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_score)))[None, :][
        :, None, :
    ]
    keys += blocks[:, :, None] * BLOCK
    behind = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, score_rows))[None, :] // group
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, result_rows))[None, :]
    columns = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_result)))[
        None, :
    ][:, None, :]

    kv_head, part = gl.program_id(0) // num_parts, gl.program_id(0) % num_parts
    table_ptr += kv_head * head_width
    run = layer_run + kv_head
    # The record, the page table and earlier tokens were there long before the kernel that this one
    # waits for.
    tile, to_next = singles_ptr + gl.program_id(1) * SINGLE_WIDTH, gl.num_programs(1) * SINGLE_WIDTH
    num_splits = gl.load(tile + SINGLE_SPLITS)
    splits_next = gl.load(tile + to_next + SINGLE_SPLITS, mask=num_splits > 0, other=0)
    token, slot0, num_here, num_tokens, position, split, last, pages = _read(
        tile, table_ptr, table_width, SPLIT, BLOCK
    )
    ahead = gl.minimum(position // BLOCK, num_blocks)  # blocks that are on their way
    _copy(
        cache_ptr,
        pages,
        0,
        ahead,
        SPLIT,
        run,
        runs_per_page,
        k_bufs,
        v_bufs,
        part,
        True,
        NUM_KV_HEADS,
        DIM,
        BLOCK,
    )
    _copy(
        cache_ptr,
        pages,
        0,
        ahead,
        SPLIT,
        run,
        runs_per_page,
        k_bufs,
        v_bufs,
        part,
        False,
        NUM_KV_HEADS,
        DIM,
        BLOCK,
    )
    # if nobody waited, the kernel after this one would not, either
    if (num_splits > 0) | (gl.program_id(1) == 0):
        gdc_wait()
    gdc_launch_dependents()  # there is room for the next kernel, while this one runs
    while num_splits > 0:
        q_head = (
            (token + q_rows // group) * (NUM_HEADS + 2 * NUM_KV_HEADS)
            + kv_head * group
            + q_rows % group
        )
        copy_ahead(
            q_buf,
            qkv_ptr + q_head * DIM + q_columns,
            mask=q_rows // group + q_columns * 0 < num_tokens,
        )
        end = position + num_tokens
        _copy(
            cache_ptr,
            pages,
            ahead,
            last,
            end,
            run,
            runs_per_page,
            k_bufs,
            v_bufs,
            part,
            True,
            NUM_KV_HEADS,
            DIM,
            BLOCK,
        )
        _copy(
            cache_ptr,
            pages,
            ahead,
            last,
            end,
            run,
            runs_per_page,
            k_bufs,
            v_bufs,
            part,
            False,
            NUM_KV_HEADS,
            DIM,
            BLOCK,
        )
        token_next, slot0_next, here_next, tokens_next = token, slot0, num_here, num_tokens
        position_next, split_next, last_next, pages_next, splits_after = (
            position,
            split,
            last,
            pages,
            num_splits * 0,
        )
        if splits_next > 0:
            tile += to_next
            (
                token_next,
                slot0_next,
                here_next,
                tokens_next,
                position_next,
                split_next,
                last_next,
                pages_next,
            ) = _read(tile, table_ptr, table_width, SPLIT, BLOCK)
            splits_after = gl.load(tile + to_next + SINGLE_SPLITS)
        async_copy.wait_group(1)  # queries and keys are there
        barrier()
        q = gl.broadcast(q_buf.load(for_q), gl.zeros((num_blocks, _ROWS, DIM), dtype, for_q))[0]
        scores = mma_v2(
            q,
            k_bufs.permute((0, 2, 1)).load(for_k),
            gl.zeros((num_blocks, _ROWS, BLOCK), gl.float32, by_score),
        )
        scores = gl.where(keys <= (position + behind)[:, :, None], scores, float("-inf"))
        tops_buf.store(gl.max(scores, 2))
        barrier()
        if splits_next > 0:
            _ask_for(
                cache_ptr,
                pages_next,
                last_next,
                run,
                runs_per_page,
                NUM_KV_HEADS,
                DIM,
                BLOCK,
                num_blocks,
            )
        top = gl.full((1, _ROWS), float("-inf"), gl.float32, result_rows)
        # what the weights of this warp's block are relative to
        mine = gl.zeros((num_blocks, _ROWS), gl.float32, score_rows)
        shrinks = ()  # type: tuple
        for i in gl.static_range(num_blocks):
            before = top
            top, safe_top = moved_top(tops_buf.slice(i, 1, dim=0).load(result_rows), top, scale)
            shrinks = shrinks + (_now(gl.exp2((before - safe_top) * scale)),)
            mine = gl.where(blocks == i, gl.convert_layout(safe_top, score_rows), mine)
        shift = gl.zeros_like(scores) - (mine * scale)[:, :, None]
        weights = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, shift))
        parts = gl.reshape(weights, (num_blocks, _ROWS, 2, 2, 2, 4, 2))
        sums_buf.store(gl.sum(gl.sum(gl.sum(gl.sum(parts, 6), 2), 2), 2))
        weights_buf.store(weights.to(dtype))
        async_copy.wait_group(0)
        barrier()
        acc = gl.zeros((1, _ROWS, _COLUMNS), gl.float32, by_result)
        total = gl.zeros((1, _ROWS, 4), gl.float32, by_sum)
        next_weights = weights_buf.slice(0, 1, dim=0).load(for_weights)
        next_values = v_bufs.slice(0, 1, dim=0).load(for_values)
        next_sums = sums_buf.slice(0, 1, dim=0).load(by_sum)
        for i in gl.static_range(num_blocks):
            these, values, sums = next_weights, next_values, next_sums
            if i + 1 < num_blocks:
                next_weights = weights_buf.slice(i + 1, 1, dim=0).load(for_weights)
                next_values = v_bufs.slice(i + 1, 1, dim=0).load(for_values)
                next_sums = sums_buf.slice(i + 1, 1, dim=0).load(by_sum)
            if i < last:
                acc = mma_v2(these, values, acc * shrinks[i][:, :, None])
                shrink = gl.convert_layout(shrinks[i], gl.SliceLayout(2, by_sum))[:, :, None]
                total = gl.fma(total, gl.zeros_like(total) + shrink, sums)
        weight = gl.convert_layout(
            gl.sum(gl.sum(gl.reshape(total, (1, _ROWS, 2, 2)), 2), 2), result_rows
        )
        head, valid = kv_head * group + rows % group, rows // group < num_tokens
        if num_splits == 1:
            out_at = (((token + rows // group) * NUM_HEADS + head) * DIM + part * _COLUMNS)[
                :, :, None
            ] + columns
            gl.store(out_ptr + out_at, (acc / weight[:, :, None]).to(dtype), mask=valid[:, :, None])
        else:
            part_at = ((slot0 + split + rows // group * num_splits) * NUM_HEADS + head) * (DIM + 2)
            gl.store(
                partial_ptr + (part_at + part * _COLUMNS)[:, :, None] + columns,
                acc,
                mask=valid[:, :, None],
            )
            gl.store(partial_ptr + part_at + DIM, top, mask=valid)
            gl.store(partial_ptr + part_at + DIM + 1, weight, mask=valid)
            barrier()
            for _ in range(num_tokens):
                done = gl.atomic_add(
                    done_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu"
                )
                if done == num_here * num_parts - 1:  # the last of them merges all
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
        barrier()  # all have read what was there
        token, slot0, num_here, num_tokens = token_next, slot0_next, here_next, tokens_next
        position, split, last, pages, ahead = position_next, split_next, last_next, pages_next, 0
        num_splits, splits_next = splits_next, splits_after


def attend_single(
    qkv_TC: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, out_TC: torch.Tensor, singles: torch.Tensor,
    partial: torch.Tensor, done: torch.Tensor, where: tuple[int, int, int, int, float], num_programs: int, num_heads: int,
    split: int,
) -> None:  # fmt: skip
    """A multiprocessor has room for one program. Those beyond would have to wait to find that there
    is nothing to do."""
    num_kv_heads, block, dim = cache.shape[3:]
    across = num_kv_heads * (dim // COLUMNS)
    num_programs = min(
        num_programs, max(torch.cuda.get_device_properties().multi_processor_count // across, 1)
    )
    launch(
        _attend_single_at_once, (across, num_programs),
        qkv_TC, cache, table, out_TC, partial, done, singles, *where, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim,
        SPLIT=split, BLOCK=block, TOGETHER=8, num_warps=8, maxnreg=224, launch_pdl=True,
    )  # fmt: skip
