"""Sums over ranks and gathers, through memory that every rank's kernels read directly.

A rank writes its part of a message into memory of its own, tells the others, waits for them, then
reads all parts, in the order of ranks: every rank computes the same bits. A program takes pieces of
the message in turns, and waits only for the programs that have the same pieces at other ranks; it
counts its turns, and a turn's count is what ranks tell each other. Memory is there twice: who tells
turn n has read all of turn n - 1, so turn n + 1 may overwrite it.

Until `begin`, turns are not counted, so nobody waits for anybody, and sums are of whatever is
there: a rank loads kernels and allocates memory meanwhile, which may have to wait for kernels of
others that would be waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch

# few enough for ranks that share a GPU to be on it at the same time
PIECE_BYTES, MOST_PROGRAMS = 16384, 128
_FLAG_BYTES = 8  # a turn's count


def memory_bytes(num_ranks: int) -> int:
    """The memory of a rank: its pieces, twice, then what each rank told each program."""
    return flags_offset() + MOST_PROGRAMS * num_ranks * _FLAG_BYTES


def flags_offset() -> int:
    return MOST_PROGRAMS * 2 * PIECE_BYTES


@triton.jit
def _mine(table_ptr, rank: tl.constexpr, like_ptr):
    return tl.multiple_of(tl.load(table_ptr + rank).to(like_ptr.dtype), 16)


@triton.jit
def _exchange(
    piece,
    mask,
    offsets,
    turn,
    table_ptr,
    like_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Show a piece to all, wait for theirs. Where they are in each rank's memory."""
    pid = tl.program_id(0)
    place = (turn % 2).to(tl.int32) * PROGRAMS * BLOCK + pid * BLOCK + offsets
    tl.store(_mine(table_ptr, RANK, like_ptr) + place, piece, mask=mask)
    tl.debug_barrier()
    for rank in tl.static_range(SIZE):
        flags_ptr = (
            tl.load(table_ptr + rank).to(tl.pointer_type(tl.int64)) + PROGRAMS * 2 * PIECE // 8
        )
        tl.atomic_xchg(flags_ptr + pid * SIZE + RANK, turn, sem="release", scope="sys")
    own_ptr = (
        tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int64))
        + PROGRAMS * 2 * PIECE // 8
        + pid * SIZE
    )
    for rank in tl.static_range(SIZE):
        told = tl.atomic_add(own_ptr + rank, 0, sem="acquire", scope="sys")
        while told < turn:
            told = tl.atomic_add(own_ptr + rank, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return place


@triton.jit
def _all_reduce(
    x_ptr,
    out_ptr,
    table_ptr,
    turns_ptr,
    live_ptr,
    num,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Sum over ranks. Reference: `cuda.collectives.all_reduce_reference`."""
    begin(AHEAD)
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    turn, live = tl.load(turns_ptr + pid), tl.load(live_ptr)
    for first in range(pid * BLOCK, num, PROGRAMS * BLOCK):
        turn += live
        mask = first + offsets < num
        piece = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
        place = _exchange(
            piece, mask, offsets, turn, table_ptr, x_ptr, RANK, SIZE, BLOCK, PROGRAMS, PIECE
        )
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            theirs_ptr = _mine(table_ptr, rank, x_ptr)
            total += tl.load(theirs_ptr + place, mask=mask, other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
        tl.store(out_ptr + first + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(turns_ptr + pid, turn)


@triton.jit
def _all_gather(
    x_ptr,
    out_ptr,
    table_ptr,
    turns_ptr,
    live_ptr,
    starts_ptr,
    num_rows,
    widest,
    stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIECE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`starts`: the column where each rank's begin, and where the last one's end.
    Reference: `torch.cat`."""
    begin(AHEAD)
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    turn, live = tl.load(turns_ptr + pid), tl.load(live_ptr)
    width = tl.load(starts_ptr + RANK + 1) - tl.load(starts_ptr + RANK)
    for first in range(pid * BLOCK, num_rows * widest, PROGRAMS * BLOCK):
        turn += live
        mask = first + offsets < num_rows * width
        piece = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
        place = _exchange(
            piece, mask, offsets, turn, table_ptr, x_ptr, RANK, SIZE, BLOCK, PROGRAMS, PIECE
        )
        for rank in tl.static_range(SIZE):
            start = tl.load(starts_ptr + rank)
            theirs = tl.load(starts_ptr + rank + 1) - start
            index = first + offsets
            is_there = index < num_rows * theirs
            values = tl.load(
                _mine(table_ptr, rank, x_ptr) + place,
                mask=is_there,
                other=0.0,
                cache_modifier=".cg",
            )
            row, column = index // theirs, index % theirs
            tl.store(out_ptr + row.to(tl.int64) * stride + start + column, values, mask=is_there)
    tl.store(turns_ptr + pid, turn)


@triton.jit
def _add_parts(
    parts_ptr, out_ptr, num, SIZE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """Sum over ranks. Reference: `cuda.collectives.all_reduce_reference`."""
    begin(AHEAD)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(SIZE):
        total += tl.load(parts_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        parts_ptr += num
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_parts(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The sum that `Exchange.all_reduce` computes, bit for bit, of parts that are here already:
    [ranks, ...]. Launched after a library's kernel, so as an ordinary dependent."""
    block = 1024
    grid = (triton.cdiv(out.numel(), block),)
    launch(_add_parts, grid, parts, out, out.numel(), SIZE=parts.shape[0], BLOCK=block, AHEAD=0)
    return out


class Exchange:
    """A rank's end. `table`: the address of each rank's memory (see `memory_bytes`), on the device,
    all zeros at first."""

    def __init__(self, rank: int, size: int, table: torch.Tensor) -> None:
        self.rank, self.size, self._table = rank, size, table
        self._turns = torch.zeros(MOST_PROGRAMS, dtype=torch.int64, device=table.device)
        self._live = torch.zeros(1, dtype=torch.int64, device=table.device)
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}

    def begin(self) -> None:
        self._live.fill_(1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        assert x.is_contiguous()
        block = PIECE_BYTES // x.element_size()
        grid = (min(MOST_PROGRAMS, triton.cdiv(x.numel(), block)),)
        launch(
            _all_reduce,
            grid,
            x,
            x,
            self._table,
            self._turns,
            self._live,
            x.numel(),
            **self._how(block),
        )
        return x

    def all_gather(self, x_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Side by side: rank r has widths[r] columns."""
        assert x_TN.is_contiguous()
        assert x_TN.shape[1] == widths[self.rank]
        out = x_TN.new_empty(x_TN.shape[0], sum(widths))
        block = PIECE_BYTES // x_TN.element_size()
        grid = (min(MOST_PROGRAMS, triton.cdiv(x_TN.shape[0] * max(widths), block)),)
        numbers = x_TN.shape[0], max(widths), out.shape[1]
        launch(
            _all_gather,
            grid,
            x_TN,
            out,
            self._table,
            self._turns,
            self._live,
            self.starts(widths),
            *numbers,
            **self._how(block),
        )
        return out

    def starts(self, widths: Sequence[int]) -> torch.Tensor:
        """Kept on the device: none can be made while a graph is captured."""
        key = tuple(widths)
        if key not in self._starts:
            ends = [sum(key[:i]) for i in range(len(key) + 1)]
            self._starts[key] = torch.tensor(ends, dtype=torch.int32, device=self._table.device)
        return self._starts[key]

    def _how(self, block: int) -> dict[str, int | bool]:
        sizes = {
            "RANK": self.rank,
            "SIZE": self.size,
            "BLOCK": block,
            "PROGRAMS": MOST_PROGRAMS,
            "PIECE": PIECE_BYTES,
        }
        return {**sizes, "num_warps": 8, **HOW}


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums in float32, in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
