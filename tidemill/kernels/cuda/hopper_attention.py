"""Attention of prompts on Hopper GPUs, with roles: one warp fetches keys and values, two groups of
four warps compute.

The same sums in the same order as `_attend_prompts` of paged_attention.py, so the same bits; faster
because the fetched blocks serve twice as many rows, and because one group's softmax runs while the
other's matmuls do, and its own: the values of a block are multiplied out while the next one is
being weighted. A program stays on its multiprocessor and takes tile after tile; what the next tile
needs is fetched while this one ends. Written in Gluon, Triton's language for one kind of chip.

Of a cache with scales (scaled_attention.py), blocks come from copies of pages in bfloat16 that have
the even dimensions before the odd ones (page_copies.py). Where there was no room for copies, the
warps that fetch also make bfloat16 of what they have fetched, on its way from one buffer to
another, which takes issue slots from those that compute. The bits are the same.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tidemill.kernels.cuda.launch import launch
from tidemill.kernels.cuda.paged_attention import ROOM
from tidemill.kernels.cuda.records import (
    PROMPT_COPY,
    PROMPT_POSITION,
    PROMPT_ROW,
    PROMPT_TOKEN,
    PROMPT_TOKENS,
    PROMPT_WIDTH,
)
from tidemill.kernels.cuda.scaled_values import FP8_PAIRS, INT8_PAIRS

# Names that have changed with Triton's versions.
# of this group of warps
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
ROWS = 128
_HALF = gl.constexpr(64)
_BUFFERS = 3


@triton.constexpr_function
def _by_thread(dim: int) -> gl.SharedLinearLayout:
    """Results of a group in shared memory: four values of a thread side by side, then its
    neighbours', then the rest."""
    mine, neighbours = [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    columns = [[0, 16 << i] for i in range((dim // 16).bit_length() - 1)]
    return gl.SharedLinearLayout([*mine, *neighbours, [8, 0], *columns, [16, 0], [32, 0]])


@gluon.jit
def _entry(lists_ptr, WORD: gl.constexpr, turn, NUM_KV_HEADS: gl.constexpr):
    """The tile and head of this program's turn. Tiles are sorted by their work; turns go to and fro
    among the programs, so that all have about the same."""
    num = gl.num_programs(0)
    place = gl.program_id(0)
    number = turn * num + gl.where(turn % 2 == 0, place, num - 1 - place)
    return lists_ptr + gl.load(
        lists_ptr + WORD
    ) + number // NUM_KV_HEADS * PROMPT_WIDTH, number % NUM_KV_HEADS


@gluon.jit
def _read(tile):
    return (
        gl.load(tile + PROMPT_TOKEN).to(gl.int64),
        gl.load(tile + PROMPT_TOKENS),
        gl.load(tile + PROMPT_POSITION),
    )


@gluon.jit
def _fetch(
    cache_desc, table_ptr, lists_ptr, layer_run, runs_per_page, table_width, k_bufs, v_bufs, k_full, k_free, v_full, v_free,
    WORD: gl.constexpr, NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = k_bufs.type.shape[0]
    turn = 0
    tile, kv_head = _entry(lists_ptr, WORD, turn, NUM_KV_HEADS)
    num = gl.load(tile + PROMPT_TOKENS)
    count = 0
    while num > 0:
        table = table_ptr + gl.load(tile + PROMPT_ROW).to(gl.int64) * table_width
        for block in range(gl.cdiv(gl.load(tile + PROMPT_POSITION) + num, BLOCK)):
            run = (gl.load(table + block) * runs_per_page + layer_run + kv_head) * BLOCK
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(k_free.index(i), phase ^ 1)
            mbarrier.expect(k_full.index(i), cache_desc.block_type.nbytes)
            fetch(cache_desc, [run, 0], k_full.index(i), k_bufs.index(i))
            mbarrier.wait(v_free.index(i), phase ^ 1)
            mbarrier.expect(v_full.index(i), cache_desc.block_type.nbytes)
            fetch(cache_desc, [run + NUM_KV_HEADS * BLOCK, 0], v_full.index(i), v_bufs.index(i))
            count += 1
        turn += 1
        tile, kv_head = _entry(lists_ptr, WORD, turn, NUM_KV_HEADS)
        num = gl.load(tile + PROMPT_TOKENS)


@gluon.jit
def _convert(words_buf, buf, scales, FP8: gl.constexpr, words_layout: gl.constexpr):
    half: gl.constexpr = words_buf.type.shape[1]
    words = words_buf.load(words_layout)
    asm: gl.constexpr = FP8_PAIRS if FP8 else INT8_PAIRS
    even, odd = gl.inline_asm_elementwise(
        asm,
        "=r,=r,r,r",
        [words, scales[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    buf.slice(0, half, dim=1).store(even)
    buf.slice(half, half, dim=1).store(odd)


@gluon.jit
def _scales(scales_ptr, at, FP8: gl.constexpr):
    scales = gl.load(scales_ptr + at)
    if FP8:
        scales = (scales.to(gl.float32) * 1.329227995784916e36).to(gl.bfloat16)  # 2**120
    return scales


@gluon.jit
def _tile(
    table_ptr,
    lists_ptr,
    table_width,
    turn,
    WORD: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """The work of a turn: the head, how many blocks (0: there are no more tiles), where the page
    table of its sequence begins, and the number of the first copied page."""
    tile, kv_head = _entry(lists_ptr, WORD, turn, NUM_KV_HEADS)
    table = table_ptr + gl.load(tile + PROMPT_ROW).to(gl.int64) * table_width
    num = gl.load(tile + PROMPT_TOKENS)
    left = gl.where(num > 0, gl.cdiv(gl.load(tile + PROMPT_POSITION) + num, BLOCK), 0)
    return kv_head, left, table, gl.load(tile + PROMPT_COPY)


@gluon.jit
def _fetch_scaled(
    cache_desc, copies_desc, scales_ptr, table_ptr, lists_ptr, layer_run, rows_per_page, page_scales, table_width, k_words,
    v_words, words_full, k_bufs, v_bufs, k_full, k_free, v_full, v_free,
    WORD: gl.constexpr, NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Blocks that are not copied are fetched ahead, as many as there is room for; each is converted
    when it is the next to compute with."""
    num_buffers: gl.constexpr = k_bufs.type.shape[0]
    num_ahead: gl.constexpr = k_words.type.shape[0]
    by_words: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, by_words))
    to_values: gl.constexpr = NUM_KV_HEADS * BLOCK
    turn = 0
    kv_head, left, table, copy = _tile(
        table_ptr, lists_ptr, table_width, turn, WORD, NUM_KV_HEADS, BLOCK
    )
    page = gl.load(table)
    fetched, converted, count = 0, 0, 0  # count: of all blocks, copied ones as well
    # Where the scales of blocks lie that are under way: of number n in n % 3. Those of the next are
    # asked for while one is converted.
    scales0 = page.to(gl.int64) * page_scales + (layer_run + kv_head) * BLOCK
    scales1, scales2 = scales0, scales0
    k_scales = _scales(scales_ptr, scales0 + keys, FP8)
    v_scales = _scales(scales_ptr, scales0 + to_values + keys, FP8)
    while (left > 0) | (converted < fetched):
        is_copied = (left > 0) & (copy > 0)
        o, out_phase = count % num_buffers, (count // num_buffers) & 1
        if is_copied & (converted == fetched):
            row = ((copy - 1) * 2 * NUM_KV_HEADS + kv_head) * BLOCK
            mbarrier.wait(k_free.index(o), out_phase ^ 1)
            mbarrier.expect(k_full.index(o), copies_desc.block_type.nbytes)
            fetch(copies_desc, [row, 0], k_full.index(o), k_bufs.index(o))
            mbarrier.wait(v_free.index(o), out_phase ^ 1)
            mbarrier.expect(v_full.index(o), copies_desc.block_type.nbytes)
            fetch(copies_desc, [row + to_values, 0], v_full.index(o), v_bufs.index(o))
            count += 1
            left -= 1
            copy += 1
            if left == 0:
                turn += 1
                kv_head, left, table, copy = _tile(
                    table_ptr, lists_ptr, table_width, turn, WORD, NUM_KV_HEADS, BLOCK
                )
                page = gl.load(table)
        elif (left > 0) & (copy == 0) & (fetched - converted < num_ahead):
            i = fetched % num_ahead
            row = page * rows_per_page + (layer_run + kv_head) * BLOCK
            mbarrier.expect(words_full.index(i), 2 * cache_desc.block_type.nbytes)
            fetch(cache_desc, [row, 0], words_full.index(i), k_words.index(i))
            fetch(cache_desc, [row + to_values, 0], words_full.index(i), v_words.index(i))
            at = page.to(gl.int64) * page_scales + (layer_run + kv_head) * BLOCK
            scales0 = gl.where(i == 0, at, scales0)
            scales1 = gl.where(i == 1, at, scales1)
            scales2 = gl.where(i == 2, at, scales2)
            if converted == fetched:  # none before it asked for them
                k_scales = _scales(scales_ptr, at + keys, FP8)
                v_scales = _scales(scales_ptr, at + to_values + keys, FP8)
            fetched += 1
            left -= 1
            table += 1
            if left == 0:
                turn += 1
                kv_head, left, table, copy = _tile(
                    table_ptr, lists_ptr, table_width, turn, WORD, NUM_KV_HEADS, BLOCK
                )
            page = gl.load(table)
        else:
            i, phase = converted % num_ahead, (converted // num_ahead) & 1
            converted += 1
            count += 1
            after = converted % num_ahead
            at = gl.where(after == 0, scales0, gl.where(after == 1, scales1, scales2))
            k_scales_next = _scales(scales_ptr, at + keys, FP8)
            v_scales_next = _scales(scales_ptr, at + to_values + keys, FP8)
            mbarrier.wait(words_full.index(i), phase)
            mbarrier.wait(k_free.index(o), out_phase ^ 1)
            _convert(k_words.index(i), k_bufs.index(o), k_scales, FP8, by_words)
            fence_async_shared()
            _done_with(k_full.index(o))
            mbarrier.wait(v_free.index(o), out_phase ^ 1)
            _convert(v_words.index(i), v_bufs.index(o), v_scales, FP8, by_words)
            fence_async_shared()
            _done_with(v_full.index(o))
            k_scales, v_scales = k_scales_next, v_scales_next


@gluon.jit
def _mask(scores, first_key, positions, BLOCK: gl.constexpr, layout: gl.constexpr):
    keys = first_key + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    return gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))


@gluon.jit
def moved_top(highest, top, scale):
    """The score that weights are relative to after a block with this highest one, as in
    paged_attention.py; and 0 instead of it where a row has seen no keys."""
    new_top = gl.where((highest - top) * scale > ROOM, highest, top)
    return new_top, gl.where(new_top == float("-inf"), 0.0, new_top)


@gluon.jit
def _weigh(scores, top, scale):
    # in a tree: in a chain each waits for the one before
    parts = gl.reshape(scores, (_HALF, 2, 2, 2, 4, 2))
    highest = gl.max(gl.max(gl.max(gl.max(gl.max(parts, 5), 1), 1), 1), 1)
    highest = gl.convert_layout(highest, top.type.layout)
    new_top, safe_top = moved_top(highest, top, scale)
    shift = gl.zeros_like(scores) - (safe_top * scale)[:, None]
    weights = gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, shift))
    return weights, new_top, gl.exp2((top - safe_top) * scale)


@gluon.jit
def _sums(weights):
    parts = gl.reshape(weights, (_HALF, 2, 2, 2, 4, 2))
    return gl.sum(gl.sum(gl.sum(gl.sum(parts, 5), 1), 1), 1)


@triton.constexpr_function
def _multiply_unless_1(num: int) -> tuple[str, str]:
    """A thread's `num` sums of two rows (two of the one, two of the other, and so on) times a
    factor for each row. A warp whose factors are all 1, which is most often so, skips it."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * num + i}; " for i in range(num))
    text = f"setp.neu.f32 p, ${2 * num}, 1.0; setp.neu.or.f32 p, ${2 * num + 2}, 1.0, p; vote.sync.any.pred p, p, -1; "
    constraints = ["=f"] * num + [str(i) for i in range(num)] + ["f"] * num
    return f"{{ .reg .pred p; {text}@!p bra skip; {products}skip: }}", ",".join(constraints)


@gluon.jit
def _shrunk(acc, shrink):
    num: gl.constexpr = acc.type.shape[1] // 2
    how: gl.constexpr = _multiply_unless_1(num)
    factors = gl.zeros_like(acc) + shrink[:, None]
    return gl.inline_asm_elementwise(
        how[0], how[1], [acc, factors], dtype=gl.float32, is_pure=False, pack=num
    )


@gluon.jit
def _add_up(weights, total, shrink):
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return gl.fma(
        total, gl.zeros_like(total) + gl.convert_layout(shrink, rows)[:, None], _sums(weights)
    )


@gluon.jit
def _in_all(total, rows: gl.constexpr):
    return gl.convert_layout(gl.sum(gl.sum(gl.reshape(total, (_HALF, 2, 2)), 1), 1), rows)


@gluon.jit
def _merge(all_buf, all_top, all_total, acc, top, total, scale, acc_rows: gl.constexpr):
    """Merges in the earlier part, which waits in shared memory, each thread's part for itself."""
    new_top = gl.maximum(all_top, top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = gl.exp2((all_top - shift) * scale), gl.exp2((top - shift) * scale)
    old_rows, new_rows = gl.convert_layout(old, acc_rows), gl.convert_layout(new, acc_rows)
    all_acc = all_buf.load(acc.type.layout)
    all_acc = gl.fma(all_acc, gl.zeros_like(all_acc) + old_rows[:, None], acc * new_rows[:, None])
    return all_acc, new_top, gl.fma(total, new, all_total * old)


@gluon.jit
def _now(values):
    """Has them computed here: else the compiler does it where they are used."""
    pack: gl.constexpr = 32 // values.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=pack
    )


@gluon.jit
def _done_with(buffer_free):
    """All warps of this group have read it."""
    barrier()
    mbarrier.arrive(buffer_free, count=1)


@gluon.jit
def _queries(
    qkv_ptr, token0, num, kv_head, PART: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    HALVES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """In halves: two values come as one word; the even dimensions, then the odd ones."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    width: gl.constexpr = DIM // 2 if HALVES else DIM
    rows = PART * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    at = (
        (token0 + rows // group) * (NUM_HEADS + 2 * NUM_KV_HEADS) + kv_head * group + rows % group
    )[:, None] * width
    valid = (rows // group < num)[:, None]
    if HALVES:
        words = gl.load(qkv_ptr + (at + columns[None, :]), mask=valid, other=0)
        even, odd = (
            words.to(gl.int16).to(gl.bfloat16, bitcast=True),
            (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True),
        )
        q = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 1)), (_HALF, DIM))
        return _now(gl.convert_layout(q, layout))
    else:
        return gl.load(qkv_ptr + (at + columns[None, :]), mask=valid, other=0.0)


@gluon.jit
def _scores(q, k_buf, nothing):
    """Started."""
    return warpgroup_mma(q, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _compute(
    qkv_ptr, out_ptr, lists_ptr, scale, k_bufs, v_bufs, all_buf, k_full, k_free, v_full, v_free,
    PART: gl.constexpr, WORD: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    SPLIT: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """`HALVES`: keys and values have the even dimensions first, then the odd ones. Queries and
    results, which have them in order, come and go as words of two."""
    num_buffers: gl.constexpr = k_bufs.type.shape[0]
    dtype: gl.constexpr = k_bufs.dtype
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    per_split: gl.constexpr = SPLIT // BLOCK
    by_score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    by_value: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    for_score: gl.constexpr = gl.DotOperandLayout(0, by_score, 2)
    for_value: gl.constexpr = gl.DotOperandLayout(0, by_value, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, by_score)
    value_rows: gl.constexpr = gl.SliceLayout(1, by_value)
    by_line: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    turn = 0
    tile, kv_head = _entry(lists_ptr, WORD, turn, NUM_KV_HEADS)
    token0, num, start = _read(tile)
    q = _queries(
        qkv_ptr, token0, num, kv_head, PART, NUM_HEADS, NUM_KV_HEADS, DIM, HALVES, for_score
    )
    count = 0
    while num > 0:
        end = start + num
        turn += 1
        tile, kv_head_next = _entry(lists_ptr, WORD, turn, NUM_KV_HEADS)
        token0_next, num_next, start_next = _read(tile)
        positions = start + (PART * _HALF + gl.arange(0, _HALF, layout=score_rows)) // group
        acc = gl.zeros((_HALF, DIM), gl.float32, by_value)
        top = gl.full((_HALF,), float("-inf"), gl.float32, score_rows)
        nothing = gl.zeros((_HALF, BLOCK), gl.float32, by_score)
        all_buf.store(acc)
        all_total, all_top = gl.zeros((_HALF,), gl.float32, score_rows), top

        num_blocks = gl.cdiv(end, BLOCK)
        i, phase = count % num_buffers, (count // num_buffers) & 1
        mbarrier.wait(k_full.index(i), phase)
        scores, q = warpgroup_mma_wait(0, (_scores(q, k_bufs.index(i), nothing), q))
        _done_with(k_free.index(i))
        if start + 1 < BLOCK:
            scores = _mask(scores, 0, positions, BLOCK, by_score)
        exact, top, _ = _weigh(scores, top, scale)
        total = _sums(exact)
        weights = exact.to(dtype)
        if num_blocks > 1:
            mbarrier.wait(k_full.index((count + 1) % num_buffers), ((count + 1) // num_buffers) & 1)
        for block in range(1, num_blocks):
            before, before_phase = count % num_buffers, (count // num_buffers) & 1
            count += 1
            i = count % num_buffers
            scores_soon = _scores(q, k_bufs.index(i), nothing)
            mbarrier.wait(v_full.index(before), before_phase)
            operand = gl.convert_layout(weights, for_value)
            acc_soon = warpgroup_mma(operand, v_bufs.index(before), acc, is_async=True)
            # queries are alive, as the next block needs them; those made of words would be copied
            # here
            if HALVES:
                scores = warpgroup_mma_wait(1, (scores_soon,))
            else:
                scores, q = warpgroup_mma_wait(1, (scores_soon, q))
            _done_with(k_free.index(i))
            if (block + 1) * BLOCK > start + 1:
                scores = _mask(scores, block * BLOCK, positions, BLOCK, by_score)
            begins = block % per_split == 0
            old_top = top
            exact, top, shrink = _weigh(scores, gl.where(begins, float("-inf"), top), scale)
            old_total = total
            total = _add_up(exact, gl.where(begins, 0.0, total), shrink)
            # among the exponentials, which leave room for it
            weights, total = _now(exact.to(dtype)), _now(total)
            # This wait keeps the weights in front of the next one, beside the matmul: else the
            # assembler waits for that first.
            if block + 1 < num_blocks:
                mbarrier.wait(
                    k_full.index((count + 1) % num_buffers), ((count + 1) // num_buffers) & 1
                )
            acc, operand = warpgroup_mma_wait(0, (acc_soon, operand))
            _done_with(v_free.index(before))
            if begins:
                weight = _in_all(old_total, score_rows)
                all_acc, all_top, all_total = _merge(
                    all_buf, all_top, all_total, acc, old_top, weight, scale, value_rows
                )
                all_buf.store(all_acc)
                acc = gl.zeros((_HALF, DIM), gl.float32, by_value)
            else:
                acc = _shrunk(acc, gl.convert_layout(shrink, value_rows))
        i, phase = count % num_buffers, (count // num_buffers) & 1
        count += 1
        q = _queries(
            qkv_ptr,
            token0_next,
            num_next,
            kv_head_next,
            PART,
            NUM_HEADS,
            NUM_KV_HEADS,
            DIM,
            HALVES,
            for_score,
        )  # of the next tile
        mbarrier.wait(v_full.index(i), phase)
        v_buf = v_bufs.index(i)
        if end % BLOCK != 0:  # past the end may lie anything: a weight of zero is not enough
            keys = (num_blocks - 1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, by_line))
            values = v_buf.load(by_line)
            v_buf.store(gl.where((keys < end)[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
            barrier()
        acc = warpgroup_mma(gl.convert_layout(weights, for_value), v_buf, acc)
        _done_with(v_free.index(i))
        weight = _in_all(total, score_rows)
        all_acc, all_top, all_total = _merge(
            all_buf, all_top, all_total, acc, top, weight, scale, value_rows
        )
        result = (all_acc / gl.convert_layout(all_total, value_rows)[:, None]).to(dtype)
        width: gl.constexpr = DIM // 2 if HALVES else DIM
        if HALVES:  # a thread has an even dimension and the odd one after it: they become a word
            even, odd = gl.split(
                gl.permute(
                    gl.reshape(result.to(gl.int16, bitcast=True), (_HALF, 2, width)), (0, 2, 1)
                )
            )
            result = (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)
        else:
            result = gl.convert_layout(result, by_line)
        rows = PART * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, result.type.layout))
        columns = gl.arange(0, width, layout=gl.SliceLayout(0, result.type.layout))
        out_at = ((token0 + rows // group) * NUM_HEADS + kv_head * group + rows % group)[
            :, None
        ] * width
        gl.store(out_ptr + (out_at + columns[None, :]), result, mask=(rows // group < num)[:, None])
        token0, num, start, kv_head = token0_next, num_next, start_next, kv_head_next


@gluon.jit(do_not_specialize=["layer_run"])
def _attend_prompts_warp_specialized(
    qkv_ptr, cache_desc, table_ptr, out_ptr, lists_ptr, layer_run, runs_per_page, table_width, scale,
    WORD: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Attention. Reference: `attention.attention_reference`."""
    dtype: gl.constexpr = cache_desc.dtype
    k_bufs = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, DIM], cache_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, DIM], cache_desc.layout)
    by_thread: gl.constexpr = _by_thread(DIM)
    all_buf0 = gl.allocate_shared_memory(gl.float32, [_HALF, DIM], by_thread)
    all_buf1 = gl.allocate_shared_memory(gl.float32, [_HALF, DIM], by_thread)
    k_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    qkv_ptr, out_ptr, lists_ptr, scale, k_bufs, v_bufs, all_buf0, k_full, k_free, v_full, v_free,
                    gl.constexpr(0), WORD, NUM_HEADS, NUM_KV_HEADS, DIM, SPLIT, BLOCK, gl.constexpr(False),
                ),
            ),
            (
                _compute,
                (
                    qkv_ptr, out_ptr, lists_ptr, scale, k_bufs, v_bufs, all_buf1, k_full, k_free, v_full, v_free,
                    gl.constexpr(1), WORD, NUM_HEADS, NUM_KV_HEADS, DIM, SPLIT, BLOCK, gl.constexpr(False),
                ),
            ),
            (
                _fetch,
                (
                    cache_desc, table_ptr, lists_ptr, layer_run, runs_per_page, table_width,
                    k_bufs, v_bufs, k_full, k_free, v_full, v_free, WORD, NUM_KV_HEADS, BLOCK,
                ),
            ),
        ],
        # a fourth of these would do to fetch, but registers are handed out to groups of four
        [4, 4],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["layer_run"])
def _attend_prompts_scaled_warp_specialized(
    qkv_ptr, cache_desc, copies_desc, scales_ptr, table_ptr, out_ptr, lists_ptr, layer_run, rows_per_page, page_scales,
    table_width, scale,
    WORD: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK: gl.constexpr, BUFFERS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Attention over 8-bit and 4-bit keys and values. Reference: `attention.attention_reference`."""
    bf16: gl.constexpr = gl.bfloat16
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], bf16)
    k_bufs = gl.allocate_shared_memory(bf16, [BUFFERS, BLOCK, DIM], layout)
    v_bufs = gl.allocate_shared_memory(bf16, [BUFFERS, BLOCK, DIM], layout)
    k_words = gl.allocate_shared_memory(cache_desc.dtype, [3, BLOCK, DIM // 2], cache_desc.layout)
    v_words = gl.allocate_shared_memory(cache_desc.dtype, [3, BLOCK, DIM // 2], cache_desc.layout)
    by_thread: gl.constexpr = _by_thread(DIM)
    all_buf0 = gl.allocate_shared_memory(gl.float32, [_HALF, DIM], by_thread)
    all_buf1 = gl.allocate_shared_memory(gl.float32, [_HALF, DIM], by_thread)
    k_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    words_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(3):
        mbarrier.init(words_full.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    qkv_ptr, out_ptr, lists_ptr, scale, k_bufs, v_bufs, all_buf0, k_full, k_free, v_full, v_free,
                    gl.constexpr(0), WORD, NUM_HEADS, NUM_KV_HEADS, DIM, SPLIT, BLOCK, gl.constexpr(True),
                ),
            ),
            (
                _compute,
                (
                    qkv_ptr, out_ptr, lists_ptr, scale, k_bufs, v_bufs, all_buf1, k_full, k_free, v_full, v_free,
                    gl.constexpr(1), WORD, NUM_HEADS, NUM_KV_HEADS, DIM, SPLIT, BLOCK, gl.constexpr(True),
                ),
            ),
            (
                _fetch_scaled,
                (
                    cache_desc, copies_desc, scales_ptr, table_ptr, lists_ptr, layer_run, rows_per_page, page_scales,
                    table_width, k_words, v_words, words_full, k_bufs, v_bufs, k_full, k_free, v_full, v_free, WORD,
                    NUM_KV_HEADS, BLOCK, FP8,
                ),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


def attend_prompts(
    qkv_TC: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, out_TC: torch.Tensor, words: torch.Tensor,
    where: tuple[int, int, int, float], num_programs: int, word: int, num_heads: int, split: int,
) -> None:  # fmt: skip
    num_kv_heads, block, dim = cache.shape[3:]
    layout = gl.NVMMASharedLayout.get_default_for([block, dim], gl.bfloat16)
    launch(
        _attend_prompts_warp_specialized, (num_programs,),
        qkv_TC, TensorDescriptor.from_tensor(cache.view(-1, dim), [block, dim], layout), table, out_TC, words, *where,
        WORD=word, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, SPLIT=split, BLOCK=block, BUFFERS=_BUFFERS,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


def attend_prompts_scaled(
    qkv_TC: torch.Tensor, cache: torch.Tensor, copies: torch.Tensor, scales: torch.Tensor, layer: int, table: torch.Tensor,
    out_TC: torch.Tensor, words: torch.Tensor, scale: float, num_programs: int, word: int, num_heads: int, split: int,
) -> None:  # fmt: skip
    """The pool, of which `cache` and `scales` are parts, is fetched from as rows of one head's
    words."""
    num_kv_heads, block, dim = cache.shape[3:]
    codes = cache.view(torch.int16)
    rows_per_page = codes.stride(0) // (dim // 2)
    pool = codes.as_strided((cache.shape[0] * rows_per_page, dim // 2), (dim // 2, 1))
    layout = gl.NVMMASharedLayout.get_default_for([block, dim // 2], gl.int16)
    plain = gl.NVMMASharedLayout.get_default_for([block, dim], gl.bfloat16)
    launch(
        _attend_prompts_scaled_warp_specialized, (num_programs,),
        qkv_TC.view(torch.int32), TensorDescriptor.from_tensor(pool, [block, dim // 2], layout),
        TensorDescriptor.from_tensor(copies.view(-1, dim), [block, dim], plain), scales, table, out_TC.view(torch.int32),
        words, layer * 2 * num_kv_heads, rows_per_page, scales.stride(0), table.stride(0), scale,
        WORD=word, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, SPLIT=split, BLOCK=block, BUFFERS=_BUFFERS,
        FP8=cache.dtype == torch.float8_e4m3fn, num_warps=4, maxnreg=168,
    )  # fmt: skip
