"""`gemm_packed` for many rows on Hopper GPUs, with roles: four warps fetch, two groups of four
multiply. A group takes codes from shared memory to registers, makes bfloat16 of them and multiplies
from there, and unpacks the next ones meanwhile.

Where a weight has too few rows for all multiprocessors, a program has one chunk of K; the norm
behind adds the chunks' sums, or a second kernel does. The same sums in the same order as
`_gemm_packed`, chunks included, so the same bits. Written in Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tidemill.kernels.cuda.glu import glu
from tidemill.kernels.cuda.hopper_attention import barrier, fetch
from tidemill.kernels.cuda.hopper_gemm import FUSED, descriptor
from tidemill.kernels.cuda.launch import HOW, begin, is_hopper, launch
from tidemill.kernels.cuda.packed_gemm import Packed, _assembly, _store
from tidemill.kernels.pending import SplitK

FROM_ROWS = 64  # up to there the other kernel is as fast
MANY_INS = 8192  # from there on a program has one chunk, up to 256 rows


@dataclass(frozen=True, slots=True)
class HopperTile:
    rows: int
    outs: int  # 128: each group has 64 of them; 64: each has half of the rows
    buffers: int  # of rows
    ahead: int  # blocks of words
    split: int = 0  # a program has one chunk


@gluon.jit
def _fetch_words(
    words_desc, n, first, block, words_bufs, words_full, words_free, OUTS: gl.constexpr, PLANE: gl.constexpr
):  # fmt: skip
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    i, phase = block % num_ahead, (block // num_ahead) & 1
    mbarrier.wait(words_free.index(i), phase ^ 1)
    mbarrier.expect(words_full.index(i), words_desc.block_type.nbytes)
    fetch(words_desc, [n * OUTS, (first + block) * PLANE], words_full.index(i), words_bufs.index(i))


@gluon.jit
def _fetch(
    x_desc, words_desc, m, n, first, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    """`num_blocks` from `first` on."""
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    count = 0
    for block in range(gl.minimum(num_ahead - 1, num_blocks)):
        _fetch_words(words_desc, n, first, block, words_bufs, words_full, words_free, OUTS, PLANE)
    # Weights were there long before; activations are what the kernel before writes.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    for block in range(num_blocks):
        if block + num_ahead - 1 < num_blocks:
            _fetch_words(
                words_desc,
                n,
                first,
                block + num_ahead - 1,
                words_bufs,
                words_full,
                words_free,
                OUTS,
                PLANE,
            )
        for plane in gl.static_range(PLANES):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(i), phase ^ 1)
            mbarrier.expect(x_full.index(i), x_desc.block_type.nbytes)
            fetch(
                x_desc,
                [m * ROWS, ((first + block) * PLANES + plane) * PLANE],
                x_full.index(i),
                x_bufs.index(i),
            )
            count += 1


@gluon.jit
def _unpack(words, scales, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr):
    """A plane of words [OUTS, values], with the scales [OUTS] of its group."""
    twice = gl.broadcast(((scales & 0xFFFF) | (scales << 16))[:, None], words)[0]
    other = gl.broadcast(((scales & -65536) | ((scales >> 16) & 0xFFFF))[:, None], words)[0]
    asm: gl.constexpr = _assembly(BITS, KIND, PLANE)
    return gl.inline_asm_elementwise(
        asm, "=r,r,r,r,r,r", [words, twice, other], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def _scales(scales_ptr, block, num_out, BLOCK: gl.constexpr, SIZE: gl.constexpr):
    """The scales of a block's groups."""
    found = ()  # type: tuple
    for group in gl.static_range(max(1, BLOCK // SIZE)):
        number = block * BLOCK // SIZE + group
        found = found + (gl.load(scales_ptr + number.to(gl.int64) * num_out),)
    return found


@gluon.jit
def _multiply(
    scales_ptr, bias_ptr, out_ptr, partial_ptr, m, n, first, num_rows, num_out, num_blocks, words_bufs, words_full, words_free,
    x_bufs, x_full, free, PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr,
    KIND: gl.constexpr, SIZE: gl.constexpr, CHUNKS: gl.constexpr, BLOCKS: gl.constexpr, SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """`BLOCKS`: of a chunk. `SPLIT`: these are all blocks of one, from `first` on."""
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    planes: gl.constexpr = 16 // BITS
    size: gl.constexpr = PLANE * planes
    groups: gl.constexpr = max(1, size // SIZE)
    by_outs: gl.constexpr = OUTS > 64
    rows: gl.constexpr = ROWS if by_outs else ROWS // 2
    row: gl.constexpr = 0 if by_outs else PART * rows
    first_out: gl.constexpr = PART * 64 if by_outs else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    outs = n * OUTS + first_out + gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
    scales_ptr += gl.minimum(outs, num_out - 1)
    acc = gl.zeros((64, rows), gl.float32, layout)
    total = acc
    found = _scales(scales_ptr, first, num_out, size, SIZE)
    mbarrier.wait(words_full.index(0), 0)
    words = words_bufs.index(0).slice(first_out, 64, dim=0).load(operand)
    values = _unpack(words, found[0], 0, BITS, KIND)
    count = 0
    block = 0
    for _ in range(1 if SPLIT else CHUNKS):
        for _ in range(gl.minimum(BLOCKS, num_blocks - block)):
            block += 1
            following = _scales(
                scales_ptr, first + gl.minimum(block, num_blocks - 1), num_out, size, SIZE
            )
            for plane in gl.static_range(planes):
                i = count % num_buffers
                mbarrier.wait(x_full.index(i), (count // num_buffers) & 1)
                x = x_bufs.index(i).slice(row, rows, dim=0)
                soon = warpgroup_mma(values, x.permute((1, 0)), acc, is_async=True)
                # The next values are made while these are multiplied.
                if plane + 1 < planes:
                    more = _unpack(
                        words, found[(plane + 1) * PLANE // SIZE % groups], plane + 1, BITS, KIND
                    )
                else:
                    if block < num_blocks:  # else what is there is not used
                        mbarrier.wait(words_full.index(block % num_ahead), (block // num_ahead) & 1)
                    words = (
                        words_bufs.index(block % num_ahead)
                        .slice(first_out, 64, dim=0)
                        .load(operand)
                    )
                    more = _unpack(words, following[0], 0, BITS, KIND)
                acc, values = warpgroup_mma_wait(0, (soon, values))
                barrier()
                mbarrier.arrive(free.index(i), count=1)
                # Not sooner: a barrier waits for no load, and bulk copies do not wait for loads
                # either. What has been multiplied was made of all words.
                if plane == 0:
                    mbarrier.arrive(words_free.index((block - 1) % num_ahead), count=1)
                values = more
                count += 1
            found = following
        if CHUNKS > 1 and not SPLIT:
            total += acc
            acc = gl.zeros((64, rows), gl.float32, layout)
        else:
            total = acc
    if SPLIT:  # [chunk, row, out]
        outs = n * OUTS + first_out + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        lines = m * ROWS + row + gl.arange(0, rows, layout=gl.SliceLayout(0, layout))
        partial_ptr += (first // BLOCKS).to(gl.int64) * num_rows * num_out
        at = lines[None, :] * num_out + outs[:, None]
        gl.store(
            partial_ptr + at, total, mask=(outs < num_out)[:, None] & (lines < num_rows)[None, :]
        )
        return
    if HAS_BIAS:
        columns = n * OUTS + first_out + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        total += gl.load(bias_ptr + columns, mask=columns < num_out, other=0.0).to(gl.float32)[
            :, None
        ]
    by_line: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    out = gl.convert_layout(total.to(gl.bfloat16), by_line).permute((1, 0))
    width: gl.constexpr = 32 if ACT else 64
    if ACT:  # of rounded values, as if they had been stored in between
        gate, up = gl.split(gl.reshape(out.to(gl.float32), (rows, width, 2)))
        out = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
        num_out = num_out // 2
    columns = (n * OUTS + first_out) // (64 // width) + gl.arange(
        0, width, layout=gl.SliceLayout(0, out.type.layout)
    )
    lines = m * ROWS + row + gl.arange(0, rows, layout=gl.SliceLayout(1, out.type.layout))
    where = out_ptr + lines.to(gl.int64)[:, None] * num_out + columns[None, :]
    gl.store(where, out, mask=(lines < num_rows)[:, None] & (columns < num_out)[None, :])


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_packed_warp_specialized(
    x_desc, words_desc, scales_ptr, bias_ptr, out_ptr, partial_ptr, num_rows, num_out, num_blocks,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr,
    CHUNKS: gl.constexpr, BLOCKS: gl.constexpr, SPLIT: gl.constexpr, BUFFERS: gl.constexpr, WORD_BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """`BLOCKS`: of a chunk. `SPLIT`: a program has one chunk, else all.
    Reference: `quantized_linear.quantized_linear_reference`."""
    tiles_m = gl.cdiv(num_rows, ROWS)
    # those that share a strip of the weight side by side
    m, n = gl.program_id(0) % tiles_m, gl.program_id(0) // tiles_m
    first = gl.program_id(1) * BLOCKS
    if SPLIT:
        num_blocks = gl.minimum(BLOCKS, num_blocks - first)
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
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, m, n, first, num_rows, num_out, num_blocks, words_bufs,
                    words_full, words_free, x_bufs, x_full, free, gl.constexpr(0), ROWS, OUTS, PLANE, BITS, KIND, SIZE,
                    CHUNKS, BLOCKS, SPLIT, HAS_BIAS, ACT,
                ),
            ),
            (
                _multiply,
                (
                    scales_ptr, bias_ptr, out_ptr, partial_ptr, m, n, first, num_rows, num_out, num_blocks, words_bufs,
                    words_full, words_free, x_bufs, x_full, free, gl.constexpr(1), ROWS, OUTS, PLANE, BITS, KIND, SIZE,
                    CHUNKS, BLOCKS, SPLIT, HAS_BIAS, ACT,
                ),
            ),
            (
                _fetch,
                (
                    x_desc, words_desc, m, n, first, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
                    ROWS, OUTS, PLANE, gl.constexpr(16 // BITS),
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _add_chunks(
    partial_ptr, bias_ptr, out_ptr, num_rows, num_out, CHUNKS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sums [chunk, row, out]. Reference: `quantized_linear.quantized_linear_reference`."""
    begin(AHEAD)
    n, m = tl.program_id(0), tl.program_id(1)
    outs, rows = n * OUTS + tl.arange(0, OUTS), m * ROWS + tl.arange(0, ROWS)
    at = rows[:, None].to(tl.int64) * num_out + outs[None, :]
    there = (rows < num_rows)[:, None] & (outs < num_out)[None, :]
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        where = partial_ptr + chunk * num_rows.to(tl.int64) * num_out + at
        total += tl.load(where, mask=there, other=0.0, cache_modifier=".cg")
    _store(total, bias_ptr, out_ptr, m, n, num_rows, num_out, ROWS, OUTS, HAS_BIAS, ACT)


def own_tile(
    num_rows: int, num_out: int, num_in: int, num_chunks: int, plane: int, leave: bool = False
) -> HopperTile:
    """The tile that was best on an H200 (bench/gpu_quant.py). It changes at numbers of
    `gemm.CHOICES` only. Sums of chunks take registers that more rows would need. `leave`: they need
    not be added up."""
    more = 2 if plane == 32 else 1  # its buffers are half as large
    if num_chunks > 1 and num_rows <= (256 if num_in > MANY_INS else 192 if leave else 0):
        return (
            HopperTile(128, 128, 6, 4 * more, 1)
            if num_rows <= 128
            else HopperTile(256, 128, 4 * more, 3 * more, 1)
        )
    if num_rows <= 64:
        return (
            HopperTile(64, 64, 8, 4) if num_chunks > 1 else HopperTile(64, 128, 6 * more, 3 * more)
        )
    if num_chunks > 1 and num_rows <= (256 if num_out <= 4096 else 128):
        return HopperTile(128, 64, 6, 4)
    if num_chunks > 1 or num_rows <= 128:
        return HopperTile(128, 128, 6 if plane == 64 else 8, 3)
    return HopperTile(256, 128, 3 * more, 2 * more)


def covers(weight: Packed, num_rows: int) -> bool:
    few = FROM_ROWS if weight.num_chunks > 1 or weight.plane == 32 else FROM_ROWS // 2
    is_aligned = weight.num_in % 8 == 0 and weight.words_NW.shape[1] % 8 == 0
    return is_hopper() and weight.kind != "table" and num_rows > few and is_aligned


def gemm_warp_specialized(
    x_TK: torch.Tensor,
    weight: Packed,
    tile: HopperTile | None = None,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    leave: bool = False,
) -> torch.Tensor | SplitK:
    """`act`: as `gemm` has it. `leave`: split-K partials may be returned, without a bias or an
    activation."""
    num_rows, num_out, chunks = x_TK.shape[0], weight.num_out, weight.num_chunks
    leave = leave and bias_N is None and not act
    tile = tile or own_tile(num_rows, num_out, weight.num_in, chunks, weight.plane, leave)
    split = bool(tile.split) and chunks > 1
    is_fused = act == FUSED and not split
    shape = num_rows, num_out // 2 if act and (is_fused or split) else num_out
    plane, num_blocks = weight.plane, weight.words_NW.shape[1] // weight.plane
    tiles_m, tiles_n = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.outs)
    sums = (
        x_TK.new_empty(chunks, num_rows, num_out, dtype=torch.float32)
        if split
        else weight.scales_GN
    )
    out = sums if split and leave else x_TK.new_empty(shape)
    bias = weight.scales_GN if bias_N is None else bias_N
    launch(
        _gemm_packed_warp_specialized, (tiles_m * tiles_n, chunks if split else 1),
        descriptor(x_TK, tile.rows, plane, gl.bfloat16), descriptor(weight.words_NW, tile.outs, plane, gl.int16),
        weight.scales_GN, bias, sums if split else out, sums, num_rows, num_out, num_blocks, PLANE=plane, BITS=weight.bits,
        KIND=weight.kind, SIZE=weight.group, ROWS=tile.rows, OUTS=tile.outs, CHUNKS=chunks, BLOCKS=weight.chunk // weight.block,
        SPLIT=split, BUFFERS=tile.buffers, WORD_BUFFERS=tile.ahead, HAS_BIAS=bias_N is not None, ACT=is_fused, num_warps=4,
        maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    if split and leave:
        return SplitK(sums)
    if split:
        launch(
            _add_chunks, (triton.cdiv(num_out, 128), triton.cdiv(num_rows, 16)), sums, bias, out, num_rows, num_out,
            CHUNKS=chunks, ROWS=16, OUTS=128, HAS_BIAS=bias_N is not None, ACT=act, num_warps=4, **HOW,
        )  # fmt: skip
    return glu(out, act) if act and not is_fused and not split else out
