"""A layer of experts in bf16 with float32 sums: each token goes through its top-k experts, and
their outputs are added by weight.

A token's bits depend on the token alone. Each product makes one pass over its inputs in order,
whichever tile multiplies (see gemm.py), and a token's experts are added in the order of their rank;
nothing is added atomically. What is computed with what depends on all tokens, but only through
integers.

One token or a few (`direct`): the programs of both products find their experts in the logits
themselves, those of the second add a token's experts up, so that there are two launches. Otherwise
five: route; place (pairs of token and rank in the order of experts, then of tokens, and for each
product a list of blocks of rows with one expert); the two products; combine. Launches depend on the
number of tokens only: the lists have room for any routing, and programs past their end do nothing.

Which expert got how many tokens is added up on the way (`Tally`): integers, whose sum does not
depend on the order.

A rank may have some of the experts (expert parallelism): it routes as all do, lists the pairs of
its own experts alone, and adds up those; the sum over ranks is the layer's output. Launches are the
same for any routing, so that graphs can be captured.

Memory is kept busy meanwhile: with few tokens the second product's programs start in the room that
the first one's leave, and find their experts before they wait (fetching their weights, too, took
longer); with many, the first experts' weights are fetched beside the routing.

Shape letters: T tokens, H hidden, E experts, I intermediate, P pairs of token and rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.expert_blocks import (
    PIECE,
    PIECES,
    Tally,
    fetch,
    gated_block,
    matrices,
    options_of,
    rows_of,
    tile_of,
    to_keys,
    weigh,
)
from tidemill.kernels.cuda.gemm import Tile, choice_of, measured_tile
from tidemill.kernels.cuda.launch import IS_INTERPRETED, begin, how, is_compiling, launch
from tidemill.kernels.cuda.moe_direct import (
    MOST_DIRECT,
    is_direct,
    multiply_directly,
    multiply_gated_directly,
)
from tidemill.types.model_config import SCORINGS

FETCHED = 24 << 20  # bytes of weights that fit in the L2 cache beside what is being read
_SOME = 256  # tokens up to which the kernels between matmuls trigger the next one early (measured)
_ENTRY = tl.constexpr(4)  # words of a block in a list: expert, first place, rows, unused
_LISTED = tl.constexpr(32)  # blocks that a program lists


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _route(
    logits_ptr, experts_ptr, weights_ptr, counts_ptr, fetched_ptr, totals_ptr, live_ptr, num_tokens, num_chunks, num_experts,
    TOP_K: tl.constexpr, WEIGHING: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, FETCH: tl.constexpr,
    COUNT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a chunk of tokens by rank, and how many of its tokens each expert has.
    Programs past the chunks fetch the weights that come next. Reference: `moe.route_reference`."""
    chunk = tl.program_id(0)
    if FETCH:  # noqa: SIM102 (known when compiled; what follows is not)
        if chunk >= num_chunks:
            fetch(
                fetched_ptr.to(tl.int64)
                + ((chunk - num_chunks) * PIECES + tl.arange(0, PIECES)) * PIECE,
                PIECE,
            )
            begin(AHEAD)
            return
    begin(AHEAD)
    tokens, experts = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, EXPERTS)[None, :]
    there = tokens < num_tokens
    inside = there[:, None] & (experts < num_experts)
    logits = tl.load(
        logits_ptr + tokens[:, None].to(tl.int64) * num_experts + experts,
        mask=inside,
        other=float("-inf"),
    )
    keys = to_keys(logits, experts, num_experts)
    ranks = tl.full((CHUNK, EXPERTS), TOP_K, tl.int32)
    for rank in range(TOP_K):
        best = keys == tl.max(keys, 1)[:, None]
        ranks = tl.where(best, rank, ranks)
        keys = tl.where(best, -0x8000000000000000, keys)
    chosen = ranks < TOP_K
    weights = weigh(logits, chosen, WEIGHING, EXPERTS)
    chosen = chosen & there[:, None]
    pairs = tokens[:, None] * TOP_K + ranks
    tl.store(experts_ptr + pairs, tl.broadcast_to(experts, (CHUNK, EXPERTS)), mask=chosen)
    tl.store(weights_ptr + pairs, weights, mask=chosen)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), tl.sum(chosen.to(tl.int32), 0))
    if COUNT:
        counted = tl.sum((chosen & (tokens < tl.load(live_ptr))[:, None]).to(tl.int32), 0)
        tl.atomic_add(totals_ptr + tl.arange(0, EXPERTS), counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _list_blocks(
    list_ptr, part, starts, counts, num_blocks, ROWS: tl.constexpr, EXPERTS: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """A part of the list of blocks: each has up to ROWS places of one expert, which has its number
    among those from FIRST on."""
    experts = tl.arange(0, EXPERTS)[None, :]
    blocks = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    number = part * _LISTED + tl.arange(0, _LISTED)
    expert = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    here = experts == expert[:, None]
    skipped = (number - tl.sum(tl.where(here, (ends - blocks)[None, :], 0), 1)) * ROWS
    first = tl.sum(tl.where(here, starts[None, :], 0), 1) + skipped
    rows = tl.minimum(tl.sum(tl.where(here, counts[None, :], 0), 1) - skipped, ROWS)
    entry, there = list_ptr + number * _ENTRY, number < num_blocks
    tl.store(entry, expert - FIRST, mask=there)
    tl.store(entry + 1, first, mask=there)
    tl.store(entry + 2, tl.where(expert < EXPERTS, rows, 0), mask=there)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_up", "num_down"])
def _place(
    experts_ptr, counts_ptr, order_ptr, up_ptr, down_ptr, num_tokens, num_chunks, num_up, num_down,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, UP_ROWS: tl.constexpr, DOWN_ROWS: tl.constexpr,
    FIRST: tl.constexpr, NUM_OWN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The places of the pairs of a chunk of tokens when all are in the order of experts, then of
    tokens. Programs past the chunks write the lists of blocks. NUM_OWN: of the experts from FIRST
    on, so many are here, and pairs of others have no place; 0: all are. Reference:
    `moe.route_reference`."""
    begin(AHEAD)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_chunks, 16):
        chunks = first + tl.arange(0, 16)
        some = tl.load(
            counts_ptr + chunks[:, None] * EXPERTS + experts[None, :],
            mask=chunks[:, None] < num_chunks,
            other=0,
        )
        counts += tl.sum(some, 0)
        before += tl.sum(tl.where(chunks[:, None] < chunk, some, 0), 0)
    own = experts >= FIRST
    if NUM_OWN:
        own = own & (experts < FIRST + NUM_OWN)
        counts, before = tl.where(own, counts, 0), tl.where(own, before, 0)
    starts = tl.cumsum(counts, 0) - counts
    if chunk >= num_chunks:
        _list_blocks(up_ptr, chunk - num_chunks, starts, counts, num_up, UP_ROWS, EXPERTS, FIRST)
        if DOWN_ROWS != UP_ROWS:  # else it is the same list
            _list_blocks(
                down_ptr, chunk - num_chunks, starts, counts, num_down, DOWN_ROWS, EXPERTS, FIRST
            )
        return
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    ranks = tl.full((CHUNK, EXPERTS), TOP_K, tl.int32)
    for rank in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + rank, mask=tokens < num_tokens, other=-1)
        ranks = tl.where((expert[:, None] == experts[None, :]) & own[None, :], rank, ranks)
    chosen = (ranks < TOP_K).to(tl.int32)
    places = (starts + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(order_ptr + places, tokens[:, None] * TOP_K + ranks, mask=chosen != 0)


# ---- products


@triton.jit
def _up_block(
    x_ptr, weight, bias_ptr, out_ptr, order_ptr, expert, first, num, n, num_in, num_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    there = rows < num
    tokens = tl.load(order_ptr + first + rows, mask=there, other=0) // TOP_K
    out = gated_block(
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
    """Rows are gathered by token and stored by place. Reference: `moe.moe_reference`."""
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
        values = (
            x.load([first, k]) if BULK else rows_of(x, first + rows, there, k, num_in, INS, EVEN)
        )
        acc = tl.dot(values, tile_of(weight, at, k, left, num_in, OUTS, INS, EVEN, BULK), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * num_out + outs, mask=outs < num_out, other=0.0).to(
            tl.float32
        )[None, :]
    pairs = tl.load(order_ptr + first + rows, mask=there, other=0)
    where = out_ptr + pairs[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(
        where, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (outs[None, :] < num_out)
    )


@triton.jit
def _down(
    x, half_x, weight, bias_ptr, out_ptr, order_ptr, list_ptr, num_in, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows are read by place and stored by pair, not weighted yet.
    Reference: `moe.moe_reference`."""
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
    pairs_ptr, weights_ptr, experts_ptr, shared_ptr, out_ptr, width,
    TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, FIRST: tl.constexpr, NUM_OWN: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """FIRST, NUM_OWN: as `_place` has them; what other experts would have given is not there.
    Reference: `moe.moe_reference`."""
    begin(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        here = inside
        if NUM_OWN:
            number = tl.load(experts_ptr + token * TOP_K + rank) - FIRST
            here = columns < tl.where((number >= 0) & (number < NUM_OWN), width, 0)
        value = tl.load(
            pairs_ptr + (token * TOP_K + rank) * width + columns, mask=here, other=0.0
        ).to(tl.float32)
        total = tl.fma(
            tl.zeros((BLOCK,), tl.float32) + tl.load(weights_ptr + token * TOP_K + rank),
            value,
            total,
        )
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * width + columns, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


# ---- the host's part


@dataclass(frozen=True, slots=True)
class Routing:
    experts_P: torch.Tensor  # by token and rank
    weights_P: torch.Tensor
    order_P: torch.Tensor  # pairs in the order of experts
    up_blocks: torch.Tensor  # [blocks, _ENTRY]
    down_blocks: torch.Tensor
    own: tuple[int, int] = (0, 0)  # the first expert that is here, and how many are; 0: all


@cache
def choose_tile(
    num_tokens: int, top_k: int, num_experts: int, num_out: int, num_in: int, adds: bool = False
) -> Tile:
    """By measurement, else by the mean number of rows of an expert. It changes only where the
    choices of matmuls do. `adds`: with few tokens a program has a tile of each of a token's
    experts."""
    measured = measured_tile(num_tokens, num_experts, num_out, num_in)
    if measured:
        return measured
    num_rows = choice_of(num_tokens) * top_k / num_experts
    if choice_of(num_tokens) <= MOST_DIRECT:
        return Tile(16, 16, 128, 3, 8) if adds else Tile(16, 32, 256, 3, 4)
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


def _num_fetched(weight: torch.Tensor, num_tokens: int, num_pairs: int) -> int:
    """Programs that fetch weights meanwhile: where nearly every expert has a token, and memory is
    what the product waits for."""
    if IS_INTERPRETED or num_tokens > 512 or num_pairs < 4 * len(weight):
        return 0
    return min(FETCHED, weight.nbytes) // (PIECE.value * PIECES.value)


def weighing_of(scoring: str, renormalise: bool) -> int:
    """The mode in which `weigh` weighs the chosen experts."""
    assert scoring in SCORINGS
    return 2 if scoring == "scores" else int(scoring == "softmax_then_topk" and not renormalise)


def route(
    logits_TE: torch.Tensor, top_k: int, weighing: int, up_rows: int, down_rows: int, next_weight: torch.Tensor | None = None,
    tally: Tally | None = None, own: tuple[int, int] = (0, 0),
) -> Routing:  # fmt: skip
    """`weighing`: as `weigh` has it. Then: rows of the products' blocks, and
    what is multiplied next. `own`: as `Routing` has it."""
    num_tokens, num_experts = logits_TE.shape
    num_pairs, chunk = num_tokens * top_k, 16 if num_tokens <= 512 else 64
    num_chunks, wide = triton.cdiv(num_tokens, chunk), triton.next_power_of_2(num_experts)
    new = partial(torch.empty, dtype=torch.int32, device=logits_TE.device)
    experts, order, counts = new(num_pairs), new(num_pairs), new(num_chunks * wide)
    weights = torch.empty_like(order, dtype=torch.float32)
    up_blocks, down_blocks = (
        new(most_blocks(num_pairs, own[1] or num_experts, rows), 4) for rows in (up_rows, down_rows)
    )
    shape = {"TOP_K": top_k, "CHUNK": chunk, "EXPERTS": wide, "num_warps": 4 if chunk == 16 else 8}
    num_fetched = 0 if next_weight is None else _num_fetched(next_weight, num_tokens, num_pairs)
    launch(
        _route, (num_chunks + num_fetched,),
        logits_TE, experts, weights, counts, logits_TE if next_weight is None else next_weight, *Tally.of(tally, counts),
        num_tokens, num_chunks, num_experts,
        WEIGHING=weighing, FETCH=num_fetched > 0, COUNT=tally is not None, **shape, **how(num_tokens, _SOME),
    )  # fmt: skip
    launch(
        _place, (num_chunks + triton.cdiv(max(len(up_blocks), len(down_blocks)), _LISTED.value),),
        experts, counts, order, up_blocks, down_blocks, num_tokens, num_chunks, len(up_blocks), len(down_blocks),
        UP_ROWS=up_rows, DOWN_ROWS=down_rows, FIRST=own[0], NUM_OWN=own[1], **shape, **how(num_tokens, _SOME),
    )  # fmt: skip
    return Routing(
        experts, weights, order, up_blocks, up_blocks if up_rows == down_rows else down_blocks, own
    )


def multiply_gated(
    x_TH: torch.Tensor, weight_E2IH: torch.Tensor, routing: Routing, tile: Tile, top_k: int, act: str,
    bias_E2I: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(gate) * up of each pair, in the order of experts."""
    num_in, num_out = weight_E2IH.shape[2], weight_E2IH.shape[1] // 2
    out = x_TH.new_empty(len(routing.order_P), num_out)
    launch(
        _up, (len(routing.up_blocks) * triton.cdiv(num_out, tile.outs // 2),),
        x_TH, matrices(weight_E2IH, tile.outs // 2, tile), weight_E2IH if bias_E2I is None else bias_E2I, out,
        routing.order_P, routing.up_blocks, num_in, num_out,
        TOP_K=top_k, HALVES=bool(tile.halves), BULK=bool(tile.bulk), **options_of(len(x_TH), tile, num_in, bias_E2I, act),
    )  # fmt: skip
    return out


def multiply(
    x_PI: torch.Tensor,
    weight_EHI: torch.Tensor,
    routing: Routing,
    tile: Tile,
    top_k: int,
    bias_EH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows in the order of experts to results by pair."""
    _, num_out, num_in = weight_EHI.shape
    out = x_PI.new_empty(len(x_PI), num_out)
    x = [
        TensorDescriptor.from_tensor(x_PI, [rows, tile.ins]) if tile.bulk else x_PI
        for rows in (tile.rows, tile.rows // 2)
    ]
    launch(
        _down, (len(routing.down_blocks) * triton.cdiv(num_out, tile.outs),),
        *x, matrices(weight_EHI, tile.outs, tile), weight_EHI if bias_EH is None else bias_EH, out,
        routing.order_P, routing.down_blocks, num_in, num_out,
        HALVES=bool(tile.halves), BULK=bool(tile.bulk), **options_of(len(out) // top_k, tile, num_in, bias_EH),
    )  # fmt: skip
    return out


def combine(
    pairs_PH: torch.Tensor, routing: Routing, top_k: int, shared_TH: torch.Tensor | None = None
) -> torch.Tensor:
    num_tokens, width = len(pairs_PH) // top_k, pairs_PH.shape[1]
    out = pairs_PH.new_empty(num_tokens, width)
    launch(
        _combine, (num_tokens, triton.cdiv(width, 1024)),
        pairs_PH, routing.weights_P, routing.experts_P, out if shared_TH is None else shared_TH, out, width,
        TOP_K=top_k, HAS_SHARED=shared_TH is not None, FIRST=routing.own[0], NUM_OWN=routing.own[1], BLOCK=1024, num_warps=4,
        **how(num_tokens, _SOME),
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
    tally: Tally | None = None,
    first: int = 0,
) -> torch.Tensor:
    """`gate_up`: an expert's rows of gate, then those of up. `renormalise`: a token's weights add
    up to 1, as they always do with `topk_then_softmax`. `shared`: what is added to the experts'
    sum, such as the output of an expert that every token has. `first`: the number of the first
    expert, if there are fewer matrices than logits; what the others would give is left out."""
    (num_tokens, num_experts), (num_gate_up, num_in) = (
        router_logits_TE.shape,
        gate_up_E2IH.shape[1:],
    )
    weighing = weighing_of(scoring, renormalise)
    up_tile = choose_tile(num_tokens, top_k, num_experts, num_gate_up, num_in)
    own = (first, len(gate_up_E2IH)) if len(gate_up_E2IH) < num_experts else (0, 0)
    direct = not own[1] and is_direct(num_tokens, top_k, num_experts)
    down_tile = choose_tile(num_tokens, top_k, num_experts, *down_EHI.shape[1:], adds=direct)
    if direct:
        logits = router_logits_TE
        rows, shares = multiply_gated_directly(
            x_TH, logits, gate_up_E2IH, up_tile, top_k, weighing, act, gate_up_bias_E2I, tally
        )
        return multiply_directly(
            rows, logits, shares, down_EHI, down_tile, top_k, down_bias_EH, shared_TH
        )
    routing = route(
        router_logits_TE, top_k, weighing, up_tile.rows, down_tile.rows, gate_up_E2IH, tally, own
    )
    rows = multiply_gated(x_TH, gate_up_E2IH, routing, up_tile, top_k, act, gate_up_bias_E2I)
    return combine(
        multiply(rows, down_EHI, routing, down_tile, top_k, down_bias_EH), routing, top_k, shared_TH
    )


@dataclass(frozen=True, slots=True)
class InSlots:
    """Experts that lie in slots. `slot_of`: of each expert, and of numbers past them up to a power
    of two and itself."""

    slot_of: torch.Tensor  # int32
    gate_up_S2IH: torch.Tensor
    down_SHI: torch.Tensor
    gate_up_bias_S2I: torch.Tensor | None = None
    down_bias_SH: torch.Tensor | None = None


def moe_in_slots(
    x_TH: torch.Tensor,
    router_logits_TE: torch.Tensor,
    find: Callable[[torch.Tensor], InSlots],
    sizes: tuple[int, int],
    top_k: int,
    renormalise: bool,
    act: str,
    scoring: str = "softmax_then_topk",
    shared_TH: torch.Tensor | None = None,
    tally: Tally | None = None,
) -> torch.Tensor:
    """The same as `moe`, bit for bit. `find` takes the chosen experts, by token and rank, and says
    where they are. `sizes`: 2 I and H."""
    (num_tokens, num_experts), (num_gate_up, num_in) = router_logits_TE.shape, sizes
    weighing = weighing_of(scoring, renormalise)
    up_tile = choose_tile(num_tokens, top_k, num_experts, num_gate_up, num_in)
    down_tile = choose_tile(num_tokens, top_k, num_experts, num_in, num_gate_up // 2)
    routing = route(router_logits_TE, top_k, weighing, up_tile.rows, down_tile.rows, tally=tally)
    there = find(routing.experts_P)
    for blocks in {id(one): one for one in (routing.up_blocks, routing.down_blocks)}.values():
        if not is_compiling():  # else the list has not been written
            blocks[:, 0] = there.slot_of.index_select(0, blocks[:, 0])
    rows = multiply_gated(
        x_TH, there.gate_up_S2IH, routing, up_tile, top_k, act, there.gate_up_bias_S2I
    )
    pairs = multiply(rows, there.down_SHI, routing, down_tile, top_k, there.down_bias_SH)
    return combine(pairs, routing, top_k, shared_TH)
