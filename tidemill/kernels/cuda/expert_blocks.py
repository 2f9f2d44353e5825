"""The common parts of the kernels of experts: blocks of a gated matmul, the order of experts, and
how launches are described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.gemm import Tile
from tidemill.kernels.cuda.glu import gated
from tidemill.kernels.cuda.launch import how

PIECE = tl.constexpr(2048)  # bytes that a thread fetches
PIECES = tl.constexpr(128)


@triton.jit
def fetch(addresses, num_bytes):
    """Have memory read into the L2 cache; nobody waits for it. Addresses and sizes are multiples of
    16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [addresses, tl.zeros(addresses.shape, tl.int32) + num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# ---- routing


@triton.jit
def to_keys(logits, experts, num_experts):
    """Different integers in the order of the logits, of equals the first first. What is not a
    number has a place in it too, so that every token gets experts that exist."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    keys = tl.where(experts < num_experts, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    return (keys.to(tl.int64) << 32) | (0x7FFFFFFF - experts).to(tl.int64)


@triton.constexpr_function
def log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def weigh(logits, chosen, WEIGHING: tl.constexpr, EXPERTS: tl.constexpr):
    """The softmax of each row, among the chosen experts (0) or all (1), or the logits, which are
    weights (2). The sum is a tree of additions that is written out: a
    reduction across threads adds in an order that depends on the number of rows."""
    if WEIGHING == 2:
        return tl.where(chosen, logits, 0.0)
    values = tl.exp(logits - tl.max(logits, 1)[:, None])
    parts = values if WEIGHING == 1 else tl.where(chosen, values, 0.0)
    for step in tl.static_range(log2(EXPERTS)):
        parts = tl.sum(tl.reshape(parts, (logits.shape[0], 2, EXPERTS >> (step + 1))), 1)
    return values / parts


@triton.jit
def tile_of(
    weight,
    at,
    k,
    num_at,
    num_in,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
):
    """Rows of a matrix from `at` on, transposed. Past the expert's last row comes what is not
    stored."""
    if BULK:
        return weight.load([at, k]).T
    else:
        outs, ins = tl.arange(0, OUTS)[None, :], k + tl.arange(0, INS)[:, None]
        there = outs < num_at
        if not EVEN:
            there = there & (ins < num_in)
        return tl.load(
            weight + (at.to(tl.int64) * num_in + outs.to(tl.int64) * num_in + ins),
            mask=there,
            other=0.0,
        )


@triton.jit
def rows_of(x, rows, there, k, num_in, INS: tl.constexpr, EVEN: tl.constexpr):
    ins = k + tl.arange(0, INS)[None, :]
    if EVEN:
        return tl.load(
            x + (rows[:, None].to(tl.int64) * num_in + ins), mask=there[:, None], other=0.0
        )
    else:
        return tl.load(
            x + (rows[:, None].to(tl.int64) * num_in + ins),
            mask=there[:, None] & (ins < num_in),
            other=0.0,
        )


@triton.jit
def gated_block(
    x_ptr, rows, there, weight, bias_ptr, expert, n, num_in, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """act(gate) * up of OUTS outputs of one expert."""
    gate, up = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
    at, left = expert * 2 * num_out + n * OUTS, num_out - n * OUTS
    for k in range(0, num_in, INS):
        x = rows_of(x_ptr, rows, there, k, num_in, INS, EVEN)
        gate = tl.dot(x, tile_of(weight, at, k, left, num_in, OUTS, INS, EVEN, BULK), gate)
        up = tl.dot(x, tile_of(weight, at + num_out, k, left, num_in, OUTS, INS, EVEN, BULK), up)
    if HAS_BIAS:
        outs = tl.arange(0, OUTS)
        gate += tl.load(bias_ptr + at + outs, mask=outs < left, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + at + num_out + outs, mask=outs < left, other=0.0).to(tl.float32)[
            None, :
        ]
    # Of rounded values, as if they had been stored in between.
    return gated(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), ACT).to(DTYPE)


@dataclass(frozen=True, slots=True)
class Tally:
    """The tally of tokens that each expert of a layer got since the start, modulo 2^32. `live`: how
    many of a step's tokens count, [1]; those that only fill it up come after them."""

    totals_E: torch.Tensor  # int32
    live: torch.Tensor  # int32

    @staticmethod
    def of(tally: Tally | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A kernel's arguments."""
        return (unused, unused) if tally is None else (tally.totals_E, tally.live)


def options_of(
    num_tokens: int, tile: Tile, num_in: int, bias: torch.Tensor | None, act: str | None = None
) -> dict[str, Any]:
    options = {
        "ROWS": tile.rows, "INS": tile.ins, "EVEN": num_in % tile.ins == 0, "HAS_BIAS": bias is not None,
        "num_stages": tile.stages, "num_warps": tile.warps, **how(num_tokens),
    }  # fmt: skip
    return options | ({"OUTS": tile.outs} if act is None else {"OUTS": tile.outs // 2, "ACT": act})


def matrices(weight: torch.Tensor, outs: int, tile: Tile) -> torch.Tensor | TensorDescriptor:
    """All experts' rows below one another, as a kernel takes them."""
    return (
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [outs, tile.ins])
        if tile.bulk
        else weight
    )
