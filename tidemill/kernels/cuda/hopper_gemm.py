"""`gemm` and `gemm_scaled` of fp8 for many rows on Hopper GPUs, warp-specialized: one warp fetches,
two groups of four multiply, each half of a tile's rows, and two warps activate and store. A program
stays on its multiprocessor and takes tile after tile. Those who multiply round their sums, hand
them over in shared memory and go on with the next tile at once.

The same sums in the same order as `_gemm_bulk` and `_gemm_scaled`, so the same bits. Written in
Gluon.
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

from tidemill.kernels.cuda.hopper_attention import barrier, fetch
from tidemill.kernels.cuda.launch import is_hopper, launch

# names change with versions
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
FUSED = "silu"  # the activation that is built in
# of a tile: rows, outs, and bytes of a row that are fetched at a time
ROWS, OUTS, BYTES = 128, 256, 128
BUFFERS = 3
# strips of rows that share one of the weight: of 2,048 rows all, so that a weight is read from
# memory once
GROUP = 16
_WIDTH = gl.constexpr(64)  # columns that are stored at a time
_PARTS = gl.constexpr(4)  # of a tile's sums


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Programs that run at a time share strips of both operands."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height


@gluon.jit
def _wait():
    """Waits for the kernel before, which writes activations and their scales."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


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
    """The halves of its columns."""
    rows: gl.constexpr = x.type.shape[0]
    half: gl.constexpr = x.type.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (rows, 2, half)), (0, 2, 1)))


