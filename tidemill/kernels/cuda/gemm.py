"""y = x Wᵀ + b in bf16 with float32 sums: one pass over K in order, no split, so that a row's bits
depend on the row alone.

Which tile is fastest changes nothing in the result, so it is chosen freely by the number of rows
and the shape: from a table of measured choices for known GPUs, else by a rule. Nor does it matter
what multiplies: the vendor's library gives the same bits wherever it makes one pass over K. With
many rows it is faster; so it is used for a number of rows and a shape, set not to split K, if a
trial shows that it gives our bits.

A gated weight holds the rows of gate and up in turn, so that a tile has both of a pair side by side
and gives silu(gate) * up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda import hopper_gemm
from tidemill.kernels.cuda.glu import gated, glu
from tidemill.kernels.cuda.launch import begin, how, is_compiling, launch


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    outs: int
    ins: int
    stages: int
    warps: int
    # operands come by the bulk copy engine (TMA), which needs rows of a multiple of 16 bytes. 2: by
    # `hopper_gemm`
    bulk: int = 0
    halves: int = 0  # of experts: a block of at most half the rows is multiplied in half a tile


@triton.jit
def _place(num_rows, num_out, ROWS: tl.constexpr, OUTS: tl.constexpr, GROUP: tl.constexpr):
    """Programs that share a strip of the weight run side by side, so that it is read once from
    memory."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, OUTS)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    return first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height


