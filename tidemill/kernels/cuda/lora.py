"""y += scale · up (down x) with the pair of each row's adapter, on the GPU: two kernels, for any number of adapters in a step.

Tokens are in order of their adapters' slots, in tiles of one slot each (kernels/lora.py); the host writes both lists before the
step. The first kernel multiplies by the low-rank matrices down, in a fixed number of stretches of K, so that there is work for
all of the GPU; the second adds the stretches up in their order, and multiplies by the matrices up. Ranks go in blocks of 16: a
slot's memory is for the highest rank, and only what its adapter has is read. A token's bits depend on the token and its adapter
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.lora import LinearLora, Pair

ROWS: Final = 16  # of a tile
RANKS: Final = 16  # of a block
_STRETCHES, _INS, _OUTS = 8, 128, 256


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x_ptr, down_ptr, blocks_ptr, order_ptr, tiles_ptr, low_ptr, num_tokens, num_in, stretch_len,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, INS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """low[stretch, token, part] = down x over a stretch of K."""
    tile, stretch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot >= 0:
        first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        rows, ranks, ins = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, INS)
        there = rows < count
        tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
        begins = stretch * stretch_len
        ends = min(begins + stretch_len, num_in)
        x = x_ptr + tokens[:, None] * num_in
        for block in range(tl.load(blocks_ptr + slot * PARTS + part)):
            down = down_ptr + ((slot * PARTS + part) * MAX_RANK + block * RANKS + ranks)[None, :] * num_in
            acc = tl.zeros((ROWS, RANKS), tl.float32)
            for k in range(begins, ends, INS):
                a = tl.load(x + (k + ins)[None, :], mask=there[:, None] & (k + ins < ends)[None, :], other=0.0)
                b = tl.load(down + (k + ins)[:, None], mask=(k + ins < ends)[:, None], other=0.0)
                acc = tl.dot(a, b, acc)
            where = ((stretch * num_tokens + tokens) * PARTS + part) * MAX_RANK + block * RANKS
            tl.store(low_ptr + where[:, None] + ranks[None, :], acc, mask=there[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    low_ptr, up_ptr, blocks_ptr, scales_ptr, order_ptr, tiles_ptr, columns_ptr, out_ptr, num_tokens, num_out,
    ROWS: tl.constexpr, RANKS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr, STRETCHES: tl.constexpr,
    STRIDE: tl.constexpr, OUTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out += up low, for a tile and some columns of one part. A record of columns: part, first of up, first of out, number."""
    tile, record = tl.program_id(0), columns_ptr + tl.program_id(1) * 4
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64) - 1
    begin(AHEAD)
    if slot >= 0:
        part, source, target, num = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        num_blocks = tl.load(blocks_ptr + slot * PARTS + part)
        if num_blocks > 0:
            first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
            rows, ranks, outs = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, OUTS)
            there, inside = rows < count, outs < num
            tokens = tl.load(order_ptr + first + rows, mask=there, other=0).to(tl.int64)
            scale = tl.load(scales_ptr + slot * PARTS + part)
            acc = tl.zeros((ROWS, OUTS), tl.float32)
            for block in range(num_blocks):
                low = tl.zeros((ROWS, RANKS), tl.float32)
                for stretch in tl.static_range(STRETCHES):
                    where = ((stretch * num_tokens + tokens) * PARTS + part) * MAX_RANK + block * RANKS
                    low += tl.load(low_ptr + where[:, None] + ranks[None, :], mask=there[:, None], other=0.0)
                up = up_ptr + (slot * MAX_RANK + block * RANKS + ranks)[:, None] * num_out + source + outs[None, :]
                b = tl.load(up, mask=inside[None, :], other=0.0)
                acc = tl.dot((low * scale).to(b.dtype), b, acc)
            at = out_ptr + tokens[:, None] * num_out + target + (outs * STRIDE)[None, :]
            mask = there[:, None] & inside[None, :]
            value = tl.load(at, mask=mask, other=0.0).to(tl.float32) + acc
            tl.store(at, value.to(out_ptr.dtype.element_ty), mask=mask)


