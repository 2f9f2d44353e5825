"""y = x Wᵀ in bf16 with float32 sums: one pass over K in order, no split, so that a row's bits depend on the row alone.

Which tile is fastest changes nothing in the result, so it is chosen freely by the number of rows and the shape: from a table of
measured choices for known GPUs, else by a rule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    outs: int
    ins: int
    stages: int
    warps: int
    bulk: int = 0  # operands come by the bulk copy engine (TMA), which needs rows of a multiple of 16 bytes


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x_ptr, w_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # Programs that share a strip of the weight run side by side, so that it is read once from memory.
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, OUTS)
    band = tile // (GROUP * tiles_n)
    first = band * GROUP
    height = min(tiles_m - first, GROUP)
    m, n = first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height
    rows, outs, ins = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS), tl.arange(0, INS)
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
    where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out))


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_bulk(
    x_desc, w_desc, out_desc, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, BULK_OUT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, OUTS)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    m, n = first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for k in range(0, num_in, INS):  # past the edges it reads zeros
        acc = tl.dot(x_desc.load([m * ROWS, k]), w_desc.load([n * OUTS, k]).T, acc)
    if BULK_OUT:
        out_desc.store([m * ROWS, n * OUTS], acc.to(out_desc.dtype))
    else:  # a tile of float32 would not fit beside the operands
        rows, outs = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
        where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
        tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out))


@cache
def _measured() -> dict[tuple[int, int], dict[int, Tile]]:
    """Fastest tiles by (outs, ins) and rows for this GPU (tiles.json, from `bench/gpu.py --search`); empty for unknown ones."""
    known = json.loads(Path(__file__).with_name("tiles.json").read_text())
    shapes = known.get(torch.cuda.get_device_name(), {}) if torch.cuda.is_available() else {}
    return {
        (int(shape.split("x")[0]), int(shape.split("x")[1])): {int(rows): Tile(*tile) for rows, tile in by_rows.items()}
        for shape, by_rows in shapes.items()
    }


@cache
def choose_tile(num_rows: int, num_out: int, num_in: int) -> Tile:
    """By measurement, of the next larger number of rows that was measured; else by what was mostly best."""
    by_rows = _measured().get((num_out, num_in))
    if by_rows:
        return by_rows[min((rows for rows in by_rows if rows >= num_rows), default=max(by_rows))]
    if num_rows <= 16:
        return Tile(16, 32, 256, 4, 4) if num_out <= 8192 else Tile(16, 64, 128, 5, 4)
    if num_rows <= 32:
        return Tile(32, 32, 128, 6, 4) if num_out <= 8192 else Tile(32, 64, 128, 5, 4)
    if num_rows <= 64:
        return Tile(64, 32, 128, 5, 4) if num_out <= 8192 else Tile(64, 256, 64, 4, 8)
    if num_rows <= 256:
        return Tile(128, 64, 128, 4, 8) if num_out <= 8192 else Tile(128, 256, 64, 4, 8)
    return Tile(128, 128, 128, 3, 8) if num_rows <= 512 else Tile(256, 128, 64, 3, 8)


def gemm(x_TK: torch.Tensor, weight_NK: torch.Tensor, tile: Tile | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`dtype`: of the result; by default that of x."""
    num_rows, num_in = x_TK.shape
    num_out = weight_NK.shape[0]
    tile = tile or choose_tile(num_rows, num_out, num_in)
    out = x_TK.new_empty(num_rows, num_out, dtype=dtype or x_TK.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs),)
    if tile.bulk and num_in % 8 == 0 and num_out % 8 == 0:
        _gemm_bulk[grid](
            TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.ins]),
            TensorDescriptor.from_tensor(weight_NK, [tile.outs, tile.ins]),
            TensorDescriptor.from_tensor(out, [tile.rows, tile.outs if out.element_size() == 2 else 16]),
            out, num_rows, num_out, num_in,
            ROWS=tile.rows, OUTS=tile.outs, INS=tile.ins, GROUP=8, BULK_OUT=out.element_size() == 2,
            num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        return out
    _gemm[grid](
        x_TK, weight_NK, out, num_rows, num_out, num_in,
        ROWS=tile.rows, OUTS=tile.outs, INS=tile.ins, GROUP=8, EVEN=num_in % tile.ins == 0,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
