"""scale · up (down x) with the pair of each row's adapter, on the GPU, for any number of adapters
in a step.

Tokens are in order of their adapters' slots, in tiles of one slot each (kernels/lora.py); the host
writes both lists before the step. The first kernel multiplies by the low-rank matrices down, in
stretches of K that end at fixed places; the last program of a tile to finish adds the stretches up
in their order. The second kernel multiplies by the matrices up. Ranks go in blocks of 16: a slot's
memory is for the highest rank, and of its matrices only what its adapter has is read. A token's
bits depend on the token and its adapter alone.

What is added is rounded to bfloat16, and added to a rounded product: so it makes no difference what
multiplies, nor who adds, and the matmul is the one of a step without adapters. It runs beside these
kernels, which have a stream of their own in the step's CUDA graph. The kernel behind both adds: the
norm or the one that rotates q and k, where that is all that reads the result; else the second
kernel itself follows the matmul; that of a gated layer activates, too, and multiplies what it has
made by the matrices down of the linear behind it, in runs of columns that a third kernel adds up.
Programs of a matmul take a whole multiprocessor each, so these kernels have few, to leave it most
of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, Final, Protocol

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.glu import gated
from tidemill.kernels.cuda.launch import FEW, begin, how, launch
from tidemill.kernels.handover import Place
from tidemill.kernels.linear import Weight
from tidemill.kernels.lora import LinearLora, Pair
from tidemill.kernels.pending import PendingLora

RANKS: Final = 16  # of a block
_STRETCH, _MOST_STRETCHES, _INS = 512, 4, 128
_STAGES = {16: 8, 32: 6}  # by columns, so that about 60 KB are on their way to a program
# columns that a program of the second kernel has: in steps of a few tokens, and of more
_RUNS = 128, 512
# tokens of a step with small tiles. One of `gemm.CHOICES`, at which kernels may change
SMALL_TILES_UP_TO = 256
# columns that a program behind gate and up has, at all sizes of steps: so sums end at the same
# places
_GATED_RUN = 256
# by the rows of a tile: columns at a time. GPUs add 16 products at a time anyway
GATED = {16: 64, 64: 32}
_MOST_BEHIND = 64  # ranks of the linear behind it, for which a program has sums


def rows_of_tile(num_tokens: int) -> int:
    """In a step of so many: a step of many is mostly prompts, which fill larger ones."""
    return 16 if num_tokens <= SMALL_TILES_UP_TO else 64


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x_ptr, down_ptr, blocks_ptr, scales_ptr, order_ptr, tiles_ptr, done_ptr, partial_ptr, low_ptr, num_tokens, num_in,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, INS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """low[token, part] = scale · down x. Columns are a block of ranks of each part, side by side.
    Reference: `lora.TorchLora`."""
    tile, stretch = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot >= 0:
        first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        rows, columns, ins = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INS)
        part, there = columns // RANKS, rows < count
        blocks = tl.load(blocks_ptr + slot * PARTS + part, mask=part < PARTS, other=0)
        num_blocks = tl.max(blocks, 0)
        tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
        x = x_ptr + tokens[:, None] * num_in
        ranks = part * MAX_RANK + columns % RANKS
        at = tokens[:, None] * (PARTS * MAX_RANK) + ranks[None, :]
        # the next stretch
        partial, behind = partial_ptr + at, num_tokens.to(tl.int64) * (PARTS * MAX_RANK)
        begins = stretch * STRETCH
        ends = min(begins + STRETCH, num_in)
        for block in range(num_blocks):
            has_block = block < blocks
            down = down_ptr + (slot * (PARTS * MAX_RANK) + ranks + block * RANKS)[None, :] * num_in
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(begins, ends, INS):
                a = tl.load(
                    x + (k + ins)[None, :],
                    mask=there[:, None] & (k + ins < ends)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    down + (k + ins)[:, None],
                    mask=has_block[None, :] & (k + ins < ends)[:, None],
                    other=0.0,
                )
                acc = tl.dot(a, b, acc)
            tl.store(
                partial + stretch * behind + block * RANKS,
                acc,
                mask=there[:, None] & has_block[None, :],
            )
        tl.debug_barrier()
        if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel", scope="gpu") == STRETCHES - 1:
            tl.store(done_ptr + tile, 0)
            scales = tl.load(scales_ptr + slot * PARTS + part, mask=part < PARTS, other=0.0)
            for block in range(num_blocks):
                mask = there[:, None] & (block < blocks)[None, :]
                total = tl.zeros((ROWS, COLUMNS), tl.float32)
                for i in tl.static_range(STRETCHES):
                    total += tl.load(partial + i * behind + block * RANKS, mask=mask, other=0.0)
                tl.store(
                    low_ptr + at + block * RANKS,
                    (total * scales[None, :]).to(low_ptr.dtype.element_ty),
                    mask=mask,
                )


@triton.jit
def _expand(
    low_ptr, up_ptr, blocks_ptr, order_ptr, tiles_ptr, columns_ptr, y_ptr, out_ptr, num_out,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, OUTS: tl.constexpr, UNIT: tl.constexpr,
    ONTO: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = up low, or ONTO: y += up low, for a tile and a run of columns of one part. A record of
    columns: part, first, number; the latter in units, so that whole vectors are read and written.
    Without an adapter, what is added is -0, which changes no sum, of zeros neither. Reference:
    `lora.TorchLora`."""
    tile, record = tl.program_id(0), columns_ptr + tl.program_id(1) * 3
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    part, source, num = tl.load(record), tl.load(record + 1) * UNIT, tl.load(record + 2) * UNIT
    rows, ranks, outs = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, OUTS)
    there = rows < count
    kind = out_ptr.dtype.element_ty
    tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
    num_blocks = tl.load(blocks_ptr + slot * PARTS + part, mask=slot >= 0, other=0)
    if ONTO:
        there = there & (rows < num_blocks * ROWS)  # else nothing is added
    up = up_ptr + (slot * MAX_RANK + ranks)[:, None] * num_out + (source + outs)[None, :]
    low = low_ptr + ((tokens * PARTS + part) * MAX_RANK)[:, None] + ranks[None, :]
    b = tl.load(up, mask=(ranks < num_blocks * RANKS)[:, None] & (outs < num)[None, :], other=0.0)
    begin(AHEAD)
    for start in tl.range(0, tl.where(count > 0, num, 0), OUTS, num_stages=1):
        at = tokens[:, None] * num_out + (source + start + outs)[None, :]
        mask = there[:, None] & (start + outs < num)[None, :]
        if ONTO:
            y = tl.load(y_ptr + at, mask=mask, other=0.0)
        acc = tl.full((ROWS, OUTS), -0.0, tl.float32)
        for block in tl.range(num_blocks, num_stages=1):
            a = tl.load(low + block * RANKS, mask=there[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
            is_last = block + 1 == num_blocks  # then the next is the first of the next columns
            next_block, next_start = (
                tl.where(is_last, 0, block + 1),
                tl.where(is_last, start + OUTS, start),
            )
            b = tl.load(
                up + next_block * RANKS * num_out + next_start,
                mask=(next_start + outs < num)[None, :],
                other=0.0,
            )
        if ONTO:
            acc = y.to(tl.float32) + acc.to(kind).to(tl.float32)
        tl.store(out_ptr + at, acc.to(kind), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_gated(
    low_ptr, up_ptr, blocks_ptr, order_ptr, tiles_ptr, y_ptr, out_ptr, num_out,
    behind_ptr, behind_blocks_ptr, behind_scales_ptr, partial_ptr, num_tokens,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, OUTS: tl.constexpr,
    BEHIND: tl.constexpr, WIDTH: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out = act(y + up low) for a tile and a run of columns. Those of y are of gate and up in turn,
    those of the matrices up side by side. BEHIND, the highest rank of the linear behind it (WIDTH:
    a power of two): partial[run, token] = scale · down out, of these columns. Nothing else runs
    meanwhile, so all operands are fetched one round before they are needed. Reference:
    `lora.TorchLora`."""
    tile, source = tl.program_id(0), tl.program_id(1) * RUN
    num = min(RUN, num_out - source)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    rows, ranks, outs, both = (
        tl.arange(0, ROWS),
        tl.arange(0, RANKS),
        tl.arange(0, OUTS),
        tl.arange(0, 2 * OUTS),
    )
    there = rows < count
    tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
    num_gate = tl.load(blocks_ptr + slot * PARTS, mask=slot >= 0, other=0)
    num_up = tl.load(blocks_ptr + slot * PARTS + 1, mask=slot >= 0, other=0)
    num_blocks = max(num_gate, num_up)
    up = up_ptr + (slot * MAX_RANK + ranks)[:, None] * (PARTS * num_out) + (source + outs)[None, :]
    low = low_ptr + (tokens * (PARTS * MAX_RANK))[:, None] + ranks[None, :]
    y_at = y_ptr + tokens[:, None] * (PARTS * num_out) + (PARTS * source + both)[None, :]
    out_at = out_ptr + tokens[:, None] * num_out + (source + outs)[None, :]
    b_gate = tl.load(
        up, mask=(ranks < num_gate * RANKS)[:, None] & (outs < num)[None, :], other=0.0
    )
    b_up = tl.load(
        up + num_out, mask=(ranks < num_up * RANKS)[:, None] & (outs < num)[None, :], other=0.0
    )
    if BEHIND:
        num_behind = tl.load(behind_blocks_ptr + slot, mask=slot >= 0, other=0) * RANKS
        all_ranks = tl.arange(0, WIDTH)
        behind = (
            behind_ptr + (slot * BEHIND + all_ranks)[None, :] * num_out + (source + outs)[:, None]
        )
        b_behind = tl.load(
            behind, mask=(all_ranks < num_behind)[None, :] & (outs < num)[:, None], other=0.0
        )
        low_behind = tl.zeros((ROWS, WIDTH), tl.float32)
    begin(AHEAD)
    y = tl.load(y_at, mask=there[:, None] & (both < PARTS * num)[None, :], other=0.0)
    a_gate = tl.load(low, mask=there[:, None] & (ranks < num_gate * RANKS)[None, :], other=0.0)
    a_up = tl.load(
        low + MAX_RANK, mask=there[:, None] & (ranks < num_up * RANKS)[None, :], other=0.0
    )
    for start in tl.range(0, tl.where(count > 0, num, 0), OUTS, num_stages=1):
        then = start + OUTS
        y_next = tl.load(
            y_at + PARTS * then,
            mask=there[:, None] & (PARTS * then + both < PARTS * num)[None, :],
            other=0.0,
        )
        if BEHIND:
            mask = (all_ranks < num_behind)[None, :] & (then + outs < num)[:, None]
            next_behind = tl.load(behind + then, mask=mask, other=0.0)
        gate, of_up = (
            tl.full((ROWS, OUTS), -0.0, tl.float32),
            tl.full((ROWS, OUTS), -0.0, tl.float32),
        )
        for block in tl.range(num_blocks, num_stages=1):
            is_last = block + 1 == num_blocks  # then the next is the first of the next columns
            i, columns = tl.where(is_last, 0, block + 1), outs + tl.where(is_last, then, start)
            at, at_low = (
                up + i * RANKS * (PARTS * num_out) + (columns - outs)[None, :],
                low + i * RANKS,
            )
            in_gate, in_up = (
                i * RANKS + ranks < num_gate * RANKS,
                i * RANKS + ranks < num_up * RANKS,
            )
            next_a = tl.load(at_low, mask=there[:, None] & in_gate[None, :], other=0.0)
            next_a_up = tl.load(at_low + MAX_RANK, mask=there[:, None] & in_up[None, :], other=0.0)
            next_b = tl.load(at, mask=in_gate[:, None] & (columns < num)[None, :], other=0.0)
            next_b_up = tl.load(
                at + num_out, mask=in_up[:, None] & (columns < num)[None, :], other=0.0
            )
            gate, of_up = tl.dot(a_gate, b_gate, gate), tl.dot(a_up, b_up, of_up)
            a_gate, a_up, b_gate, b_up = next_a, next_a_up, next_b, next_b_up
        kind = out_ptr.dtype.element_ty
        y_gate, y_up = tl.split(tl.reshape(y, (ROWS, OUTS, 2)))
        gate = (y_gate.to(tl.float32) + gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        of_up = (y_up.to(tl.float32) + of_up.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        made = gated(gate, of_up, ACT).to(kind)
        tl.store(out_at + start, made, mask=there[:, None] & (start + outs < num)[None, :])
        y = y_next
        if BEHIND:
            low_behind = tl.dot(made, b_behind, low_behind)
            b_behind = next_behind
    if BEHIND:
        scale = tl.load(behind_scales_ptr + slot, mask=slot >= 0, other=0.0)
        at = (tl.program_id(1) * num_tokens.to(tl.int64) + tokens)[:, None] * BEHIND + all_ranks[
            None, :
        ]
        tl.store(
            partial_ptr + at,
            low_behind * scale,
            mask=there[:, None] & (all_ranks < num_behind)[None, :],
        )


@triton.jit(do_not_specialize=["num"])
def _add_up(partial_ptr, low_ptr, num, RUNS: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr):
    """low[i] = the sum of partial[run, i], in the order of runs. Ranks that an adapter does not
    have are not read by anyone. Reference: `lora.TorchLora`."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    begin(AHEAD)
    total = tl.zeros((SIZE,), tl.float32)
    for first in tl.range(0, RUNS, 8, num_stages=1):
        for i in tl.static_range(8):
            there = (at < num) & (first + i < RUNS)
            total += tl.load(
                partial_ptr + num.to(tl.int64) * (first + i) + at, mask=there, other=0.0
            )
    tl.store(low_ptr + at, total.to(low_ptr.dtype.element_ty), mask=at < num)


# Of a gated layer's result: scale · down of it by the linear behind, in runs of columns: float32
# [run, T, rank].
PARTIAL: Place[torch.Tensor] = Place()


class Lists(Protocol):
    """The lists of a step with so many tokens: their order, those without an adapter last; tiles as
    slot + 1 (-1: without), first and count, zeros after the last; and as many zeros, which count
    what is done of a tile."""

    side: torch.cuda.Stream | None  # beside the step's

    def lists(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def _wait(side: torch.cuda.Stream | None) -> None:
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


class CudaLora(LinearLora):
    """`act`: of a gated layer. What it activates are outputs of its two parts in turn. `behind`: of
    what reads them."""

    behind: CudaLora | None = None

    def __init__(
        self, num_in: int, outs: Mapping[str, int], lists: Lists, num_slots: int, max_rank: int, act: str,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.lists, self._outs, self._act = lists, dict(outs), act
        self._max_rank = triton.cdiv(max_rank, RANKS) * RANKS
        self._stretch = triton.cdiv(num_in, _STRETCH * _MOST_STRETCHES) * _STRETCH
        ends = list(accumulate(outs.values()))
        self._columns_of = {
            name: slice(end - outs[name], end) for name, end in zip(outs, ends, strict=True)
        }
        self._down = torch.zeros(
            num_slots, len(outs), self._max_rank, num_in, dtype=dtype, device=device
        )
        self._up = torch.zeros(num_slots, self._max_rank, ends[-1], dtype=dtype, device=device)
        self._blocks = torch.zeros(num_slots, len(outs), dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, len(outs), dtype=torch.float32, device=device)
        self._unit = math.gcd(8, *ends)
        self._columns = {
            run: torch.tensor(
                [
                    [part, first // self._unit, min(run, end - first) // self._unit]
                    for part, end in enumerate(ends)
                    for first in range(ends[part - 1] if part else 0, end, run)
                ],
                dtype=torch.int32,
                device=device,
            )
            for run in (() if act else _RUNS)
        }

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

    def adapted(self, x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
        with self._beside():
            low = self._low(x_TK)
        y_TN = weight.matmul(x_TK)
        _wait(self.lists.side)
        return self._expand_gated(low, y_TN) if self._act else self._expand(low, y_TN, y_TN)

    def pending(self, x_TK: torch.Tensor, weight: Weight) -> torch.Tensor | PendingLora:
        if self._act:
            return self.adapted(x_TK, weight)
        with self._beside():
            low = self._low(x_TK)
            added = self._expand(low, None, x_TK.new_empty(x_TK.shape[0], self._up.shape[2]))
        return PendingLora(weight.matmul(x_TK), added, partial(_wait, self.lists.side))

    def _beside(self) -> AbstractContextManager[object]:
        """The stream of these kernels. Memory that is taken on another stream is used again on that
        one only: so it is free by then, as the step's stream waits before it goes on, and that one
        for the step's. Steps with adapters are not halved, so no other lane uses it."""
        side = self.lists.side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)  # None: the current one

    def _low(self, x_TK: torch.Tensor) -> torch.Tensor:
        partial_low = PARTIAL.take(x_TK)
        return self._shrink(x_TK) if partial_low is None else self._add_up(partial_low)

    def _options(self, num_tokens: int) -> dict[str, Any]:
        return {
            "ROWS": rows_of_tile(num_tokens),
            "RANKS": RANKS,
            "MAX_RANK": self._max_rank,
            "PARTS": len(self._outs),
        }

    def _shrink(self, x_TK: torch.Tensor) -> torch.Tensor:
        (num_tokens, num_in), num_parts = x_TK.shape, len(self._outs)
        order, tiles, done = self.lists.lists(num_tokens)
        rows, columns = rows_of_tile(num_tokens), triton.next_power_of_2(num_parts) * RANKS
        num_stretches = triton.cdiv(num_in, self._stretch)
        low = x_TK.new_empty(num_tokens, num_parts, self._max_rank)
        partial = x_TK.new_empty(
            num_stretches, num_tokens, num_parts, self._max_rank, dtype=torch.float32
        )
        launch(
            _shrink, (tiles.numel() // 3, num_stretches),
            x_TK, self._down, self._blocks, self._scales, order, tiles, done, partial, low, num_tokens, num_in,
            COLUMNS=columns, STRETCH=self._stretch, STRETCHES=num_stretches, INS=_INS, num_warps=4 if rows * columns > 256 else 2,
            num_stages=_STAGES.get(columns, 4) if rows == 16 else 3, **self._options(num_tokens), **how(num_tokens),
        )  # fmt: skip
        return low

    def _add_up(self, partial_low: torch.Tensor) -> torch.Tensor:
        num_runs, num_tokens, num_ranks = partial_low.shape
        low, size = self._up.new_empty(num_tokens, num_ranks), 128
        num = low.numel()
        launch(
            _add_up,
            (triton.cdiv(num, size),),
            partial_low,
            low,
            num,
            RUNS=num_runs,
            SIZE=size,
            num_warps=4,
            **how(num_tokens),
        )
        return low

    def _expand(
        self, low: torch.Tensor, y_TN: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """`y_TN`: to which it is added."""
        num_tokens = low.shape[0]
        order, tiles, _ = self.lists.lists(num_tokens)
        columns = self._columns[_RUNS[num_tokens > FEW]]
        launch(
            _expand, (tiles.numel() // 3, columns.shape[0]),
            low, self._up, self._blocks, order, tiles, columns, out if y_TN is None else y_TN, out, self._up.shape[2],
            OUTS=128 if rows_of_tile(num_tokens) == 16 else 64, UNIT=self._unit, ONTO=y_TN is not None, num_warps=4,
            **self._options(num_tokens), **how(num_tokens),
        )  # fmt: skip
        return out

    def _expand_gated(self, low: torch.Tensor, y_TN: torch.Tensor) -> torch.Tensor:
        num_tokens, num_out = y_TN.shape[0], y_TN.shape[1] // 2
        order, tiles, _ = self.lists.lists(num_tokens)
        num_runs = triton.cdiv(num_out, _GATED_RUN)
        made = out = y_TN.new_empty(num_tokens, num_out)
        behind, num_behind = self, 0
        if self.behind is not None and self.behind._max_rank <= _MOST_BEHIND:
            behind, num_behind = self.behind, self.behind._max_rank
            made = out.new_empty(num_runs, num_tokens, num_behind, dtype=torch.float32)
        launch(
            _expand_gated, (tiles.numel() // 3, num_runs),
            low, self._up, self._blocks, order, tiles, y_TN, out, num_out,
            behind._down, behind._blocks, behind._scales, made, num_tokens,
            RUN=_GATED_RUN, OUTS=GATED[rows_of_tile(num_tokens)], BEHIND=num_behind, WIDTH=triton.next_power_of_2(num_behind),
            ACT=self._act, num_warps=4, **self._options(num_tokens), **how(num_tokens),
        )  # fmt: skip
        if num_behind:
            PARTIAL.put(out, made)
        return out
