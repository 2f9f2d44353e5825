"""`gemm` and `gemm_scaled` of fp8 for many rows on Hopper GPUs, with roles: one warp fetches, two groups of four multiply, each
half of a tile's rows, and two warps activate and store. A program stays on its multiprocessor and takes tile after
tile: the next one's operands are fetched and multiplied while this one's results are activated and stored by bulk copies.

The same sums in the same order as `_gemm_bulk` and `_gemm_scaled`, so the same bits. Written in Gluon.
"""

from __future__ import annotations

from typing import Any

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

from tidemill.kernels.cuda.elementwise import Scaled
from tidemill.kernels.cuda.hopper_attention import barrier, fetch
from tidemill.kernels.cuda.launch import is_hopper, launch

store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # names change with versions
FUSED = "silu"  # the activation that is built in
ROWS, OUTS = 128, 256
_WIDTH = gl.constexpr(64)  # columns that are stored at a time
GROUP = 16  # strips of rows that share one of the weight: of 2,048 rows all, so that a weight is read from memory once
# Two values to bfloat16 and back: alone, each would take as long as an exponential.
_PAIRS = gl.constexpr("{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }")


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Programs that run at a time share strips of both operands."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height


@gluon.jit
def _wait():
    """For the kernel before, which writes activations and their scales."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(
    x_desc, w_desc, tiles_m, tiles_n, num_in, x_bufs, w_bufs, full, free, ROWS: gl.constexpr, OUTS: gl.constexpr,
    INS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    _wait()
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        for k in range(0, num_in, INS):
            i, phase = count % num_buffers, (count // num_buffers) & 1
            mbarrier.wait(free.index(i), phase ^ 1)
            mbarrier.expect(full.index(i), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            fetch(x_desc, [m * ROWS, k], full.index(i), x_bufs.index(i))
            fetch(w_desc, [n * OUTS, k], full.index(i), w_bufs.index(i))
            count += 1


@gluon.jit
def _halves(x):
    """Of its columns."""
    rows: gl.constexpr = x.type.shape[0]
    half: gl.constexpr = x.type.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (rows, 2, half)), (0, 2, 1)))


@gluon.jit
def _side_by_side(a, b):
    rows: gl.constexpr = a.type.shape[0]
    width: gl.constexpr = a.type.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (rows, 2 * width))


@gluon.jit
def _gated(sums):
    """silu(gate) * up of pairs of columns."""
    gate, up = gl.split(gl.reshape(sums, (sums.type.shape[0], sums.type.shape[1] // 2, 2)))
    return (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)


@gluon.jit
def _put(out_desc, value, row, column, bufs, turn):
    """The next buffer, when what was in it has been read."""
    num: gl.constexpr = bufs.type.shape[0]
    tma.store_wait(num - 1)
    barrier()
    buf = bufs.index(turn % num)
    buf.store(value)
    fence_async_shared()
    barrier()
    store(out_desc, [row, column], buf)
    return turn + 1


@gluon.jit
def _next(acc, x_bufs, w_bufs, full, count, PART: gl.constexpr, half: gl.constexpr):
    """The next products, when their operands are there."""
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    i = count % num_buffers
    mbarrier.wait(full.index(i), (count // num_buffers) & 1)
    x = x_bufs.index(i).slice(PART * half, half, dim=0)
    return warpgroup_mma(x, w_bufs.index(i).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiply(
    x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs, out_bufs, full,
    free, made, room, PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, INS: gl.constexpr, GROUP: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    half: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTS, 32 if SCALED else 16])
    _wait()
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        row, column = m * ROWS + PART * half, n * OUTS
        outs = column + gl.arange(0, OUTS, layout=gl.SliceLayout(0, layout))
        if SCALED:
            rows = row + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
            x_scale = gl.load(x_scales_ptr + rows, mask=rows < num_rows, other=0.0)
            w_scale = gl.load(w_scales_ptr + outs, mask=outs < num_out, other=0.0)
        acc = gl.zeros((half, OUTS), gl.float32, layout)
        # The first products by themselves, so that in the loop nothing but products defines what is summed up.
        acc = warpgroup_mma_wait(0, (_next(acc, x_bufs, w_bufs, full, count, PART, half),))
        count += 1
        for _ in range(INS, num_in, INS):
            acc = warpgroup_mma_wait(1, (_next(acc, x_bufs, w_bufs, full, count, PART, half),))
            barrier()  # the products before these are done
            mbarrier.arrive(free.index((count + num_buffers - 1) % num_buffers), count=1)
            count += 1
        acc = warpgroup_mma_wait(0, (acc,))
        barrier()
        mbarrier.arrive(free.index((count + num_buffers - 1) % num_buffers), count=1)
        if SCALED:
            acc = acc * x_scale[:, None] * w_scale[None, :]
        if HAS_BIAS:
            acc += gl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(gl.float32)[None, :]
        if APART:  # the activation is others' part
            one, other = _halves(acc.to(gl.bfloat16))
            a, b = _halves(one)
            c, d = _halves(other)
            mbarrier.wait(room.index(PART), (turn & 1) ^ 1)
            out_bufs.index(0).store(a)
            out_bufs.index(1).store(b)
            out_bufs.index(2).store(c)
            out_bufs.index(3).store(d)
            if not ACT:
                fence_async_shared()
            barrier()
            mbarrier.arrive(made.index(PART), count=1)
            turn += 1
        elif ACT:  # of rounded values, as if they had been stored in between
            pairs: gl.constexpr = _PAIRS
            acc = gl.inline_asm_elementwise(pairs, "=r,=r,r,r", [acc], dtype=gl.float32, is_pure=True, pack=2)
            a, b = _halves(_gated(acc))
            turn = _put(out_desc, a, row, column // 2, out_bufs, turn)
            turn = _put(out_desc, b, row, column // 2 + _WIDTH, out_bufs, turn)
        else:
            one, other = _halves(acc.to(gl.bfloat16))
            a, b = _halves(one)
            c, d = _halves(other)
            turn = _put(out_desc, a, row, column, out_bufs, turn)
            turn = _put(out_desc, b, row, column + _WIDTH, out_bufs, turn)
            turn = _put(out_desc, c, row, column + 2 * _WIDTH, out_bufs, turn)
            turn = _put(out_desc, d, row, column + 3 * _WIDTH, out_bufs, turn)
    tma.store_wait(0)


@gluon.jit
def _apply(out_desc, column, row, bufs, PAIR: gl.constexpr, layout: gl.constexpr):
    """To 128 columns of sums, which become 64 of results, in place."""
    a = _gated(bufs.index(2 * PAIR).load(layout).to(gl.float32))
    b = _gated(bufs.index(2 * PAIR + 1).load(layout).to(gl.float32))
    barrier()
    bufs.index(2 * PAIR).store(_side_by_side(a, b))
    fence_async_shared()
    barrier()
    store(out_desc, [row, column + PAIR * _WIDTH], bufs.index(2 * PAIR))


@gluon.jit
def _give(out_desc, column, row, bufs, ACT: gl.constexpr, layout: gl.constexpr):
    if ACT:
        _apply(out_desc, column, row, bufs, 0, layout)
        _apply(out_desc, column, row, bufs, 1, layout)
    else:
        for i in gl.static_range(4):
            store(out_desc, [row, column + i * _WIDTH], bufs.index(i))


@gluon.jit
def _activate(
    out_desc, tiles_m, tiles_n, first_bufs, second_bufs, made, room, ROWS: gl.constexpr, OUTS: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n if APART else 0, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        row, column = m * ROWS, n * OUTS // 2 if ACT else n * OUTS
        mbarrier.wait(made.index(0), turn & 1)
        _give(out_desc, column, row, first_bufs, ACT, layout)
        mbarrier.wait(made.index(1), turn & 1)
        _give(out_desc, column, row + ROWS // 2, second_bufs, ACT, layout)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(room.index(0), count=1)
        mbarrier.arrive(room.index(1), count=1)
        turn += 1


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_by_roles(
    x_desc, w_desc, out_desc, x_scales_ptr, w_scales_ptr, bias_ptr, num_rows, num_out, num_in,
    ROWS: gl.constexpr, OUTS: gl.constexpr, INS: gl.constexpr, BUFFERS: gl.constexpr, OUT_BUFFERS: gl.constexpr,
    GROUP: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = gl.cdiv(num_rows, ROWS), gl.cdiv(num_out, OUTS)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [BUFFERS, ROWS, INS], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [BUFFERS, OUTS, INS], w_desc.layout)
    first_bufs = gl.allocate_shared_memory(gl.bfloat16, [OUT_BUFFERS, ROWS // 2, _WIDTH], out_desc.layout)
    second_bufs = gl.allocate_shared_memory(gl.bfloat16, [OUT_BUFFERS, ROWS // 2, _WIDTH], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    room = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(made.index(i), count=1)
        mbarrier.init(room.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs,
                    first_bufs, full, free, made, room, gl.constexpr(0), ROWS, OUTS, INS, GROUP, SCALED, HAS_BIAS, ACT, APART,
                ),
            ),
            (
                _multiply,
                (
                    x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs,
                    second_bufs, full, free, made, room, gl.constexpr(1), ROWS, OUTS, INS, GROUP, SCALED, HAS_BIAS, ACT, APART,
                ),
            ),
            (_activate, (out_desc, tiles_m, tiles_n, first_bufs, second_bufs, made, room, ROWS, OUTS, GROUP, ACT, APART)),
            (_fetch, (x_desc, w_desc, tiles_m, tiles_n, num_in, x_bufs, w_bufs, full, free, ROWS, OUTS, INS, GROUP)),
        ],
        [4, 2, 1],
        [216, 72, 24] if APART else [240, 24, 24],
    )  # fmt: skip


def descriptor(matrix: torch.Tensor, height: int, width: int, dtype: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [height, width], gl.NVMMASharedLayout.get_default_for([height, width], dtype))


def launch_by_roles(x, w, x_scales, w_scales, bias, out, act, buffers, out_buffers, group, apart):
    num_rows, num_in = x.shape
    num_out = w.shape[0]
    scaled = x_scales is not None
    kind, ins = (gl.float8e4nv, 128) if scaled else (gl.bfloat16, 64)
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_out, OUTS)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch(
        _gemm_by_roles, (min(tiles, programs),), descriptor(x, ROWS, ins, kind), descriptor(w, OUTS, ins, kind),
        descriptor(out, ROWS // 2, 64, gl.bfloat16), x_scales if scaled else out, w_scales if scaled else out,
        out if bias is None else bias, num_rows, num_out, num_in, ROWS=ROWS, OUTS=OUTS, INS=ins, BUFFERS=buffers,
        OUT_BUFFERS=out_buffers, GROUP=group, SCALED=scaled, HAS_BIAS=bias is not None, ACT=act, APART=apart, num_warps=4,
        maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return out


def covers(weight: Scaled, num_rows: int, act: str) -> bool:
    """It changes at numbers of `gemm.CHOICES` only."""
    values = weight.values_NK
    if not is_hopper() or values.dtype != torch.float8_e4m3fn or weight.has_blocks or act not in ("", FUSED):
        return False
    return num_rows > 512 and values.shape[0] % 16 == 0


def gemm_by_roles(x: Scaled, weight: Scaled, act: str = "") -> torch.Tensor:
    """In bfloat16. `act`: "" or silu, as `gemm` has it."""
    num_rows, num_out = x.values_NK.shape[0], weight.values_NK.shape[0]
    out = torch.empty(num_rows, num_out // 2 if act else num_out, dtype=torch.bfloat16, device=x.values_NK.device)
    return launch_by_roles(x.values_NK, weight.values_NK, x.scales, weight.scales, None, out, bool(act), 4, 2, GROUP, False)
