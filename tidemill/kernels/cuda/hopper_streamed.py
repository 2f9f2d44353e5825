"""`gemm_packed` for many rows on Hopper GPUs, of weights in one chunk: the roles of hopper_packed.py, with tiles shared out evenly
(hopper_shares.py). The same sums in the same order as `_gemm_packed`, so the same bits. Written in Gluon.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tidemill.kernels.cuda.hopper_attention import barrier, fetch
from tidemill.kernels.cuda.hopper_packed import RolesTile, _descriptor, _scales, _store_tile, _unpack
from tidemill.kernels.cuda.hopper_shares import block_of, end_of, leave_sums, numbers, share, take_sums
from tidemill.kernels.cuda.launch import launch
from tidemill.kernels.cuda.packed_gemm import Packed, _workspace


@gluon.jit
def _fetch_words(
    words_desc, number, first, last, num_blocks, tiles_m, words_bufs, words_full, words_free, OUTS: gl.constexpr,
    PLANE: gl.constexpr,
):  # fmt: skip
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    tile, block = block_of(number, first, last, num_blocks)
    i, phase = number % num_ahead, (number // num_ahead) & 1
    mbarrier.wait(words_free.index(i), phase ^ 1)
    mbarrier.expect(words_full.index(i), words_desc.block_type.nbytes)
    fetch(words_desc, [tile // tiles_m * OUTS, block * PLANE], words_full.index(i), words_bufs.index(i))


@gluon.jit
def _fetch(
    x_desc, words_desc, num_tiles, tiles_m, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    first, last = share(num_tiles, num_blocks)
    for number in range(gl.minimum(num_ahead - 1, last - first)):
        _fetch_words(words_desc, number, first, last, num_blocks, tiles_m, words_bufs, words_full, words_free, OUTS, PLANE)
    # Weights were there long before; activations are what the kernel before writes.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    count = 0
    for number in range(last - first):
        if number + num_ahead - 1 < last - first:
            _fetch_words(
                words_desc, number + num_ahead - 1, first, last, num_blocks, tiles_m, words_bufs, words_full, words_free, OUTS,
                PLANE,
            )  # fmt: skip
        tile, block = block_of(number, first, last, num_blocks)
        for plane in gl.static_range(PLANES):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(i), phase ^ 1)
            mbarrier.expect(x_full.index(i), x_desc.block_type.nbytes)
            fetch(x_desc, [tile % tiles_m * ROWS, (block * PLANES + plane) * PLANE], x_full.index(i), x_bufs.index(i))
            count += 1


@gluon.jit
def _multiply(
    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, num_blocks, words_bufs,
    words_full, words_free, x_bufs, x_full, free, PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr,
    BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    planes: gl.constexpr = 16 // BITS
    size: gl.constexpr = PLANE * planes
    groups: gl.constexpr = max(1, size // SIZE)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    own = numbers(64, ROWS, layout)
    first, last = share(num_tiles, num_blocks)
    count = 0
    number = 0
    while number < last - first:
        tile, block = block_of(number, first, last, num_blocks)
        end = end_of(tile, last, num_blocks)
        m, n = tile % tiles_m, tile // tiles_m
        outs = n * OUTS + PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
        to_scales = scales_ptr + gl.minimum(outs, num_out - 1)
        found = _scales(to_scales, block, num_out, size, SIZE)
        mbarrier.wait(words_full.index(number % num_ahead), (number // num_ahead) & 1)
        words = words_bufs.index(number % num_ahead).slice(PART * 64, 64, dim=0).load(operand)
        values = _unpack(words, found[0], 0, BITS, KIND)
        acc = gl.zeros((64, ROWS), gl.float32, layout)
        if block > 0:  # the program before has left the sums of what comes before this
            acc = take_sums(partial_ptr, done_ptr, own, PART)
        mbarrier.wait(x_full.index(count % num_buffers), (count // num_buffers) & 1)
        for _ in range(end - block):
            block += 1
            number += 1
            following = _scales(to_scales, gl.minimum(block, end - 1), num_out, size, SIZE)
            for plane in gl.static_range(planes):
                x = x_bufs.index(count % num_buffers)
                soon = warpgroup_mma(values, x.permute((1, 0)), acc, is_async=True)
                if count > 0:  # what was multiplied before this is done
                    barrier()
                    mbarrier.arrive(free.index((count + num_buffers - 1) % num_buffers), count=1)
                    # Not sooner: a barrier waits for no load, and bulk copies do not wait for loads either. What has been
                    # multiplied was made of all words.
                    if plane == 1:
                        mbarrier.arrive(words_free.index((number - 1) % num_ahead), count=1)
                # The next values are made while these are multiplied.
                if plane + 1 < planes:
                    more = _unpack(words, found[(plane + 1) * PLANE // SIZE % groups], plane + 1, BITS, KIND)
                else:
                    if block < end:  # else what is there is not used
                        mbarrier.wait(words_full.index(number % num_ahead), (number // num_ahead) & 1)
                    words = words_bufs.index(number % num_ahead).slice(PART * 64, 64, dim=0).load(operand)
                    more = _unpack(words, following[0], 0, BITS, KIND)
                if plane + 1 < planes or block < end:
                    mbarrier.wait(x_full.index((count + 1) % num_buffers), ((count + 1) // num_buffers) & 1)
                acc, values = warpgroup_mma_wait(0, (soon, values))
                values = more
                count += 1
            found = following
        if end < num_blocks:
            leave_sums(partial_ptr, done_ptr, acc, own, PART)
        else:
            _store_tile(acc, bias_ptr, out_ptr, m * ROWS, n * OUTS + PART * 64, num_rows, num_out, HAS_BIAS, ACT)


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_packed_streamed(
    x_desc, words_desc, scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_blocks,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr,
    BUFFERS: gl.constexpr, WORD_BUFFERS: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(num_rows, ROWS)
    num_tiles = tiles_m * gl.cdiv(num_out, OUTS)
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
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, num_blocks,
                    words_bufs, words_full, words_free, x_bufs, x_full, free, gl.constexpr(0), ROWS, OUTS, PLANE, BITS, KIND,
                    SIZE, HAS_BIAS, ACT,
                ),
            ),
            (
                _multiply,
                (
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_tiles, tiles_m, num_blocks,
                    words_bufs, words_full, words_free, x_bufs, x_full, free, gl.constexpr(1), ROWS, OUTS, PLANE, BITS, KIND,
                    SIZE, HAS_BIAS, ACT,
                ),
            ),
            (
                _fetch,
                (
                    x_desc, words_desc, num_tiles, tiles_m, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
                    ROWS, OUTS, PLANE, gl.constexpr(16 // BITS),
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


def gemm_streamed(
    x_TK: torch.Tensor, weight: Packed, tile: RolesTile, *, bias_N: torch.Tensor | None = None, act: bool = False
) -> torch.Tensor:
    """Of a weight in one chunk, with at least as many tiles as there are multiprocessors."""
    num_rows, num_out = x_TK.shape[0], weight.num_out
    out = x_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    programs = torch.cuda.get_device_properties(x_TK.device).multi_processor_count
    partial, done = _workspace(x_TK.device, 2 * programs * 64 * tile.rows, 2 * programs)
    plane = weight.plane
    assert triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs) >= programs and tile.outs == 128
    launch(
        _gemm_packed_streamed, (programs,), _descriptor(x_TK, tile.rows, plane, gl.bfloat16),
        _descriptor(weight.words_NW, tile.outs, plane, gl.int16), weight.scales_GN, weight.scales_GN if bias_N is None else bias_N,
        out, partial, done, num_rows, num_out, weight.words_NW.shape[1] // plane, PLANE=plane, BITS=weight.bits,
        KIND=weight.kind, SIZE=weight.group, ROWS=tile.rows, OUTS=tile.outs, BUFFERS=tile.buffers, WORD_BUFFERS=tile.ahead,
        HAS_BIAS=bias_N is not None, ACT=act, num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return out