@gluon.jit
def _side_by_side(a, b):
    rows: gl.constexpr = a.type.shape[0]
    width: gl.constexpr = a.type.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (rows, 2 * width))


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
    x_scales_ptr, w_scales_ptr, bias_ptr, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs, sums, full, free, ready,
    taken, PART: gl.constexpr, ROWS: gl.constexpr, OUTS: gl.constexpr, INS: gl.constexpr, GROUP: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    num_buffers: gl.constexpr = x_bufs.type.shape[0]
    half: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, OUTS, 32 if SCALED else 16]
    )
    _wait()
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        outs = n * OUTS + gl.arange(0, OUTS, layout=gl.SliceLayout(0, layout))
        if SCALED:
            rows = m * ROWS + PART * half + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
            x_scale = gl.load(x_scales_ptr + rows, mask=rows < num_rows, other=0.0)
            w_scale = gl.load(w_scales_ptr + outs, mask=outs < num_out, other=0.0)
        acc = gl.zeros((half, OUTS), gl.float32, layout)
        # The first products by themselves, so that in the loop nothing but products defines what is
        # summed up.
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
        left, right = _halves(acc.to(gl.bfloat16))
        a, b = _halves(left)
        c, d = _halves(right)
        mbarrier.wait(taken.index(PART), (turn & 1) ^ 1)
        sums.index(0).store(a)
        sums.index(1).store(b)
        sums.index(2).store(c)
        sums.index(3).store(d)
        if not ACT:  # the bulk copy engine reads them
            fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(PART), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _gated(sums):
    """silu(gate) * up of pairs of columns."""
    gate, up = gl.split(
        gl.reshape(sums.to(gl.float32), (sums.type.shape[0], sums.type.shape[1] // 2, 2))
    )
    return (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)


@gluon.jit
def _give(out_desc, row, column, sums, ACT: gl.constexpr):
    """Half a tile. Results take the place of their sums, whose pairs of columns become one."""
    if ACT:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
        for i in gl.static_range(0, _PARTS, 2):
            a = _gated(sums.index(i).load(layout))
            b = _gated(sums.index(i + 1).load(layout))
            barrier()
            sums.index(i).store(_side_by_side(a, b))
            fence_async_shared()
            barrier()
            store(out_desc, [row, column // 2 + i // 2 * _WIDTH], sums.index(i))
    else:
        for i in gl.static_range(_PARTS):
            store(out_desc, [row, column + i * _WIDTH], sums.index(i))


@gluon.jit
def _store(
    out_desc, tiles_m, tiles_n, first_sums, second_sums, ready, taken, ROWS: gl.constexpr, OUTS: gl.constexpr,
    GROUP: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        mbarrier.wait(ready.index(0), turn & 1)
        _give(out_desc, m * ROWS, n * OUTS, first_sums, ACT)
        mbarrier.wait(ready.index(1), turn & 1)
        _give(out_desc, m * ROWS + ROWS // 2, n * OUTS, second_sums, ACT)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(taken.index(0), count=1)
        mbarrier.arrive(taken.index(1), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["num_rows"])
def _gemm_warp_specialized(
    x_desc, w_desc, out_desc, x_scales_ptr, w_scales_ptr, bias_ptr, num_rows, num_out, num_in,
    ROWS: gl.constexpr, OUTS: gl.constexpr, INS: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Matmul. Reference: `linear.linear_reference`."""
    tiles_m, tiles_n = gl.cdiv(num_rows, ROWS), gl.cdiv(num_out, OUTS)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [BUFFERS, ROWS, INS], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [BUFFERS, OUTS, INS], w_desc.layout)
    first_sums = gl.allocate_shared_memory(
        gl.bfloat16, [_PARTS, ROWS // 2, _WIDTH], out_desc.layout
    )
    second_sums = gl.allocate_shared_memory(
        gl.bfloat16, [_PARTS, ROWS // 2, _WIDTH], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_scales_ptr, w_scales_ptr, bias_ptr, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs,
                    first_sums, full, free, ready, taken, gl.constexpr(0), ROWS, OUTS, INS, GROUP, SCALED, HAS_BIAS, ACT,
                ),
            ),
            (
                _multiply,
                (
                    x_scales_ptr, w_scales_ptr, bias_ptr, tiles_m, tiles_n, num_rows, num_out, num_in, x_bufs, w_bufs,
                    second_sums, full, free, ready, taken, gl.constexpr(1), ROWS, OUTS, INS, GROUP, SCALED, HAS_BIAS, ACT,
                ),
            ),
            (_store, (out_desc, tiles_m, tiles_n, first_sums, second_sums, ready, taken, ROWS, OUTS, GROUP, ACT)),
            (_fetch, (x_desc, w_desc, tiles_m, tiles_n, num_in, x_bufs, w_bufs, full, free, ROWS, OUTS, INS, GROUP)),
        ],
        [4, 2, 1],
        [216, 72, 24],
    )  # fmt: skip


def covers(x_TK: torch.Tensor, weight_NK: torch.Tensor, act: str, out: torch.Tensor) -> bool:
    if not is_hopper() or act not in ("", FUSED) or out.dtype != torch.bfloat16:
        return False
    kind = {1: torch.float8_e4m3fn, 2: torch.bfloat16}.get(weight_NK.element_size())
    is_aligned = x_TK.shape[1] * x_TK.element_size() % 16 == 0 and out.shape[1] % 8 == 0
    return x_TK.dtype == weight_NK.dtype == kind and is_aligned


def gemm_warp_specialized(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    out: torch.Tensor,
    act: str = "",
    bias_N: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Into `out`. `act`: "" or silu, as `gemm` has it. `scales`: of fp8, for each row of x and of
    the weight."""
    (num_rows, num_in), num_out, ins = x_TK.shape, weight_NK.shape[0], BYTES // x_TK.element_size()
    kind = gl.bfloat16 if scales is None else gl.float8e4nv
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(num_out, OUTS)
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    launch(
        _gemm_warp_specialized, (min(tiles, programs),), descriptor(x_TK, ROWS, ins, kind),
        descriptor(weight_NK, OUTS, ins, kind),
        descriptor(out, ROWS // 2, 64, gl.bfloat16), *(scales or (out, out)), out if bias_N is None else bias_N, num_rows,
        num_out, num_in, ROWS=ROWS, OUTS=OUTS, INS=ins, BUFFERS=BUFFERS, GROUP=GROUP, SCALED=scales is not None,
        HAS_BIAS=bias_N is not None, ACT=bool(act), num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return out


def descriptor(matrix: torch.Tensor, height: int, width: int, dtype: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(
        matrix, [height, width], gl.NVMMASharedLayout.get_default_for([height, width], dtype)
    )
