"""`gemm_packed` for many rows on Hopper GPUs, with roles: four warps fetch, four make bfloat16 of packed weights on their way
from one buffer in shared memory to another, and two groups of four multiply. So unpacking runs beside the tensor cores.

The same sums in the same order as `_gemm_packed`, chunks included, so the same bits. Written in Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tidemill.kernels.cuda.elementwise import glu
from tidemill.kernels.cuda.hopper_attention import _done_with, fetch
from tidemill.kernels.cuda.launch import IS_INTERPRETED, launch
from tidemill.kernels.cuda.packed_gemm import Packed, _assembly

FUSED = "silu"  # the activation that the kernel has built in


@dataclass(frozen=True, slots=True)
class RolesTile:
    rows: int  # 64: each group has all of them and half of the outs; else half of the rows
    outs: int
    buffers: int
    ahead: int  # blocks of words


@gluon.jit
def _fetch_words(
    words_desc, n, block, words_bufs, words_full, words_free, OUTS: gl.constexpr, PLANE: gl.constexpr
):  # fmt: skip
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    i, phase = block % num_ahead, (block // num_ahead) & 1
    mbarrier.wait(words_free.index(i), phase ^ 1)
    mbarrier.expect(words_full.index(i), words_desc.block_type.nbytes)
    fetch(words_desc, [n * OUTS, block * PLANE], words_full.index(i), words_bufs.index(i))


@gluon.jit
def _fetch(
    x_desc, words_desc, m, n, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, PLANES: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    count = 0
    for block in range(gl.minimum(num_ahead - 1, num_blocks)):
        _fetch_words(words_desc, n, block, words_bufs, words_full, words_free, OUTS, PLANE)
    # Weights were there long before; activations are what the kernel before writes.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for block in range(num_blocks):
        if block + num_ahead - 1 < num_blocks:
            _fetch_words(words_desc, n, block + num_ahead - 1, words_bufs, words_full, words_free, OUTS, PLANE)
        for plane in gl.static_range(PLANES):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(i), phase ^ 1)
            mbarrier.expect(x_full.index(i), x_desc.block_type.nbytes)
            fetch(x_desc, [m * ROWS, (block * PLANES + plane) * PLANE], x_full.index(i), x_bufs.index(i))
            count += 1


@gluon.jit
def _unpack(words, scales, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr):
    """A plane of words [OUTS, values], with the scales [OUTS] of its group."""
    twice = gl.broadcast(((scales & 0xFFFF) | (scales << 16))[:, None], words)[0]
    other = gl.broadcast(((scales & -65536) | ((scales >> 16) & 0xFFFF))[:, None], words)[0]
    asm: gl.constexpr = _assembly(BITS, KIND, PLANE)
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r,r", [words, twice, other], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _convert(
    scales_ptr, n, num_out, num_blocks, words_bufs, words_full, words_free, w_bufs, w_full, free,
    OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = w_bufs.type.shape[0]
    num_ahead: gl.constexpr = words_bufs.type.shape[0]
    planes: gl.constexpr = 16 // BITS
    groups: gl.constexpr = max(1, PLANE * planes // SIZE)
    by_words: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PLANE, PLANE // 8], [4, 1], [1, 0])
    outs = n * OUTS + gl.arange(0, OUTS, layout=gl.SliceLayout(1, by_words))
    scales_ptr += gl.minimum(outs, num_out - 1)
    count = 0
    for block in range(num_blocks):
        found = ()  # type: tuple
        for group in gl.static_range(groups):
            number = block * (PLANE * planes) // SIZE + group
            found = found + (gl.load(scales_ptr + number.to(gl.int64) * num_out),)
        i, phase = block % num_ahead, (block // num_ahead) & 1
        mbarrier.wait(words_full.index(i), phase)
        words = words_bufs.index(i).load(by_words)
        _done_with(words_free.index(i))
        for plane in gl.static_range(planes):
            values = _unpack(words, found[plane * PLANE // SIZE % groups], plane, BITS, KIND)
            o, out_phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(o), out_phase ^ 1)
            w_bufs.index(o).store(values)
            fence_async_shared()
            _done_with(w_full.index(o))
            count += 1


@gluon.jit
def _multiply(
    bias_ptr, out_ptr, m, n, num_rows, num_out, num_steps, x_bufs, w_bufs, x_full, w_full, free,
    PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, CHUNKS: gl.constexpr, STEPS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """`STEPS`: of a chunk."""
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    by_rows: gl.constexpr = ROWS > 64
    rows: gl.constexpr = ROWS // 2 if by_rows else ROWS
    outs: gl.constexpr = OUTS if by_rows else OUTS // 2
    row: gl.constexpr = PART * rows if by_rows else 0
    first_out: gl.constexpr = 0 if by_rows else PART * outs
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, outs, 16])
    acc = gl.zeros((rows, outs), gl.float32, layout)
    total = acc
    count = 0
    for _ in range(CHUNKS):
        for _ in range(gl.minimum(STEPS, num_steps - count)):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(x_full.index(i), phase)
            mbarrier.wait(w_full.index(i), phase)
            x, w = x_bufs.index(i).slice(row, rows, dim=0), w_bufs.index(i).slice(first_out, outs, dim=0)
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            if count > 0:  # the one before is done
                _done_with(free.index((count - 1) % num_buffers))
            count += 1
        acc = warpgroup_mma_wait(0, (acc,))
        if CHUNKS > 1:
            total += acc
            acc = gl.zeros((rows, outs), gl.float32, layout)
        else:
            total = acc
    columns = n * OUTS + first_out + gl.arange(0, outs, layout=gl.SliceLayout(0, layout))
    if HAS_BIAS:
        total += gl.load(bias_ptr + columns, mask=columns < num_out, other=0.0).to(gl.float32)[None, :]
    if ACT:  # of rounded values, as if they had been stored in between
        gate, up = gl.split(gl.reshape(total.to(gl.bfloat16).to(gl.float32), (rows, outs // 2, 2)))
        made = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
        width: gl.constexpr = outs // 2
        columns = (n * OUTS + first_out) // 2 + gl.arange(0, width, layout=gl.SliceLayout(0, made.type.layout))
        num_out = num_out // 2
    else:
        made = total.to(gl.bfloat16)
    lines = m * ROWS + row + gl.arange(0, rows, layout=gl.SliceLayout(1, made.type.layout))
    where = out_ptr + lines.to(gl.int64)[:, None] * num_out + columns[None, :]
    gl.store(where, made, mask=(lines < num_rows)[:, None] & (columns < num_out)[None, :])


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_packed_by_roles(
    x_desc, words_desc, scales_ptr, bias_ptr, out_ptr, num_rows, num_out, num_blocks,
    ROWS: gl.constexpr, OUTS: gl.constexpr, PLANE: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr,
    CHUNKS: gl.constexpr, BLOCKS: gl.constexpr, BUFFERS: gl.constexpr, WORD_BUFFERS: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """`BLOCKS`: of a chunk."""
    planes: gl.constexpr = 16 // BITS
    tiles_m = gl.cdiv(num_rows, ROWS)
    m, n = gl.program_id(0) % tiles_m, gl.program_id(0) // tiles_m  # those that share a strip of the weight side by side
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTS, PLANE], gl.bfloat16)
    words_bufs = gl.allocate_shared_memory(gl.int16, [WORD_BUFFERS, OUTS, PLANE], words_desc.layout)
    x_bufs = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, PLANE], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, OUTS, PLANE], layout)
    words_full = gl.allocate_shared_memory(gl.int64, [WORD_BUFFERS, 1], mbarrier.MBarrierLayout())
    words_free = gl.allocate_shared_memory(gl.int64, [WORD_BUFFERS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WORD_BUFFERS):
        mbarrier.init(words_full.index(i), count=1)
        mbarrier.init(words_free.index(i), count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    bias_ptr, out_ptr, m, n, num_rows, num_out, num_blocks * planes, x_bufs, w_bufs, x_full, w_full, free,
                    gl.constexpr(0), ROWS, OUTS, CHUNKS, gl.constexpr(BLOCKS * planes), HAS_BIAS, ACT,
                ),
            ),
            (
                _multiply,
                (
                    bias_ptr, out_ptr, m, n, num_rows, num_out, num_blocks * planes, x_bufs, w_bufs, x_full, w_full, free,
                    gl.constexpr(1), ROWS, OUTS, CHUNKS, gl.constexpr(BLOCKS * planes), HAS_BIAS, ACT,
                ),
            ),
            (
                _convert,
                (
                    scales_ptr, n, num_out, num_blocks, words_bufs, words_full, words_free, w_bufs, w_full, free,
                    OUTS, PLANE, BITS, KIND, SIZE,
                ),
            ),
            (
                _fetch,
                (
                    x_desc, words_desc, m, n, num_blocks, words_bufs, words_full, words_free, x_bufs, x_full, free,
                    ROWS, OUTS, PLANE, gl.constexpr(planes),
                ),
            ),
        ],
        [4, 4, 4],
        [184, 112, 24],
    )  # fmt: skip


def own_tile(num_rows: int, num_out: int, num_chunks: int, plane: int) -> RolesTile:
    small = plane == 32
    if num_rows <= 64:
        return RolesTile(64, 128, 8 if small else 4, 4 if small else 3)
    if num_out <= 4096 or num_chunks > 1:
        return RolesTile(128, 64 if num_out <= 4096 else 128, 8 if small else 4, 4 if small else 3)
    return RolesTile(256, 128, 6 if small else 3, 4 if small else 3)


@cache
def is_there() -> bool:
    return not IS_INTERPRETED and torch.cuda.get_device_capability()[0] == 9


def covers(weight: Packed, num_rows: int) -> bool:
    return is_there() and num_rows > 32 and weight.num_in % 8 == 0 and weight.words_NW.shape[1] % 8 == 0


def gemm_by_roles(
    x_TK: torch.Tensor, weight: Packed, tile: RolesTile | None = None, *, bias_N: torch.Tensor | None = None, act: str = ""
) -> torch.Tensor:
    """`act`: as `gemm` has it."""
    num_rows, num_out = x_TK.shape[0], weight.num_out
    tile = tile or own_tile(num_rows, num_out, weight.num_chunks, weight.plane)
    is_fused = act == FUSED
    out = x_TK.new_empty(num_rows, num_out // 2 if is_fused else num_out)
    plane, num_blocks = weight.plane, weight.words_NW.shape[1] // weight.plane
    how: dict[str, Any] = {"PLANE": plane, "BITS": weight.bits, "KIND": weight.kind, "SIZE": weight.group}
    launch(
        _gemm_packed_by_roles, (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs),),
        _descriptor(x_TK, tile.rows, plane, gl.bfloat16), _descriptor(weight.words_NW, tile.outs, plane, gl.int16),
        weight.scales_GN, weight.scales_GN if bias_N is None else bias_N, out, num_rows, num_out, num_blocks,
        ROWS=tile.rows, OUTS=tile.outs, CHUNKS=weight.num_chunks, BLOCKS=weight.chunk // weight.block, BUFFERS=tile.buffers,
        WORD_BUFFERS=tile.ahead, HAS_BIAS=bias_N is not None, ACT=is_fused, num_warps=4, maxnreg=128,
        launch_pdl=True, **how,
    )  # fmt: skip
    return glu(out, act) if act and not is_fused else out


def _descriptor(matrix: torch.Tensor, height: int, width: int, dtype: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [height, width], gl.NVMMASharedLayout.get_default_for([height, width], dtype))
