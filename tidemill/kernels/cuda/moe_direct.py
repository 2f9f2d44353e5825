"""Experts of a few tokens: programs find their experts in the logits themselves, so that there are
two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.expert_blocks import (
    Tally,
    gated_block,
    log2,
    matrices,
    options_of,
    to_keys,
    weigh,
)
from tidemill.kernels.cuda.gemm import Tile
from tidemill.kernels.cuda.launch import begin, launch

# tokens; a choice of tiles ends there too, so that every kernel is compiled at start
MOST_DIRECT = 4
_MOST_EXPERTS_DIRECT = 128  # each program compares all with all; their numbers are bytes
_MOST_RANKS = 8  # of a token there: a program has a tile of each
_AT_ONCE = tl.constexpr(16)  # experts that are compared with all at once


@triton.jit
def _ranks(logits_ptr, num_experts: tl.constexpr, EXPERTS: tl.constexpr):
    """The ranks of one token: its logits [1, E] and how many experts are before each."""
    experts = tl.arange(0, EXPERTS)[None, :]
    logits = tl.load(logits_ptr + experts, mask=experts < num_experts, other=float("-inf"))
    keys = to_keys(logits, experts, num_experts)
    ahead = tl.zeros((_AT_ONCE, EXPERTS), tl.int32)
    for first in tl.static_range(0, EXPERTS, _AT_ONCE):
        others = first + tl.arange(0, _AT_ONCE)[:, None]
        other = tl.load(logits_ptr + others, mask=others < num_experts, other=float("-inf"))
        ahead += (to_keys(other, others, num_experts) > keys).to(tl.int32)
    return logits, tl.sum(ahead, 0)[None, :]


@triton.jit
def _chosen(logits_ptr, num_experts: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """A token's experts by rank, a byte each: a number, since of a tensor the compiler would
    compute all that leads to it once for each layout in which it is needed."""
    _, ranks = _ranks(logits_ptr, num_experts, EXPERTS)
    experts = tl.arange(0, EXPERTS)[None, :].to(tl.int64) << (tl.minimum(ranks, TOP_K - 1) * 8).to(
        tl.int64
    )
    return tl.sum(tl.sum(tl.where(ranks < TOP_K, experts, 0), 1), 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _up_direct(
    x_ptr, logits_ptr, weight, bias_ptr, out_ptr, shares_ptr, totals_ptr, live_ptr, num_tokens, num_in, num_out,
    TOP_K: tl.constexpr, WEIGHING: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    COUNT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A tile has one pair, in its first row. The first programs have a token each, and write by
    what weights its experts are added up. Reference: `moe.moe_reference`."""
    begin(AHEAD)
    if tl.program_id(0) < num_tokens:
        token = tl.program_id(0)
        logits, ranks = _ranks(logits_ptr + token * NUM_EXPERTS, NUM_EXPERTS, EXPERTS)
        shares = weigh(logits, ranks < TOP_K, WEIGHING, EXPERTS)
        tl.store(shares_ptr + token * TOP_K + ranks, shares, mask=ranks < TOP_K)
        return
    tile, tiles = tl.program_id(0) - num_tokens, tl.cdiv(num_out, OUTS)
    n, pair = tile % tiles, tile // tiles
    token = pair // TOP_K
    expert = (
        _chosen(logits_ptr + token * NUM_EXPERTS, NUM_EXPERTS, TOP_K, EXPERTS) >> (pair % TOP_K * 8)
    ).to(tl.int32) & 127
    if COUNT:
        tl.atomic_add(
            totals_ptr + expert, 1, mask=(n == 0) & (token < tl.load(live_ptr)), sem="relaxed"
        )
    rows = tl.arange(0, ROWS)
    out = gated_block(
        x_ptr, rows * 0 + token, rows < 1, weight, bias_ptr, expert, n, num_in, num_out,
        ROWS, OUTS, INS, EVEN, BULK, HAS_BIAS, ACT, out_ptr.dtype.element_ty,
    )  # fmt: skip
    outs = n * OUTS + tl.arange(0, OUTS)
    where = out_ptr + (pair + rows)[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(where, out, mask=(rows < 1)[:, None] & (outs[None, :] < num_out))


@triton.jit
def _sum_in_order(values_RO, shares, TOP_K: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr):
    """The sum over all ranks, by their weights. They are split up, so that a thread has those of
    its outputs: reductions over ranks, one for each of them, would take longer than the product."""
    parts = (tl.trans(values_RO),)  # type: tuple
    for level in tl.static_range(log2(RANKS)):
        evens = ()  # type: tuple
        odds = ()  # type: tuple
        for i in tl.static_range(1 << level):
            even, odd = tl.split(tl.reshape(parts[i], (OUTS, RANKS >> (level + 1), 2)))
            evens, odds = evens + (even,), odds + (odd,)
        parts = evens + odds
    total = tl.zeros((OUTS,), tl.float32)
    for rank in tl.static_range(TOP_K):
        total = tl.fma(
            tl.zeros((OUTS,), tl.float32) + shares[rank], tl.reshape(parts[rank], (OUTS,)), total
        )
    return total


@triton.jit
def _down_direct(
    x_ptr, logits_ptr, shares_ptr, weight_ptr, bias_ptr, shared_ptr, out_ptr, num_in, num_out,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token, of all its experts side by side: each has its own sum, and they
    are added in the order of ranks. What is read before the wait was there before the kernel that
    this one waits for. Reference: `moe.moe_reference`."""
    tiles = tl.cdiv(num_out, OUTS)
    n, token = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    ranks, outs = tl.arange(0, RANKS), n * OUTS + tl.arange(0, OUTS)
    chosen = _chosen(logits_ptr + token * NUM_EXPERTS, NUM_EXPERTS, TOP_K, EXPERTS)
    experts = (chosen >> (tl.minimum(ranks, TOP_K - 1) * 8).to(tl.int64)) & 127
    rows = experts[:, None] * num_out + tl.minimum(outs, num_out - 1)[None, :]
    begin(AHEAD)
    shares = ()  # type: tuple
    for rank in tl.static_range(TOP_K):
        shares = shares + (tl.load(shares_ptr + token * TOP_K + rank),)
    there = (ranks < TOP_K)[:, None, None]
    acc = tl.zeros((RANKS, ROWS, OUTS), tl.float32)
    for k in range(0, num_in, INS):
        ins = k + tl.arange(0, INS)
        inside, stored = there, there & (outs < num_out)[None, None, :]
        if not EVEN:
            inside, stored = (
                inside & (ins < num_in)[None, None, :],
                stored & (ins < num_in)[None, :, None],
            )
        x = tl.load(
            x_ptr + (token * TOP_K + ranks)[:, None, None] * num_in + ins[None, None, :],
            mask=inside,
            other=0.0,
        )
        values = tl.load(
            weight_ptr + (rows * num_in)[:, None, :] + ins[None, :, None], mask=stored, other=0.0
        )
        acc = tl.dot(tl.broadcast_to(x, (RANKS, ROWS, INS)), values, acc)  # all rows are the same
    value = tl.sum(tl.where(tl.arange(0, ROWS)[None, :, None] == 0, acc, 0.0), 1)
    if HAS_BIAS:
        value += tl.load(bias_ptr + rows, mask=(outs < num_out)[None, :], other=0.0).to(tl.float32)
    value = value.to(out_ptr.dtype.element_ty).to(tl.float32)
    total = _sum_in_order(value, shares, TOP_K, RANKS, OUTS)
    where = token.to(tl.int64) * num_out + outs
    if HAS_SHARED:
        total += tl.load(shared_ptr + where, mask=outs < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=outs < num_out)


def is_direct(num_tokens: int, top_k: int, num_experts: int) -> bool:
    return (
        num_tokens <= MOST_DIRECT and num_experts <= _MOST_EXPERTS_DIRECT and top_k <= _MOST_RANKS
    )


def multiply_gated_directly(
    x_TH: torch.Tensor, logits_TE: torch.Tensor, weight_E2IH: torch.Tensor, tile: Tile, top_k: int, weighing: int, act: str,
    bias_E2I: torch.Tensor | None = None, tally: Tally | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """act(gate) * up of each pair of token and rank, and by what weights a token's pairs are added."""
    num_tokens, num_experts = logits_TE.shape
    num_in, num_out = weight_E2IH.shape[2], weight_E2IH.shape[1] // 2
    out, shares = (
        x_TH.new_empty(num_tokens * top_k, num_out),
        logits_TE.new_empty(num_tokens * top_k),
    )
    launch(
        _up_direct, (num_tokens + len(out) * triton.cdiv(num_out, tile.outs // 2),),
        x_TH, logits_TE, matrices(weight_E2IH, tile.outs // 2, tile), weight_E2IH if bias_E2I is None else bias_E2I, out, shares,
        *Tally.of(tally, out), num_tokens, num_in, num_out, TOP_K=top_k, WEIGHING=weighing, NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), COUNT=tally is not None, BULK=bool(tile.bulk),
        **options_of(num_tokens, tile, num_in, bias_E2I, act),
    )  # fmt: skip
    return out, shares


def multiply_directly(
    x_PI: torch.Tensor, logits_TE: torch.Tensor, shares_P: torch.Tensor, weight_EHI: torch.Tensor, tile: Tile, top_k: int,
    bias_EH: torch.Tensor | None = None, shared_TH: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The second product and the sum of each token's experts. The kernel before may not have
    written `logits`."""
    (num_tokens, num_experts), (_, num_out, num_in) = logits_TE.shape, weight_EHI.shape
    out = x_PI.new_empty(num_tokens, num_out)
    launch(
        _down_direct, (num_tokens * triton.cdiv(num_out, tile.outs),),
        x_PI, logits_TE, shares_P, weight_EHI, weight_EHI if bias_EH is None else bias_EH,
        out if shared_TH is None else shared_TH, out, num_in, num_out,
        TOP_K=top_k, NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), RANKS=triton.next_power_of_2(top_k),
        HAS_SHARED=shared_TH is not None, **options_of(num_tokens, tile, num_in, bias_EH),
    )  # fmt: skip
    return out