@triton.jit
def _finish(
    acc, bias_ptr, outs, num_out,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
    if ACT != "":  # of rounded values, as if they had been stored in between
        gate, up = tl.split(tl.reshape(acc.to(DTYPE).to(tl.float32), (ROWS, OUTS // 2, 2)))
        acc = gated(gate, up, ACT)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Matmul. Reference: `linear.linear_reference`."""
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    begin(AHEAD)
    rows, outs, ins = (
        m * ROWS + tl.arange(0, ROWS),
        n * OUTS + tl.arange(0, OUTS),
        tl.arange(0, INS),
    )
    x = x_ptr + rows[:, None].to(tl.int64) * num_in + ins[None, :]
    w = w_ptr + outs[None, :].to(tl.int64) * num_in + ins[:, None]
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for k in range(0, num_in, INS):
        if EVEN:
            a = tl.load(x, mask=rows[:, None] < num_rows, other=0.0)
            b = tl.load(w, mask=outs[None, :] < num_out, other=0.0)
        else:
            a = tl.load(x, mask=(rows[:, None] < num_rows) & (k + ins[None, :] < num_in), other=0.0)
            b = tl.load(w, mask=(outs[None, :] < num_out) & (k + ins[:, None] < num_in), other=0.0)
        acc = tl.dot(a, b, acc)
        x += INS
        w += INS
    acc = _finish(acc, bias_ptr, outs, num_out, HAS_BIAS, ACT, ROWS, OUTS, out_ptr.dtype.element_ty)
    width: tl.constexpr = OUTS // 2 if ACT != "" else OUTS
    num_out = num_out // 2 if ACT != "" else num_out
    outs = n * width + tl.arange(0, width)
    where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(
        where,
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_bulk(
    x_desc, w_desc, out_desc, bias_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, BULK_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Matmul. Reference: `linear.linear_reference`."""
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    begin(AHEAD)
    tl.assume(num_in > 0)  # else the assembler waits for each product of the loop
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for k in range(0, num_in, INS):  # past the edges it reads zeros
        acc = tl.dot(x_desc.load([m * ROWS, k]), w_desc.load([n * OUTS, k]).T, acc)
    outs = n * OUTS + tl.arange(0, OUTS)
    acc = _finish(acc, bias_ptr, outs, num_out, HAS_BIAS, ACT, ROWS, OUTS, out_ptr.dtype.element_ty)
    width: tl.constexpr = OUTS // 2 if ACT != "" else OUTS
    num_out = num_out // 2 if ACT != "" else num_out
    if BULK_OUT:
        out_desc.store([m * ROWS, n * width], acc.to(out_desc.dtype))
    else:  # a tile of float32 would not fit beside the operands
        rows, outs = m * ROWS + tl.arange(0, ROWS), n * width + tl.arange(0, width)
        where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
        tl.store(
            where,
            acc.to(out_ptr.dtype.element_ty),
            mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out),
        )


LIBRARY = Tile(0, 0, 0, 0, 0)
MANY = Tile(256, 128, 64, 4, 8, 1)  # of many rows
WARP_SPECIALIZED = Tile(hopper_gemm.ROWS, hopper_gemm.OUTS, 64, hopper_gemm.BUFFERS, 12, 2)
# A choice changes at these numbers of rows only, in the table as in the rule.
CHOICES = (1, 4, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1536, 1920, 2048)


def choice_of(num_rows: int) -> int:
    return next((rows for rows in CHOICES if rows >= num_rows), CHOICES[-1] + 1)


def _to_tiles(by_rows: dict[str, list[int]]) -> dict[int, Tile]:
    return {int(rows): Tile(*tile) if tile else LIBRARY for rows, tile in by_rows.items()}


@cache
def _measured() -> dict[tuple[int, ...], dict[int, Tile]]:
    """The fastest tiles by (outs, ins), or (experts, outs, ins), and rows on this GPU: tiles.json
    (`bench/gpu.py --search`) and what a search at start has added (tuning.py)."""
    known = json.loads(Path(__file__).with_name("tiles.json").read_text())
    shapes = known.get(torch.cuda.get_device_name(), {}) if torch.cuda.is_available() else {}
    return {
        tuple(map(int, shape.split("x"))): _to_tiles(by_rows) for shape, by_rows in shapes.items()
    }


def knows(num_out: int, num_in: int) -> bool:
    return (num_out, num_in) in _measured()


def know(num_out: int, num_in: int, by_rows: dict[str, list[int]]) -> None:
    """Takes over the tiles of a shape, in the form of tiles.json."""
    _measured()[num_out, num_in] = _to_tiles(by_rows)
    choose_tile.cache_clear()


def measured_tile(num_rows: int, *shape: int) -> Tile | None:
    """The tile of the next larger number of rows that was measured."""
    by_rows = _measured().get(shape)
    return (
        by_rows[min((rows for rows in by_rows if rows >= num_rows), default=max(by_rows))]
        if by_rows
        else None
    )


@cache
def choose_tile(num_rows: int, num_out: int, num_in: int) -> Tile:
    """By measurement, else by what was mostly best."""
    return measured_tile(num_rows, num_out, num_in) or (
        LIBRARY if num_rows > 64 else own_tile(num_rows, num_out)
    )


def own_tile(num_rows: int, num_out: int) -> Tile:
    if num_rows <= 16:
        return Tile(16, 16, 512, 4, 2) if num_out <= 8192 else Tile(16, 64, 256, 3, 4)
    if num_rows <= 32:
        return Tile(32, 32, 128, 6, 4) if num_out <= 8192 else Tile(32, 64, 128, 5, 4)
    if num_rows <= 64:
        return Tile(64, 32, 128, 5, 4, 1) if num_out <= 8192 else Tile(64, 256, 64, 4, 8, 1)
    if num_rows <= 256:
        return Tile(128, 64, 64, 6, 4, 1) if num_out <= 8192 else Tile(128, 256, 64, 4, 8, 1)
    return Tile(128, 128, 64, 4, 4, 1)


def keep_library_in_order() -> None:
    """It may not split K, which only one of its interfaces can promise."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


@cache
def library_agrees(num_rows: int, num_out: int, num_in: int, device: torch.device) -> bool:
    """Tells if the library's matmul has our bits. Products come in pairs that cancel, in random
    places: what is left are the roundings of the sums, so that another order of summation shows in
    nearly every value."""
    keep_library_in_order()
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(num_in, generator=generator, device=device)

    def pairs(num: int, sign: int) -> torch.Tensor:
        half = torch.randn(
            num, (num_in + 1) // 2, generator=generator, device=device, dtype=torch.bfloat16
        )
        return torch.cat([half, sign * half], 1)[:, :num_in][:, order].contiguous()

    x, weight = pairs(num_rows, 1), pairs(num_out, -1)
    return torch.equal(F.linear(x, weight), gemm(x, weight, own_tile(num_rows, num_out)))


def fastest_tile(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, any_order: bool
) -> Tile:
    """LIBRARY only where it can be taken. `any_order`: the sum may run in another order than ours."""
    num_rows, num_out, num_in = x_TK.shape[0], *weight_NK.shape
    tile = choose_tile(num_rows, num_out, num_in)
    if tile is not LIBRARY:
        return tile
    if bias_N is None and (
        any_order or is_compiling() or library_agrees(num_rows, num_out, num_in, x_TK.device)
    ):
        return LIBRARY
    return own_tile(num_rows, num_out)


def matmul(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    act: str,
    any_order: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """By our kernel or the library's, whichever is faster."""
    tile = tile or fastest_tile(x_TK, weight_NK, bias_N, any_order)
    if tile is LIBRARY:
        out = F.linear(x_TK, weight_NK)
        return glu(out, act) if act else out
    return gemm(x_TK, weight_NK, tile, bias_N=bias_N, act=act)


def gemm(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    tile: Tile | None = None,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`act`: act(gate) * up of the weight's pairs of rows. `out`: where the result goes, and its
    type; by default like x."""
    num_rows, num_in = x_TK.shape
    num_out = weight_NK.shape[0]
    tile = tile or choose_tile(num_rows, num_out, num_in)
    if tile is LIBRARY:
        tile = own_tile(num_rows, num_out)
    if out is None:
        out = x_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    if tile.bulk == WARP_SPECIALIZED.bulk:
        if hopper_gemm.covers(x_TK, weight_NK, act, out):
            return hopper_gemm.gemm_warp_specialized(x_TK, weight_NK, out, act, bias_N)
        tile = MANY
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs),)
    bias = weight_NK if bias_N is None else bias_N
    options = {
        "ROWS": tile.rows, "OUTS": tile.outs, "INS": tile.ins, "GROUP": 8, "HAS_BIAS": bias_N is not None, "ACT": act,
        "num_stages": tile.stages, "num_warps": tile.warps, **how(num_rows),
    }  # fmt: skip
    if tile.bulk and num_in % 8 == 0 and out.shape[1] % 8 == 0:
        bulk_out = out.element_size() == 2
        launch(
            _gemm_bulk,
            grid,
            TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.ins]),
            TensorDescriptor.from_tensor(weight_NK, [tile.outs, tile.ins]),
            TensorDescriptor.from_tensor(out, [tile.rows, (tile.outs // 2 if act else tile.outs) if bulk_out else 16]),
            bias, out, num_rows, num_out, num_in, BULK_OUT=bulk_out, **options,
        )  # fmt: skip
        return out
    launch(
        _gemm,
        grid,
        x_TK,
        weight_NK,
        bias,
        out,
        num_rows,
        num_out,
        num_in,
        EVEN=num_in % tile.ins == 0,
        **options,
    )
    return out
