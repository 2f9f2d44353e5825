"""y += scale · up (down x) with the pair of each row's adapter, on the GPU: two kernels, for any number of adapters in a step.

Tokens are in order of their adapters' slots, in tiles of one slot each (kernels/lora.py); the host writes both lists before the
step. The first kernel multiplies by the low-rank matrices down, in stretches of K that end at fixed places, so that there is
work for all of the GPU; the second adds the stretches up in their order, and multiplies by the matrices up; of a gated layer, it
also applies the activation, for all tokens. Ranks go in blocks of 16: a slot's memory is for the highest rank, and only what its
adapter has is read. A token's bits depend on the token and its adapter alone.

The matmul of a bfloat16 weight (gemm.py) is the second kernel itself: it adds the product to its sums before they are rounded
(`add_low_rank`), so that outputs are not read and written again. It begins beside the first kernel, whose results it needs last.
A tile of the matmul may have rows of several adapters. In a step of few tokens four adapters at a time are multiplied side by
side, as if their blocks of ranks were one block of 64 inputs, in which a row has zeros but for its own adapter's. In a step of
many tokens a tile has mostly one adapter, and is so large that registers are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.elementwise import activated
from tidemill.kernels.cuda.launch import EARLY, HOW, begin, launch
from tidemill.kernels.lora import LinearLora, Pair

ROWS: Final = 16  # of a tile
RANKS: Final = 16  # of a block
NO_SLOT: Final = 1 << 30  # of tokens without an adapter
_STRETCH, _INS, _OUTS = 1024, 128, 128
_SIDE_BY_SIDE, _FEW = 4, 256  # adapters, in steps of so many tokens. One of `gemm.CHOICES`, at which kernels may change
_MOST_IN_STRETCHES = 512  # tokens; with more there is work enough without. One of `gemm.CHOICES`, at which kernels may change
_NO_SLOT = tl.constexpr(NO_SLOT)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x_ptr, down_ptr, blocks_ptr, order_ptr, tiles_ptr, low_ptr, num_tokens, num_in,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, STRETCH: tl.constexpr,
    WHOLE: tl.constexpr, INS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """low[stretch, token, part] = down x over a stretch of K; WHOLE: over all of them, added in their order."""
    tile, stretch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot >= 0:
        first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        rows, ranks, ins = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, INS)
        there = rows < count
        tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
        x = x_ptr + tokens[:, None] * num_in
        for block in range(tl.load(blocks_ptr + slot * PARTS + part)):
            down = down_ptr + ((slot * PARTS + part) * MAX_RANK + block * RANKS + ranks)[None, :] * num_in
            total = tl.zeros((ROWS, RANKS), tl.float32)
            for begins in range(stretch * STRETCH, num_in if WHOLE else (stretch + 1) * STRETCH, STRETCH):
                ends = min(begins + STRETCH, num_in)
                acc = tl.zeros((ROWS, RANKS), tl.float32)
                for k in range(begins, ends, INS):
                    a = tl.load(x + (k + ins)[None, :], mask=there[:, None] & (k + ins < ends)[None, :], other=0.0)
                    b = tl.load(down + (k + ins)[:, None], mask=(k + ins < ends)[:, None], other=0.0)
                    acc = tl.dot(a, b, acc)
                total += acc
            where = ((stretch * num_tokens + tokens) * PARTS + part) * MAX_RANK + block * RANKS
            tl.store(low_ptr + where[:, None] + ranks[None, :], total, mask=there[:, None])


@triton.jit
def _raised(
    low_ptr, up_ptr, blocks_ptr, scales_ptr, tokens, there, inside, slot, part, source, num_tokens, num_out,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, STRETCHES: tl.constexpr,
    OUTS: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """up low of a tile, for columns of one part, from `source` on. Zeros where there is no adapter."""
    ranks, outs, pairs = tl.arange(0, RANKS), tl.arange(0, OUTS), tl.arange(0, 2 * OUTS)
    num_blocks = tl.load(blocks_ptr + slot * PARTS + part, mask=slot >= 0, other=0)
    scale = tl.load(scales_ptr + slot * PARTS + part, mask=slot >= 0, other=0.0)
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for block in range(num_blocks):
        low = tl.zeros((ROWS, RANKS), tl.float32)
        for stretch in tl.static_range(STRETCHES):
            where = ((stretch * num_tokens + tokens) * PARTS + part) * MAX_RANK + block * RANKS
            low += tl.load(low_ptr + where[:, None] + ranks[None, :], mask=there[:, None], other=0.0)
        up = up_ptr + (slot * MAX_RANK + block * RANKS + ranks)[:, None] * num_out
        if IS_GATED:
            both = tl.load(up + 2 * source + pairs[None, :], mask=(2 * source + pairs < num_out)[None, :], other=0.0)
            gate, other = tl.split(tl.reshape(both, (RANKS, OUTS, 2)))
            b = gate if part == 0 else other
        else:
            b = tl.load(up + source + outs[None, :], mask=inside[None, :], other=0.0)
        acc = tl.dot((low * scale).to(b.dtype), b, acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    low_ptr, up_ptr, blocks_ptr, scales_ptr, order_ptr, tiles_ptr, columns_ptr, out_ptr, num_tokens, num_out,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, STRETCHES: tl.constexpr,
    OUTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out += up low, for a tile and some columns of one part. A record of columns: part, first, number."""
    tile, record = tl.program_id(0), columns_ptr + tl.program_id(1) * 3
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot >= 0:
        part, source, num = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        if tl.load(blocks_ptr + slot * PARTS + part) > 0:
            first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
            rows, outs = tl.arange(0, ROWS), tl.arange(0, OUTS)
            there, inside = rows < count, outs < num
            tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
            acc = _raised(
                low_ptr, up_ptr, blocks_ptr, scales_ptr, tokens, there, inside, slot, part, source, num_tokens, num_out,
                ROWS, RANKS, MAX_RANK, PARTS, STRETCHES, OUTS, False,
            )  # fmt: skip
            at = out_ptr + tokens[:, None] * num_out + source + outs[None, :]
            mask = there[:, None] & inside[None, :]
            value = tl.load(at, mask=mask, other=0.0).to(tl.float32) + acc
            tl.store(at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_gated(
    low_ptr, up_ptr, blocks_ptr, scales_ptr, order_ptr, tiles_ptr, both_ptr, out_ptr, num_tokens, width,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, STRETCHES: tl.constexpr, OUTS: tl.constexpr,
    ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up of what has columns of gate and up in turn, once up low was added to both; for all tokens."""
    tile, source = tl.program_id(0), tl.program_id(1) * OUTS
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot != -1:
        first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        rows, outs, pairs = tl.arange(0, ROWS), tl.arange(0, OUTS), tl.arange(0, 2 * OUTS)
        there, inside = rows < count, source + outs < width
        tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
        of_gate = _raised(
            low_ptr, up_ptr, blocks_ptr, scales_ptr, tokens, there, inside, slot, 0, source, num_tokens, 2 * width,
            ROWS, RANKS, MAX_RANK, 2, STRETCHES, OUTS, True,
        )  # fmt: skip
        of_up = _raised(
            low_ptr, up_ptr, blocks_ptr, scales_ptr, tokens, there, inside, slot, 1, source, num_tokens, 2 * width,
            ROWS, RANKS, MAX_RANK, 2, STRETCHES, OUTS, True,
        )  # fmt: skip
        at = both_ptr + tokens[:, None] * 2 * width + (2 * source + pairs)[None, :]
        both = tl.load(at, mask=there[:, None] & (2 * source + pairs < 2 * width)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(both.to(tl.float32), (ROWS, OUTS, 2)))
        gate = (gate + of_gate).to(both.dtype).to(tl.float32)  # of rounded values, as if they had been stored in between
        up = (up + of_up).to(both.dtype).to(tl.float32)
        value = activated(gate, ACT) * up
        where = out_ptr + tokens[:, None] * width + (source + outs)[None, :]
        tl.store(where, value.to(out_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def find_low_rank(
    places_ptr, slots_ptr, ends_ptr, m, n, num_rows, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, PARTS: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """What `add_low_rank` needs and the host has written, so that it is there before the products are: of each row of a tile the
    place of its slot and its slot, of each column its part; and blocks of ranks, the first and the last place and part."""
    rows, columns = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
    places = tl.load(places_ptr + rows, mask=rows < num_rows, other=_NO_SLOT)
    has_one = places < _NO_SLOT
    slots = tl.load(slots_ptr + 1 + places, mask=has_one, other=0)
    parts = columns % PARTS
    if not IS_GATED:
        parts = tl.zeros_like(columns)
        for part in tl.static_range(1, PARTS):
            parts += (columns >= tl.load(ends_ptr + part)).to(tl.int32)
    first, last = tl.min(places, 0), tl.max(tl.where(has_one, places, -1), 0)
    return places, slots, parts, tl.load(slots_ptr), first, last, tl.min(parts, 0), tl.max(parts, 0)


@triton.jit
def add_low_rank(
    acc, found, slots_ptr, low_ptr, up_ptr, blocks_ptr, scales_ptr, m, n, num_rows, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr,
    STRETCHES: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """acc += up low of each row's adapter, for a tile of a matmul. What is added to rows of another adapter is zero, which
    changes no sum."""
    places, slots, parts, num_blocks, first, last, first_part, last_part = found
    rows, columns = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
    ranks, ks = tl.arange(0, RANKS), tl.arange(0, SIDE_BY_SIDE * RANKS)
    has_one = places < _NO_SLOT
    for part in tl.range(first_part, last_part + 1, num_stages=1):
        blocks = tl.load(blocks_ptr + slots * PARTS + part, mask=has_one, other=0)
        scales = tl.load(scales_ptr + slots * PARTS + part, mask=has_one, other=0.0)
        for block in tl.range(0, num_blocks, num_stages=1):
            low = tl.zeros((ROWS, RANKS), tl.float32)
            for stretch in tl.static_range(STRETCHES):
                where = ((stretch * num_rows + rows).to(tl.int64) * PARTS + part) * MAX_RANK + block * RANKS
                low += tl.load(low_ptr + where[:, None] + ranks[None, :], mask=has_one[:, None], other=0.0)
            scaled = tl.where((block < blocks)[:, None], low * scales[:, None], 0.0).to(up_ptr.dtype.element_ty)
            for place in tl.range(first, last + 1, SIDE_BY_SIDE, num_stages=2):
                places_of_ks = place + ks // RANKS
                slots_of_ks = tl.load(slots_ptr + 1 + places_of_ks, mask=places_of_ks <= last, other=0)
                up = up_ptr + (slots_of_ks * MAX_RANK + block * RANKS + ks % RANKS)[:, None].to(tl.int64) * num_out
                there = (places_of_ks <= last)[:, None] & (columns < num_out)[None, :]
                values = tl.load(up + columns[None, :], mask=there, other=0.0)
                if PARTS > 1:
                    values = tl.where((parts == part)[None, :], values, tl.zeros_like(values))
                own = places[:, None] == (place + tl.arange(0, SIDE_BY_SIDE))[None, :]
                own_low = tl.where(own[:, :, None], scaled[:, None, :], tl.zeros_like(scaled)[:, None, :])
                acc = tl.dot(tl.reshape(own_low, (ROWS, SIDE_BY_SIDE * RANKS)), values, acc)
    return acc


class Lists(Protocol):
    """The lists of a step with so many tokens: their order, those without an adapter last; tiles as slot + 1 (-1: without), first
    and count, zeros after the last. And the place of each token's slot among those of the step, or NO_SLOT; and
    the most blocks of ranks that one of these slots has, then the slots."""

    def lists(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """What a matmul adds: pointers and constants of `add_low_rank`."""

    tensors: tuple[torch.Tensor, ...]
    constants: dict[str, Any]


NO_LOW_RANK: Final = {"PARTS": 0, "STRETCHES": 0, "MAX_RANK": 0, "RANKS": RANKS, "SIDE_BY_SIDE": 1}


class CudaLora(LinearLora):
    """`act`: of a gated layer, whose outputs are those of its two parts in turn."""

    def __init__(
        self, num_in: int, outs: Mapping[str, int], lists: Lists, num_slots: int, max_rank: int, act: str, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._lists, self._outs, self._act = lists, dict(outs), act
        self._max_rank = triton.cdiv(max_rank, RANKS) * RANKS
        ends = list(accumulate(outs.values()))
        self._columns_of = {name: slice(end - outs[name], end) for name, end in zip(outs, ends, strict=True)}
        if act:
            self._columns_of = {name: slice(part, None, 2) for part, name in enumerate(outs)}
        self._down = torch.zeros(num_slots, len(outs), self._max_rank, num_in, dtype=dtype, device=device)
        self._up = torch.zeros(num_slots, self._max_rank, ends[-1], dtype=dtype, device=device)
        self._blocks = torch.zeros(num_slots, len(outs), dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, len(outs), dtype=torch.float32, device=device)
        columns = [
            [part, first, min(_OUTS, end - first)]
            for part, end in enumerate(ends)
            for first in range(end - list(outs.values())[part], end, _OUTS)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int32, device=device)
        self._ends = torch.tensor([0, *ends], dtype=torch.int32, device=device)

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """On the current stream: after the steps that were launched."""
        blocks, scales = [0] * len(self._outs), [0.0] * len(self._outs)
        for part, name in enumerate(self._outs):
            pair = pairs.get(name)
            if pair is None:
                continue
            rank = pair.down_RK.shape[0]
            blocks[part], scales[part] = triton.cdiv(rank, RANKS), pair.scale
            down = self._down[slot, part, : blocks[part] * RANKS]
            up = self._up[slot, : blocks[part] * RANKS, self._columns_of[name]]
            down[rank:].zero_()
            up[rank:].zero_()
            down[:rank].copy_(pair.down_RK)
            up[:rank].copy_(pair.up_NR.to(up.device).t())
        self._blocks[slot].copy_(torch.tensor(blocks, dtype=torch.int32, device="cpu"))
        self._scales[slot].copy_(torch.tensor(scales, dtype=torch.float32, device="cpu"))

    def _shrunk(self, x_TK: torch.Tensor, is_whole: bool, how: dict[str, Any]) -> torch.Tensor:
        """By stretch, token and part."""
        (num_tokens, num_in), num_parts = x_TK.shape, len(self._outs)
        order, tiles = self._lists.lists(num_tokens)
        num_stretches = 1 if is_whole else triton.cdiv(num_in, _STRETCH)
        low = x_TK.new_empty(num_stretches, num_tokens, num_parts, self._max_rank, dtype=torch.float32)
        launch(
            _shrink, (tiles.numel() // 3, num_stretches, num_parts),
            x_TK, self._down, self._blocks, order, tiles, low, num_tokens, num_in, ROWS=ROWS, RANKS=RANKS,
            MAX_RANK=self._max_rank, PARTS=num_parts, STRETCH=_STRETCH, WHOLE=is_whole, INS=_INS, num_warps=2, num_stages=4,
            **how,
        )  # fmt: skip
        return low

    def low_rank(self, x_TK: torch.Tensor) -> LowRank:
        """For the matmul that is launched next: it begins beside the kernel that is launched here, which has waited for x."""
        num_tokens = x_TK.shape[0]
        low = self._shrunk(x_TK, num_tokens > _MOST_IN_STRETCHES, EARLY)
        tensors = (*self._lists.places(num_tokens), low, self._up, self._blocks, self._scales, self._ends)
        constants = {"PARTS": len(self._outs), "STRETCHES": low.shape[0], "MAX_RANK": self._max_rank, "RANKS": RANKS}
        return LowRank(tensors, constants | {"SIDE_BY_SIDE": _SIDE_BY_SIDE if num_tokens <= _FEW else 1})

    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor) -> torch.Tensor | None:
        num_tokens, num_out = y_TN.shape
        low = self._shrunk(x_TK, False, HOW)
        order, tiles = self._lists.lists(num_tokens)
        given = (low, self._up, self._blocks, self._scales, order, tiles)
        # Most adapters have one block of ranks: there is no next one to load ahead.
        how = {
            "STRETCHES": low.shape[0], "OUTS": _OUTS, "ROWS": ROWS, "RANKS": RANKS, "MAX_RANK": self._max_rank, "num_warps": 4,
            "num_stages": 1, **HOW,
        }  # fmt: skip
        num_tiles = tiles.numel() // 3
        if not self._act:
            grid = (num_tiles, self._columns.shape[0])
            launch(_expand, grid, *given, self._columns, y_TN, num_tokens, num_out, PARTS=len(self._outs), **how)
            return None
        out = y_TN.new_empty(num_tokens, num_out // 2)
        grid = (num_tiles, triton.cdiv(num_out // 2, _OUTS))
        launch(_expand_gated, grid, *given, y_TN, out, num_tokens, num_out // 2, ACT=self._act, **how)
        return out
