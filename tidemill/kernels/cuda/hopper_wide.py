"""`gemm_packed` for many rows on Hopper GPUs in tiles of 128 rows by 256 outs: roles as in hopper_packed.py, but each group of warps
has two times 64 outs, one after the other. Rows in bfloat16 are four times as large as codes, so such a tile reads a third less from
the L2 cache than one of 256 rows by 128 outs, and that is what the other kernel waits for.

Tiles of a weight in one chunk are shared out evenly (hopper_shares.py); else a chunk is a tile of its own, and a second kernel adds
them up. The same sums in the same order as `_gemm_packed`, so the same bits. Written in Gluon.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tidemill.kernels.cuda.hopper_attention import barrier, fetch
from tidemill.kernels.cuda.hopper_packed import FUSED, MANY_INS, _add_chunks, _descriptor, _scales, _store_tile, _unpack
from tidemill.kernels.cuda.hopper_shares import block_of, end_of, leave_sums, numbers, share, take_sums
from tidemill.kernels.cuda.launch import HOW, launch
from tidemill.kernels.cuda.packed_gemm import Packed, _workspace

ROWS, OUTS = 128, 256


@gluon.jit
def _fetch_words(
    words_desc, number, first, last, num_blocks, tiles_m, tiles_n, words_bufs, words_full, words_free, OUTS: gl.constexpr,
    PLANE: gl.constexpr,
):  # fmt: skip
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    tile, block = block_of(number, first, last, num_blocks)
    n, chunk = tile // tiles_m % tiles_n, tile // (tiles_m * tiles_n)
    i, phase = number % num_ahead, (number // num_ahead) & 1
    mbarrier.wait(words_free.index(i), phase ^ 1)
    mbarrier.expect(words_full.index(i), words_desc.block_type.nbytes)
    fetch(words_desc, [n * OUTS, (chunk * num_blocks + block) * PLANE], words_full.index(i), words_bufs.index(i))


@gluon.jit
def _fetch(
    x_desc, words_desc, num_tiles, tiles_m, tiles_n, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    first, last = share(num_tiles, num_blocks)
    for number in range(gl.minimum(num_ahead - 1, last - first)):
        _fetch_words(
            words_desc, number, first, last, num_blocks, tiles_m, tiles_n, words_bufs, words_full, words_free, OUTS, PLANE
        )  # fmt: skip
    # Weights were there long before; activations are what the kernel before writes.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    count = 0
    for number in range(last - first):
        if number + num_ahead - 1 < last - first:
            _fetch_words(
                words_desc, number + num_ahead - 1, first, last, num_blocks, tiles_m, tiles_n, words_bufs, words_full,
                words_free, OUTS, PLANE,
            )  # fmt: skip
        tile, block = block_of(number, first, last, num_blocks)
        block += tile // (tiles_m * tiles_n) * num_blocks
        for plane in gl.static_range(PLANES):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(i), phase ^ 1)
            mbarrier.expect(x_full.index(i), x_desc.block_type.nbytes)
            fetch(x_desc, [tile % tiles_m * ROWS, (block * PLANES + plane) * PLANE], x_full.index(i), x_bufs.index(i))
            count += 1


@gluon.jit
def _leave_chunk(partial_ptr, acc, chunk, first_out, first_row, num_rows, num_out, height):
    """[chunk, out, row], as the registers hold them."""
    layout: gl.constexpr = acc.type.layout
    outs = first_out + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    lines = first_row + gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout))
    at = (chunk.to(gl.int64) * num_out + outs)[:, None] * height + lines[None, :]
    gl.store(partial_ptr + at, acc, mask=(outs < num_out)[:, None] & (lines < num_rows)[None, :])


@gluon.jit
def _multiply(
    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, tiles_n, num_blocks, words_bufs,
    words_full, words_free, x_bufs, x_full, free, PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr,
    BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    planes: gl.constexpr = 16 // BITS
    size: gl.constexpr = PLANE * planes
    groups: gl.constexpr = max(1, size // SIZE)
    first_out: gl.constexpr = PART * 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    own = numbers(64, ROWS, layout)
    first, last = share(num_tiles, num_blocks)
    count = 0
    number = 0
    while number < last - first:
        tile, block = block_of(number, first, last, num_blocks)
        end = end_of(tile, last, num_blocks)
        m, n, chunk = tile % tiles_m, tile // tiles_m % tiles_n, tile // (tiles_m * tiles_n)
        before = chunk * num_blocks
        outs = n * OUTS + first_out + gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
        scales_0, scales_1 = scales_ptr + gl.minimum(outs, num_out - 1), scales_ptr + gl.minimum(outs + 64, num_out - 1)
        found_0 = _scales(scales_0, before + block, num_out, size, SIZE)
        found_1 = _scales(scales_1, before + block, num_out, size, SIZE)
        acc_0 = gl.zeros((64, ROWS), gl.float32, layout)
        acc_1 = acc_0
        if not SPLIT:
            if block > 0:  # the program before has left the sums of what comes before this
                acc_0 = take_sums(partial_ptr, done_ptr, own, 2 * PART, 4)
                acc_1 = take_sums(partial_ptr, done_ptr, own, 2 * PART + 1, 4)
        mbarrier.wait(words_full.index(number % num_ahead), (number // num_ahead) & 1)
        words_0 = words_bufs.index(number % num_ahead).slice(first_out, 64, dim=0).load(operand)
        words_1 = words_bufs.index(number % num_ahead).slice(first_out + 64, 64, dim=0).load(operand)
        values = _unpack(words_0, found_0[0], 0, BITS, KIND)
        for _ in range(end - block):
            block += 1
            number += 1
            for plane in gl.static_range(planes):
                if plane + 1 == planes:  # not sooner: they take registers
                    soon_0 = _scales(scales_0, before + gl.minimum(block, end - 1), num_out, size, SIZE)
                    soon_1 = _scales(scales_1, before + gl.minimum(block, end - 1), num_out, size, SIZE)
                i = count % num_buffers
                mbarrier.wait(x_full.index(i), (count // num_buffers) & 1)
                x = x_bufs.index(i).permute((1, 0))
                made = warpgroup_mma(values, x, acc_0, is_async=True)
                # The next values are made while these are multiplied.
                more = _unpack(words_1, found_1[plane * PLANE // SIZE % groups], plane, BITS, KIND)
                acc_0, values = warpgroup_mma_wait(0, (made, values))
                values = more
                made = warpgroup_mma(values, x, acc_1, is_async=True)
                if plane + 1 < planes:
                    more = _unpack(words_0, found_0[(plane + 1) * PLANE // SIZE % groups], plane + 1, BITS, KIND)
                else:
                    if block < end:  # else what is there is not used
                        mbarrier.wait(words_full.index(number % num_ahead), (number // num_ahead) & 1)
                    words_0 = words_bufs.index(number % num_ahead).slice(first_out, 64, dim=0).load(operand)
                    words_1 = words_bufs.index(number % num_ahead).slice(first_out + 64, 64, dim=0).load(operand)
                    more = _unpack(words_0, soon_0[0], 0, BITS, KIND)
                acc_1, values = warpgroup_mma_wait(0, (made, values))
                barrier()
                mbarrier.arrive(free.index(i), count=1)
                # Not sooner: a barrier waits for no load, and bulk copies do not wait for loads either. What has been multiplied
                # was made of all words.
                if plane == 0:
                    mbarrier.arrive(words_free.index((number - 1) % num_ahead), count=1)
                values = more
                count += 1
            found_0 = soon_0
            found_1 = soon_1
        row, column = m * ROWS, n * OUTS + first_out
        if SPLIT:
            _leave_chunk(partial_ptr, acc_0, chunk, column, row, num_rows, num_out, tiles_m * ROWS)
            _leave_chunk(partial_ptr, acc_1, chunk, column + 64, row, num_rows, num_out, tiles_m * ROWS)
        else:
            if end < num_blocks:
                leave_sums(partial_ptr, done_ptr, acc_0, own, 2 * PART, 4)
                leave_sums(partial_ptr, done_ptr, acc_1, own, 2 * PART + 1, 4)
            else:
                _store_tile(acc_0, bias_ptr, out_ptr, row, column, num_rows, num_out, HAS_BIAS, ACT)
                _store_tile(acc_1, bias_ptr, out_ptr, row, column + 64, num_rows, num_out, HAS_BIAS, ACT)


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_packed_wide(
    x_desc, words_desc, scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_blocks,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr,
    CHUNKS: gl.constexpr, BUFFERS: gl.constexpr, WORD_BUFFERS: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """`num_blocks`: of a chunk; all have as many."""
    tiles_m, tiles_n = gl.cdiv(num_rows, ROWS), gl.cdiv(num_out, OUTS)
    num_tiles = tiles_m * tiles_n * CHUNKS
    words_bufs = gl.allocate_shared_memory(gl.int16, [WORD_BUFFERS, OUTS, PLANE], words_desc.layout)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, PLANE], x_desc.layout)
    words_full = gl.allocate_shared_memory(gl.int64, [WORD_BUFFERS, 1], mbarrier.MBarrierLayout())
    words_free = gl.allocate_shared_memory(gl.int64, [WORD_BUFFERS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WORD_BUFFERS):
        mbarrier.init(words_full.index(i), count=1)
        mbarrier.init(words_free.index(i), count=2)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, tiles_n,
                    num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free, gl.constexpr(0), ROWS, OUTS, PLANE,
                    BITS, KIND, SIZE, gl.constexpr(CHUNKS > 1), HAS_BIAS, ACT,
                ),
            ),
            (
                _multiply,
                (
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, tiles_n,
                    num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free, gl.constexpr(1), ROWS, OUTS, PLANE,
                    BITS, KIND, SIZE, gl.constexpr(CHUNKS > 1), HAS_BIAS, ACT,
                ),
            ),
            (
                _fetch,
                (
                    x_desc, words_desc, num_tiles, tiles_m, tiles_n, num_blocks, words_bufs, words_full, words_free, x_bufs,
                    x_full, free, ROWS, OUTS, PLANE, gl.constexpr(16 // BITS),
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


def covers(weight: Packed, num_rows: int, act: str) -> bool:
    """Of what hopper_packed covers. It changes at numbers of `gemm.CHOICES` only."""
    is_even = weight.words_NW.shape[1] // weight.plane % weight.num_chunks == 0
    if weight.plane != 64 or act not in ("", FUSED) or not is_even:
        return False
    return 128 < num_rows <= 256 and (weight.num_chunks == 1 or weight.num_in > MANY_INS)


def gemm_wide(
    x_TK: torch.Tensor, weight: Packed, *, bias_N: torch.Tensor | None = None, act: str = "", buffers: int = 6, ahead: int = 2
) -> torch.Tensor:
    """`act`: "" or silu, as `gemm` has it."""
    num_rows, num_out, chunks, plane = x_TK.shape[0], weight.num_out, weight.num_chunks, weight.plane
    out = x_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    num_blocks = weight.words_NW.shape[1] // plane
    assert num_blocks % chunks == 0
    tiles_m = triton.cdiv(num_rows, ROWS)
    tiles = tiles_m * triton.cdiv(num_out, OUTS) * chunks
    programs = min(tiles, torch.cuda.get_device_properties(x_TK.device).multi_processor_count)
    num_sums = chunks * num_out * tiles_m * ROWS if chunks > 1 else programs * ROWS * OUTS
    partial, done = _workspace(x_TK.device, num_sums, 4 * programs)
    bias = weight.scales_GN if bias_N is None else bias_N
    launch(
        _gemm_packed_wide, (programs,), _descriptor(x_TK, ROWS, plane, gl.bfloat16),
        _descriptor(weight.words_NW, OUTS, plane, gl.int16), weight.scales_GN, bias, out, partial, done, num_rows, num_out,
        num_blocks // chunks, PLANE=plane, BITS=weight.bits, KIND=weight.kind, SIZE=weight.group, ROWS=ROWS, OUTS=OUTS,
        CHUNKS=chunks, BUFFERS=buffers, WORD_BUFFERS=ahead, HAS_BIAS=bias_N is not None, ACT=bool(act), num_warps=4, maxnreg=168,
        launch_pdl=True,
    )  # fmt: skip
    if chunks > 1:
        launch(
            _add_chunks, (triton.cdiv(num_out, 64), triton.cdiv(num_rows, 32)), partial, bias, out, num_rows, num_out,
            HEIGHT=ROWS, CHUNKS=chunks, ROWS=32, OUTS=64, HAS_BIAS=bias_N is not None, ACT=act, num_warps=4, **HOW,
        )  # fmt: skip
    return out