class Lists(Protocol):
    """The lists of a step with so many tokens: their order; tiles as slot + 1, first and count, zeros after the last."""

    def lists(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class CudaLora(LinearLora):
    """`is_gated`: the columns of the output are those of the two parts in turn."""

    def __init__(
        self, num_in: int, outs: Mapping[str, int], lists: Lists, num_slots: int, max_rank: int, is_gated: bool,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._lists, self._parts, self._is_gated = lists, list(outs), is_gated
        self._max_rank = triton.cdiv(max_rank, RANKS) * RANKS
        self._first = dict(zip(outs, [sum(list(outs.values())[:i]) for i in range(len(outs))], strict=True))
        self._outs = dict(outs)
        num_parts, num_out = len(outs), sum(outs.values())
        self._down = torch.zeros(num_slots, num_parts, self._max_rank, num_in, dtype=dtype, device=device)
        self._up = torch.zeros(num_slots, self._max_rank, num_out, dtype=dtype, device=device)
        self._blocks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device)
        self._columns = torch.tensor(self._make_columns(), dtype=torch.int32, device=device)

    def _make_columns(self) -> list[list[int]]:
        made = []
        for part, (name, size) in enumerate(self._outs.items()):
            for begin_at in range(0, size, _OUTS):
                source = self._first[name] + begin_at
                target = begin_at * len(self._outs) + part if self._is_gated else source
                made.append([part, source, target, min(_OUTS, size - begin_at)])
        return made

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """On the current stream: after the steps that were launched."""
        blocks, scales = [0] * len(self._parts), [0.0] * len(self._parts)
        for part, name in enumerate(self._parts):
            pair = pairs.get(name)
            if pair is None:
                continue
            rank = pair.down_RK.shape[0]
            blocks[part], scales[part] = triton.cdiv(rank, RANKS), pair.scale
            columns = slice(self._first[name], self._first[name] + self._outs[name])
            down, up = self._down[slot, part, : blocks[part] * RANKS], self._up[slot, : blocks[part] * RANKS, columns]
            down[rank:].zero_()
            up[rank:].zero_()
            down[:rank].copy_(pair.down_RK)
            up[:rank].copy_(pair.up_NR.to(up.device).t())
        self._blocks[slot].copy_(torch.tensor(blocks, dtype=torch.int32, device="cpu"))
        self._scales[slot].copy_(torch.tensor(scales, dtype=torch.float32, device="cpu"))

    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor) -> None:
        (num_tokens, num_in), num_out, num_parts = x_TK.shape, y_TN.shape[1], len(self._parts)
        order, tiles = self._lists.lists(num_tokens)
        num_tiles = tiles.numel() // 3
        low = x_TK.new_empty(_STRETCHES, num_tokens, num_parts, self._max_rank, dtype=torch.float32)
        stretch_len = triton.cdiv(triton.cdiv(num_in, _STRETCHES), _INS) * _INS
        shape = {"ROWS": ROWS, "RANKS": RANKS, "MAX_RANK": self._max_rank, "PARTS": num_parts, **HOW}
        launch(
            _shrink, (num_tiles, triton.cdiv(num_in, stretch_len), num_parts),
            x_TK, self._down, self._blocks, order, tiles, low, num_tokens, num_in, stretch_len,
            INS=_INS, num_warps=2, num_stages=4, **shape,
        )  # fmt: skip
        launch(
            _expand, (num_tiles, self._columns.shape[0]),
            low, self._up, self._blocks, self._scales, order, tiles, self._columns, y_TN, num_tokens, num_out,
            STRETCHES=triton.cdiv(num_in, stretch_len), STRIDE=num_parts if self._is_gated else 1, OUTS=_OUTS,
            num_warps=4, **shape,
        )  # fmt: skip
