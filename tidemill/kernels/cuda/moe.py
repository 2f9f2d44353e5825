"""A layer of experts in bf16 with float32 sums: each token goes through its top-k experts, and their outputs are added by weight.

A token's bits depend on the token alone. Each product makes one pass over its inputs in order, whichever tile multiplies (see
gemm.py), and a token's experts are added in the order of their rank; nothing is added atomically. What is computed with what
depends on all tokens, but only through integers.

One token or a few (`direct`): the programs of the first product find their expert in the logits themselves, those of the second
add a token's experts up, so that there are two launches. Otherwise five: route; place (pairs of token and rank in the order of
experts, then of tokens, and for each product a list of blocks of rows with one expert); the two products; combine. Launches
depend on the number of tokens only: the lists have room for any routing, and programs past their end do nothing.

Shape letters: T tokens, H hidden, E experts, I intermediate, P pairs of token and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.elementwise import gated
from tidemill.kernels.cuda.gemm import Tile, choice_of, measured_tile
from tidemill.kernels.cuda.launch import HOW, begin, launch

SCORINGS = ("softmax_then_topk", "topk_then_softmax")
MOST_DIRECT = 4  # tokens; a choice of tiles ends there too, so that every kernel is compiled at start
_MOST_EXPERTS_DIRECT = 128  # each program compares all with all
_MOST_RANKS = tl.constexpr(8)  # of a token there: their experts are the bytes of a word
_ENTRY = tl.constexpr(4)  # words of a block in a list: expert, first place, rows, unused
_AT_ONCE = tl.constexpr(16)  # experts that are compared with all at once
_LISTED = tl.constexpr(32)  # blocks that a program lists at once


# ---- routing


@triton.jit
def _to_keys(logits, experts, num_experts):
    """Different integers in the order of the logits, of equals the first first. What is not a number has a place in it too, so
    that every token gets experts that exist."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 equals 0
    keys = tl.where(experts < num_experts, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    return (keys.to(tl.int64) << 32) | (0x7FFFFFFF - experts).to(tl.int64)


@triton.constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def _weigh(logits, chosen, OF_ALL: tl.constexpr, EXPERTS: tl.constexpr):
    """The softmax of each row, among all experts or the chosen ones. The sum is a tree of additions that is written out: a
    reduction across threads adds in an order that depends on the number of rows."""
    values = tl.exp(logits - tl.max(logits, 1)[:, None])
    parts = values if OF_ALL else tl.where(chosen, values, 0.0)
    for step in tl.static_range(_log2(EXPERTS)):
        parts = tl.sum(tl.reshape(parts, (logits.shape[0], 2, EXPERTS >> (step + 1))), 1)
    return values / parts


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits_ptr, experts_ptr, weights_ptr, counts_ptr, num_tokens, num_experts,
    TOP_K: tl.constexpr, OF_ALL: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a chunk of tokens by rank, and how many of its tokens each expert has."""
    begin(AHEAD)
    chunk = tl.program_id(0)
    tokens, experts = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, EXPERTS)[None, :]
    there = tokens < num_tokens
    inside = there[:, None] & (experts < num_experts)
    logits = tl.load(logits_ptr + tokens[:, None].to(tl.int64) * num_experts + experts, mask=inside, other=float("-inf"))
    keys = _to_keys(logits, experts, num_experts)
    ranks = tl.full((CHUNK, EXPERTS), TOP_K, tl.int32)
    for rank in range(TOP_K):
        best = keys == tl.max(keys, 1)[:, None]
        ranks = tl.where(best, rank, ranks)
        keys = tl.where(best, -0x8000000000000000, keys)
    chosen = ranks < TOP_K
    weights = _weigh(logits, chosen, OF_ALL, EXPERTS)
    chosen = chosen & there[:, None]
    pairs = tokens[:, None] * TOP_K + ranks
    tl.store(experts_ptr + pairs, tl.broadcast_to(experts, (CHUNK, EXPERTS)), mask=chosen)
    tl.store(weights_ptr + pairs, weights, mask=chosen)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def _list_blocks(list_ptr, starts, counts, num_blocks, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """This program's part of the list of blocks: each has up to ROWS places of one expert."""
    experts = tl.arange(0, EXPERTS)[None, :]
    blocks = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    for base in range(tl.program_id(0) * _LISTED, num_blocks, tl.num_programs(0) * _LISTED):
        number = base + tl.arange(0, _LISTED)
        expert = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
        here = experts == expert[:, None]
        skipped = (number - tl.sum(tl.where(here, (ends - blocks)[None, :], 0), 1)) * ROWS
        first = tl.sum(tl.where(here, starts[None, :], 0), 1) + skipped
        rows = tl.minimum(tl.sum(tl.where(here, counts[None, :], 0), 1) - skipped, ROWS)
        entry, there = list_ptr + number * _ENTRY, number < num_blocks
        tl.store(entry, expert, mask=there)
        tl.store(entry + 1, first, mask=there)
        tl.store(entry + 2, tl.where(expert < EXPERTS, rows, 0), mask=there)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_up", "num_down"])
def _place(
    experts_ptr, counts_ptr, order_ptr, up_ptr, down_ptr, num_tokens, num_chunks, num_up, num_down,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, UP_ROWS: tl.constexpr, DOWN_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Where the pairs of a chunk of tokens lie when all are in the order of experts, then of tokens; and the lists of blocks."""
    begin(AHEAD)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_chunks, 16):
        chunks = first + tl.arange(0, 16)
        some = tl.load(counts_ptr + chunks[:, None] * EXPERTS + experts[None, :], mask=chunks[:, None] < num_chunks, other=0)
        counts += tl.sum(some, 0)
        before += tl.sum(tl.where(chunks[:, None] < chunk, some, 0), 0)
    starts = tl.cumsum(counts, 0) - counts
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    ranks = tl.full((CHUNK, EXPERTS), TOP_K, tl.int32)
    for rank in range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + rank, mask=tokens < num_tokens, other=-1)
        ranks = tl.where(expert[:, None] == experts[None, :], rank, ranks)
    chosen = (ranks < TOP_K).to(tl.int32)
    places = (starts + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(order_ptr + places, tokens[:, None] * TOP_K + ranks, mask=chosen != 0)
    _list_blocks(up_ptr, starts, counts, num_up, UP_ROWS, EXPERTS)
    if DOWN_ROWS != UP_ROWS:  # else it is the same list
        _list_blocks(down_ptr, starts, counts, num_down, DOWN_ROWS, EXPERTS)


# ---- products


@triton.jit
def _tile_of(weight, at, k, num_at, num_in, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):
    """Rows of a matrix from `at` on, transposed. Past the expert's last row comes what is not stored."""
    if BULK:
        return weight.load([at, k]).T
    else:
        outs, ins = tl.arange(0, OUTS)[None, :], k + tl.arange(0, INS)[:, None]
        there = outs < num_at
        if not EVEN:
            there = there & (ins < num_in)
        return tl.load(weight + (at.to(tl.int64) * num_in + outs.to(tl.int64) * num_in + ins), mask=there, other=0.0)


@triton.jit
def _rows_of(x, rows, there, k, num_in, INS: tl.constexpr, EVEN: tl.constexpr):
    ins = k + tl.arange(0, INS)[None, :]
    if EVEN:
        return tl.load(x + (rows[:, None].to(tl.int64) * num_in + ins), mask=there[:, None], other=0.0)
    else:
        return tl.load(x + (rows[:, None].to(tl.int64) * num_in + ins), mask=there[:, None] & (ins < num_in), other=0.0)


@triton.jit
def _gated(
    x_ptr, rows, there, weight, bias_ptr, expert, n, num_in, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """act(gate) * up of OUTS outputs of one expert."""
    gate, up = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
    at, left = expert * 2 * num_out + n * OUTS, num_out - n * OUTS
    for k in range(0, num_in, INS):
        x = _rows_of(x_ptr, rows, there, k, num_in, INS, EVEN)
        gate = tl.dot(x, _tile_of(weight, at, k, left, num_in, OUTS, INS, EVEN, BULK), gate)
        up = tl.dot(x, _tile_of(weight, at + num_out, k, left, num_in, OUTS, INS, EVEN, BULK), up)
    if HAS_BIAS:
        outs = tl.arange(0, OUTS)
        gate += tl.load(bias_ptr + at + outs, mask=outs < left, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + at + num_out + outs, mask=outs < left, other=0.0).to(tl.float32)[None, :]
    # Of rounded values, as if they had been stored in between.
    return gated(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), ACT).to(DTYPE)


@triton.jit
def _up_block(
    x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    there = rows < num
    tokens = tl.load(order_ptr + first + rows, mask=there, other=0) // TOP_K
    out = _gated(
        x_ptr, tokens, there, weight, bias_ptr, expert, n, num_in, num_out,
        ROWS, OUTS, INS, EVEN, BULK, HAS_BIAS, ACT, out_ptr.dtype.element_ty,
    )  # fmt: skip
    outs = n * OUTS + tl.arange(0, OUTS)
    where = out_ptr + (first + rows)[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(where, out, mask=there[:, None] & (outs[None, :] < num_out))


@triton.jit
def _up(
    x_ptr, weight, bias_ptr, out_ptr, order_ptr, list_ptr, num_in, num_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows are gathered by token and stored by place."""
    begin(AHEAD)
    tiles = tl.cdiv(num_out, OUTS)
    n = tl.program_id(0) % tiles
    entry = list_ptr + tl.program_id(0) // tiles * _ENTRY
    expert, first, num = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if num > (ROWS // 2 if HALVES else 0):
        _up_block(
            x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
            TOP_K, ROWS, OUTS, INS, EVEN, BULK, HAS_BIAS, ACT,
        )  # fmt: skip
    elif HALVES:  # noqa: SIM102 (known when compiled; what follows is not)
        if num > 0:
            _up_block(
                x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
                TOP_K, ROWS // 2, OUTS, INS, EVEN, BULK, HAS_BIAS, ACT,
            )  # fmt: skip


@triton.jit
def _down_block(
    x, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    rows, outs = tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
    there = rows < num
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    at, left = expert * num_out + n * OUTS, num_out - n * OUTS
    for k in range(0, num_in, INS):
        values = x.load([first, k]) if BULK else _rows_of(x, first + rows, there, k, num_in, INS, EVEN)
        acc = tl.dot(values, _tile_of(weight, at, k, left, num_in, OUTS, INS, EVEN, BULK), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * num_out + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + first + rows, mask=there, other=0)
    where = out_ptr + pairs[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (outs[None, :] < num_out))


@triton.jit
def _down(
    x, half_x, weight, bias_ptr, out_ptr, order_ptr, list_ptr, num_in, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows are read by place and stored by pair, not weighted yet."""
    begin(AHEAD)
    tiles = tl.cdiv(num_out, OUTS)
    n = tl.program_id(0) % tiles
    entry = list_ptr + tl.program_id(0) // tiles * _ENTRY
    expert, first, num = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if num > (ROWS // 2 if HALVES else 0):
        _down_block(
            x, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
            ROWS, OUTS, INS, EVEN, BULK, HAS_BIAS,
        )  # fmt: skip
    elif HALVES:  # noqa: SIM102 (known when compiled; what follows is not)
        if num > 0:
            _down_block(
                half_x, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
                ROWS // 2, OUTS, INS, EVEN, BULK, HAS_BIAS,
            )  # fmt: skip


@triton.jit
def _combine(
    pairs_ptr, weights_ptr, shared_ptr, out_ptr, width,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        value = tl.load(pairs_ptr + (token * TOP_K + rank) * width + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(tl.zeros((BLOCK,), tl.float32) + tl.load(weights_ptr + token * TOP_K + rank), value, total)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


# ---- a few tokens


@triton.jit
def _ranks(logits_ptr, num_experts, EXPERTS: tl.constexpr):
    """Of one token: its logits [1, E] and how many experts are before each."""
    experts = tl.arange(0, EXPERTS)[None, :]
    logits = tl.load(logits_ptr + experts, mask=experts < num_experts, other=float("-inf"))
    keys = _to_keys(logits, experts, num_experts)
    ahead = tl.zeros((_AT_ONCE, EXPERTS), tl.int32)
    for first in range(0, num_experts, _AT_ONCE):
        others = first + tl.arange(0, _AT_ONCE)[:, None]
        other = tl.load(logits_ptr + others, mask=others < num_experts, other=float("-inf"))
        ahead += (_to_keys(other, others, num_experts) > keys).to(tl.int32)
    return logits, tl.sum(ahead, 0)[None, :]


@triton.jit(do_not_specialize=["num_pairs"])
def _up_direct(
    x_ptr, logits_ptr, weight, bias_ptr, out_ptr, experts_ptr, weights_ptr, num_pairs, num_in, num_out, num_experts,
    TOP_K: tl.constexpr, OF_ALL: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A tile has one pair, in its first row. One program more for each token writes down its experts and weights."""
    begin(AHEAD)
    tiles = tl.cdiv(num_out, OUTS)
    n, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    experts = tl.arange(0, EXPERTS)[None, :]
    token = tl.where(pair < num_pairs, pair // TOP_K, tl.program_id(0) - num_pairs * tiles)
    logits, ranks = _ranks(logits_ptr + token * num_experts, num_experts, EXPERTS)
    if pair >= num_pairs:
        weights = _weigh(logits, ranks < TOP_K, OF_ALL, EXPERTS)
        tl.store(experts_ptr + token * TOP_K + ranks, experts, mask=ranks < TOP_K)
        tl.store(weights_ptr + token * TOP_K + ranks, weights, mask=ranks < TOP_K)
        return
    expert = tl.sum(tl.sum(tl.where(ranks == pair % TOP_K, experts, 0), 1), 0)
    rows = tl.arange(0, ROWS)
    out = _gated(
        x_ptr, rows * 0 + token, rows < 1, weight, bias_ptr, expert, n, num_in, num_out,
        ROWS, OUTS, INS, EVEN, BULK, HAS_BIAS, ACT, out_ptr.dtype.element_ty,
    )  # fmt: skip
    outs = n * OUTS + tl.arange(0, OUTS)
    where = out_ptr + (pair + rows)[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(where, out, mask=(rows < 1)[:, None] & (outs[None, :] < num_out))


@triton.jit
def _down_direct(
    x_ptr, weight, bias_ptr, experts_ptr, weights_ptr, shared_ptr, out_ptr, num_in, num_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, of all its experts in turn: one loop, so that the next expert is fetched meanwhile."""
    begin(AHEAD)
    tiles = tl.cdiv(num_out, OUTS)
    n, token = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    rows, outs, left = tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS), num_out - n * OUTS
    ranks = tl.arange(0, _MOST_RANKS)
    experts = tl.load(experts_ptr + token * TOP_K + ranks, mask=ranks < TOP_K, other=0)
    packed = tl.sum(experts.to(tl.int64) << (8 * ranks).to(tl.int64), 0)  # if the loop loaded them, it would wait for each
    steps = tl.cdiv(num_in, INS)
    acc, total = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, OUTS), tl.float32)
    for i in range(TOP_K * steps):
        rank, k = i // steps, i % steps * INS
        expert, pair = ((packed >> (8 * rank).to(tl.int64)) & 0xFF).to(tl.int32), token * TOP_K + rank
        x = _rows_of(x_ptr, rows * 0 + pair, rows < 1, k, num_in, INS, EVEN)
        weights = _tile_of(weight, expert * num_out + n * OUTS, k, left, num_in, OUTS, INS, EVEN, BULK)
        acc = tl.dot(x, weights, tl.where(k == 0, 0.0, acc))
        value = acc
        if HAS_BIAS:
            value += tl.load(bias_ptr + expert * num_out + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
        value = value.to(out_ptr.dtype.element_ty).to(tl.float32)
        more = tl.fma(tl.zeros((ROWS, OUTS), tl.float32) + tl.load(weights_ptr + pair), value, total)
        total = tl.where(k + INS >= num_in, more, total)
    there = (rows < 1)[:, None] & (outs[None, :] < num_out)
    where = (token + rows)[:, None].to(tl.int64) * num_out + outs[None, :]
    if HAS_SHARED:
        total += tl.load(shared_ptr + where, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=there)


# ---- the host's part


@dataclass(frozen=True, slots=True)
class Routing:
    experts_P: torch.Tensor  # by token and rank
    weights_P: torch.Tensor
    order_P: torch.Tensor  # pairs in the order of experts
    up_blocks: torch.Tensor  # [blocks, _ENTRY]
    down_blocks: torch.Tensor


@cache
def choose_tile(num_tokens: int, top_k: int, num_experts: int, num_out: int, num_in: int) -> Tile:
    """By measurement, else by the mean number of rows of an expert. It changes only where the choices of matmuls do."""
    measured = measured_tile(num_tokens, num_experts, num_out, num_in)
    if measured:
        return measured
    num_rows = choice_of(num_tokens) * top_k / num_experts
    if choice_of(num_tokens) <= MOST_DIRECT:
        return Tile(16, 32, 256, 3, 4)
    if num_rows <= 8:
        return Tile(16, 64, 128, 5, 4)
    if num_rows <= 24:
        return Tile(32, 64, 128, 5, 4)
    if num_rows <= 64:
        return Tile(64, 128, 64, 5, 4, 1)
    return Tile(128, 256, 64, 4, 8, 1)


def most_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """However the pairs are routed."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // rows


def is_direct(num_tokens: int, top_k: int, num_experts: int) -> bool:
    return num_tokens <= MOST_DIRECT and num_experts <= _MOST_EXPERTS_DIRECT and top_k <= _MOST_RANKS.value


def _how(tile: Tile, num_in: int, bias: torch.Tensor | None, act: str | None = None) -> dict[str, Any]:
    how = {
        "ROWS": tile.rows, "INS": tile.ins, "EVEN": num_in % tile.ins == 0, "HAS_BIAS": bias is not None, "BULK": bool(tile.bulk),
        "num_stages": tile.stages, "num_warps": tile.warps, **HOW,
    }  # fmt: skip
    return how | ({"OUTS": tile.outs} if act is None else {"OUTS": tile.outs // 2, "ACT": act})


def _matrices(weight: torch.Tensor, outs: int, tile: Tile) -> torch.Tensor | TensorDescriptor:
    """All experts' rows below one another, as a kernel takes them."""
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [outs, tile.ins]) if tile.bulk else weight


def route(logits_TE: torch.Tensor, top_k: int, of_all: bool, up_rows: int, down_rows: int) -> Routing:
    """`of_all`: weights are the softmax among all experts, else among the chosen ones. Then: rows of the products' blocks."""
    num_tokens, num_experts = logits_TE.shape
    num_pairs, chunk = num_tokens * top_k, 16 if num_tokens <= 512 else 64
    num_chunks, wide = triton.cdiv(num_tokens, chunk), triton.next_power_of_2(num_experts)
    new = partial(torch.empty, dtype=torch.int32, device=logits_TE.device)
    experts, order, counts = new(num_pairs), new(num_pairs), new(num_chunks * wide)
    weights = torch.empty_like(order, dtype=torch.float32)
    up_blocks, down_blocks = (new(most_blocks(num_pairs, num_experts, rows), 4) for rows in (up_rows, down_rows))
    shape = {"TOP_K": top_k, "CHUNK": chunk, "EXPERTS": wide, "num_warps": 4 if chunk == 16 else 8}
    launch(_route, (num_chunks,), logits_TE, experts, weights, counts, num_tokens, num_experts, OF_ALL=of_all, **shape, **HOW)
    launch(
        _place, (num_chunks,),
        experts, counts, order, up_blocks, down_blocks, num_tokens, num_chunks, len(up_blocks), len(down_blocks),
        UP_ROWS=up_rows, DOWN_ROWS=down_rows, **shape, **HOW,
    )  # fmt: skip
    return Routing(experts, weights, order, up_blocks, up_blocks if up_rows == down_rows else down_blocks)


def multiply_gated(
    x_TH: torch.Tensor, weight_E2IH: torch.Tensor, routing: Routing, tile: Tile, top_k: int, act: str,
    bias_E2I: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of each pair, in the order of experts."""
    num_in, num_out = weight_E2IH.shape[2], weight_E2IH.shape[1] // 2
    out = x_TH.new_empty(len(routing.order_P), num_out)
    launch(
        _up, (len(routing.up_blocks) * triton.cdiv(num_out, tile.outs // 2),),
        x_TH, _matrices(weight_E2IH, tile.outs // 2, tile), weight_E2IH if bias_E2I is None else bias_E2I, out,
        routing.order_P, routing.up_blocks, num_in, num_out,
        TOP_K=top_k, HALVES=bool(tile.halves), **_how(tile, num_in, bias_E2I, act),
    )  # fmt: skip
    return out


def multiply(
    x_PI: torch.Tensor, weight_EHI: torch.Tensor, routing: Routing, tile: Tile, bias_EH: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows in the order of experts to results by pair."""
    _, num_out, num_in = weight_EHI.shape
    out = x_PI.new_empty(len(x_PI), num_out)
    x = [TensorDescriptor.from_tensor(x_PI, [rows, tile.ins]) if tile.bulk else x_PI for rows in (tile.rows, tile.rows // 2)]
    launch(
        _down, (len(routing.down_blocks) * triton.cdiv(num_out, tile.outs),),
        *x, _matrices(weight_EHI, tile.outs, tile), weight_EHI if bias_EH is None else bias_EH, out,
        routing.order_P, routing.down_blocks, num_in, num_out, HALVES=bool(tile.halves), **_how(tile, num_in, bias_EH),
    )  # fmt: skip
    return out


def combine(pairs_PH: torch.Tensor, weights_P: torch.Tensor, top_k: int, shared_TH: torch.Tensor | None = None) -> torch.Tensor:
    num_tokens, width = len(pairs_PH) // top_k, pairs_PH.shape[1]
    out = pairs_PH.new_empty(num_tokens, width)
    launch(
        _combine, (num_tokens, triton.cdiv(width, 1024)),
        pairs_PH, weights_P, out if shared_TH is None else shared_TH, out, width,
        TOP_K=top_k, HAS_SHARED=shared_TH is not None, BLOCK=1024, num_warps=4, **HOW,
    )  # fmt: skip
    return out


def multiply_gated_directly(
    x_TH: torch.Tensor, logits_TE: torch.Tensor, weight_E2IH: torch.Tensor, tile: Tile, top_k: int, of_all: bool, act: str,
    bias_E2I: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """act(gate) * up of each pair of token and rank; experts and weights."""
    num_tokens, num_experts = logits_TE.shape
    num_in, num_out, num_pairs = weight_E2IH.shape[2], weight_E2IH.shape[1] // 2, num_tokens * top_k
    out = x_TH.new_empty(num_pairs, num_out)
    experts = torch.empty(num_pairs, dtype=torch.int32, device=x_TH.device)
    weights = torch.empty_like(experts, dtype=torch.float32)
    launch(
        _up_direct, (num_pairs * triton.cdiv(num_out, tile.outs // 2) + num_tokens,),
        x_TH, logits_TE, _matrices(weight_E2IH, tile.outs // 2, tile), weight_E2IH if bias_E2I is None else bias_E2I, out,
        experts, weights, num_pairs, num_in, num_out, num_experts,
        TOP_K=top_k, OF_ALL=of_all, EXPERTS=triton.next_power_of_2(num_experts), **_how(tile, num_in, bias_E2I, act),
    )  # fmt: skip
    return out, experts, weights


def multiply_directly(
    x_PI: torch.Tensor, weight_EHI: torch.Tensor, experts_P: torch.Tensor, weights_P: torch.Tensor, tile: Tile, top_k: int,
    bias_EH: torch.Tensor | None = None, shared_TH: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The second product and the sum of each token's experts."""
    _, num_out, num_in = weight_EHI.shape
    num_tokens = len(x_PI) // top_k
    out = x_PI.new_empty(num_tokens, num_out)
    launch(
        _down_direct, (num_tokens * triton.cdiv(num_out, tile.outs),),
        x_PI, _matrices(weight_EHI, tile.outs, tile), weight_EHI if bias_EH is None else bias_EH, experts_P, weights_P,
        out if shared_TH is None else shared_TH, out, num_in, num_out,
        TOP_K=top_k, HAS_SHARED=shared_TH is not None, **_how(tile, num_in, bias_EH),
    )  # fmt: skip
    return out


def moe(
    x_TH: torch.Tensor,
    router_logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    renormalise: bool,
    act: str,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_EH: torch.Tensor | None = None,
    scoring: str = "softmax_then_topk",
    shared_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gate_up`: an expert's rows of gate, then those of up. `renormalise`: a token's weights add up to 1, as they always do with
    `topk_then_softmax`. `shared`: what is added to the experts' sum, such as the output of an expert that every token has."""
    assert scoring in SCORINGS
    (num_tokens, num_experts), (num_gate_up, num_in) = router_logits_TE.shape, gate_up_E2IH.shape[1:]
    of_all = scoring == "softmax_then_topk" and not renormalise
    up_tile = choose_tile(num_tokens, top_k, num_experts, num_gate_up, num_in)
    down_tile = choose_tile(num_tokens, top_k, num_experts, *down_EHI.shape[1:])
    if is_direct(num_tokens, top_k, num_experts):
        rows, experts, weights = multiply_gated_directly(
            x_TH, router_logits_TE, gate_up_E2IH, up_tile, top_k, of_all, act, gate_up_bias_E2I
        )
        return multiply_directly(rows, down_EHI, experts, weights, down_tile, top_k, down_bias_EH, shared_TH)
    routing = route(router_logits_TE, top_k, of_all, up_tile.rows, down_tile.rows)
    rows = multiply_gated(x_TH, gate_up_E2IH, routing, up_tile, top_k, act, gate_up_bias_E2I)
    return combine(multiply(rows, down_EHI, routing, down_tile, down_bias_EH), routing.weights_P, top_k, shared_TH)
