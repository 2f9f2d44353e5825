"""Layers with a state of constant size on a GPU: convolution and recurrence over states in pages
(kernels/state.py).

Every token is computed by the same operations in the same order, by one warp for a sequence, head
and tile of columns: neither batches nor chunks change a bit. A prompt is therefore as slow as its
tokens one after the other. (Matmuls over chunks of tokens would sum in another order than a token
alone does: decoding would have to compute its chunk anew, up to 64 times the work, or bits would
depend on how a prompt is cut.) So that a token takes as little as possible, a head is cut into many
tiles, nothing crosses warps, the next token is made ready meanwhile, and the inputs of two more are
on their way. What the kernel before does not write (lists, page tables, states) is read before it
is done.

The host lists the step's sequences as records of `kernels/cuda/records.py`. A program takes every
n-th of them until a zero, so that a captured graph serves any number of sequences. Segments follow
from positions; the convolution needs only rows and positions of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.cuda.records import (
    CHAIN_POSITION,
    CHAIN_ROW,
    CHAIN_TOKEN,
    CHAIN_TOKENS,
    CHAIN_WIDTH,
    STATES,
)
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights
from tidemill.types.model_config import STATE_KINDS, StateSpec

_CHANNELS = 1024  # of a program of the convolution
# values of a state that a warp holds, and columns of a program
_TILE, _FEWEST_COLUMNS, _MOST_COLUMNS = 2048, 16, 32


@dataclass(slots=True)
class StateLists:
    """A step's tokens and its list of sequences, on the device."""

    rows_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32
    # int32: a header that says where the list is; it ends in `num_chains` records of zeros
    words: torch.Tensor
    num_chains: int  # sequences that are computed side by side


@triton.jit
def _softplus(x):
    """log(1 + e^x), with what the sum rounds off added again."""
    power = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + power
    return tl.where(x > 20.0, x, tl.log(u) + (power - (u - 1.0)) / u)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _place(tables_ptr, pieces_ptr, number, row, block, table_width, table_stride, page_words):
    """The place of a piece, in words; a multiple of 64 bytes."""
    page, offset = tl.load(pieces_ptr + 2 * number), tl.load(pieces_ptr + 2 * number + 1)
    held = tl.load(tables_ptr + page * table_stride + row * table_width + block).to(tl.int64)
    return tl.multiple_of(held * page_words + offset // 4, 16)


@triton.jit
def _convolve(
    projected_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, tables_ptr, pieces_ptr, rows_ptr, positions_ptr,
    num_channels, num_projected, table_width, table_stride, page_words,
    INTERVAL: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK channels. Of the tokens before it, `num_near` are in the step; those before
    them are in its state. TAPS: KERNEL, to a power of two. Reference: `state.TorchStates`."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, TAPS)[:, None]
    inside = (tap < KERNEL) & (channel < num_channels)[None, :]
    weight = tl.load(weight_ptr + tap * num_channels + channel[None, :], mask=inside, other=0.0)
    row, position = tl.load(rows_ptr + token), tl.load(positions_ptr + token)
    num_near = 0
    for back in tl.static_range(1, KERNEL):
        before = tl.maximum(token - back, 0)
        is_near = (tl.load(rows_ptr + before) == row) & (
            tl.load(positions_ptr + before) == position - back
        )
        num_near += (is_near & (token >= back)).to(tl.int32)
    start = position - num_near
    kept = _place(
        tables_ptr,
        pieces_ptr,
        0,
        row,
        tl.maximum(start - 1, 0) // INTERVAL,
        table_width,
        table_stride,
        page_words,
    )
    back = KERNEL - 1 - tap
    is_old = inside & (back > num_near)
    x = tl.load(
        pool_ptr + kept + (tap + num_near) * num_channels + channel[None, :],
        mask=is_old & (tap * 0 + start > 0),
        other=0.0,
    )
    begin(AHEAD)
    new = projected_ptr + (token - back).to(tl.int64) * num_projected + channel[None, :]
    x += tl.load(new, mask=inside & (back <= num_near), other=0.0).to(tl.float32)
    total = tl.sum(x * weight, 0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=channel < num_channels, other=0.0)
    out = out_ptr + token.to(tl.int64) * num_channels + channel
    tl.store(out, _silu(total).to(out_ptr.dtype.element_ty), mask=channel < num_channels)


@triton.jit
def _inputs(
    mixed_ptr, projected_ptr, steps_ptr, bc_ptr, token, head, own, here, n, real, num_channels, num_projected, num_heads,
    DIM: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A token's value, key, query, time step, strength and gate as they are stored; a value where
    there is no such thing."""
    token = token.to(tl.int64)
    inner = num_heads * DIM
    mixed, more = (
        mixed_ptr + token * num_channels,
        projected_ptr + token * num_projected + num_channels,
    )
    value = tl.load(mixed + own, mask=here, other=0.0)
    gate, strength = value, value
    if GATED:
        gate = tl.load(more + own, mask=here, other=0.0)
    if KIND == 0:
        key = tl.load(bc_ptr + token * 2 * SIZE + n, mask=real, other=0.0)
        query = tl.load(bc_ptr + token * 2 * SIZE + SIZE + n, mask=real, other=0.0)
        step = tl.load(steps_ptr + token * inner + own, mask=here, other=0.0)
    else:
        keys = mixed + inner + head // (num_heads // GROUPS) * SIZE + n
        key = tl.load(keys, mask=real, other=0.0)
        query = tl.load(keys + GROUPS * SIZE, mask=real, other=0.0)
        step = tl.load(more + inner + head)
        if KIND == 2:
            strength = tl.load(more + inner + num_heads + head)
    return value, key, query, step, strength, gate


@triton.jit
def _ready(
    value,
    key,
    query,
    step,
    strength,
    gate,
    decays,
    bias,
    scale,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
):
    """The inputs of a token's update of a state: value, key, query, what the state is multiplied
    by, what is written, gate."""
    x, k, q, dt, gate = (
        value.to(tl.float32),
        key.to(tl.float32),
        query.to(tl.float32),
        step.to(tl.float32),
        gate.to(tl.float32),
    )
    if KIND == 0:
        dt = _softplus(dt)
        shrink, written = tl.exp(dt[None, :] * decays), x * dt
    else:
        dt = _softplus(dt + bias)
        shrink, written = tl.exp(dt * decays), x * dt
    if KIND == 2:
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * scale
        written = x * 0.0 + 1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))
    if GATED:
        gate = _silu(gate)
    return x, k, q, shrink, written, gate


@triton.jit
def _scan(
    mixed_ptr, projected_ptr, steps_ptr, bc_ptr, out_ptr, decay_ptr, skip_ptr, step_bias_ptr,
    pool_ptr, tables_ptr, pieces_ptr, words_ptr,
    num_channels, num_projected, num_heads, table_width, table_stride, page_words, scale,
    WORD: tl.constexpr, INTERVAL: tl.constexpr, KERNEL: tl.constexpr, KEPT: tl.constexpr, KEEPS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, HAS_SKIP: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A sequence's tokens one after the other: COLUMNS columns of a head; and KEEPS channels of the
    convolution's state, which nobody reads any more. ROWS: SIZE, to a power of two; KEPT: KERNEL -
    1. KIND: 0 mamba, 1 mamba2, 2 delta. Reference: `state.TorchStates`."""
    head = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, ROWS)
    here, real = column < DIM, n < SIZE
    inside = real[:, None] & here[None, :]
    at = n[:, None] * DIM + column[None, :]
    inner, own = num_heads * DIM, head * DIM + column
    rank = tl.arange(0, KEPT)[:, None]
    channel = ((head * tl.num_programs(0) + tl.program_id(0)) * KEEPS + tl.arange(0, KEEPS))[
        None, :
    ]
    keeps = (rank < KERNEL - 1) & (channel < num_channels)
    if KIND == 0:
        decays, bias = tl.load(decay_ptr + head * SIZE * DIM + at, mask=inside, other=0.0), 0.0
    else:
        decays, bias = tl.load(decay_ptr + head), tl.load(step_bias_ptr + head)
    if HAS_SKIP:
        skip = tl.load(skip_ptr + own, mask=here, other=0.0)
    record = words_ptr + tl.load(words_ptr + WORD) + tl.program_id(2) * CHAIN_WIDTH
    num = tl.load(record + CHAIN_TOKENS)
    while num > 0:
        token, position, row = (
            tl.load(record + CHAIN_TOKEN),
            tl.load(record + CHAIN_POSITION),
            tl.load(record + CHAIN_ROW),
        )
        has_old = position > 0
        block = tl.maximum(position - 1, 0) // INTERVAL
        from_ = _place(
            tables_ptr, pieces_ptr, 1 + head, row, block, table_width, table_stride, page_words
        )
        kept = _place(tables_ptr, pieces_ptr, 0, row, block, table_width, table_stride, page_words)
        state = tl.load(pool_ptr + from_ + at, mask=inside & (at * 0 + position > 0), other=0.0)
        last = token + num - 1
        begin(AHEAD)
        value, key, query, step, strength, gate = _inputs(
            mixed_ptr, projected_ptr, steps_ptr, bc_ptr, token, head, own, here, n, real, num_channels, num_projected, num_heads,
            DIM, SIZE, GROUPS, KIND, GATED,
        )  # fmt: skip
        value1, key1, query1, step1, strength1, gate1 = _inputs(
            mixed_ptr, projected_ptr, steps_ptr, bc_ptr, tl.minimum(token + 1, last), head, own, here, n, real, num_channels,
            num_projected, num_heads, DIM, SIZE, GROUPS, KIND, GATED,
        )  # fmt: skip
        value2, key2, query2, step2, strength2, gate2 = _inputs(
            mixed_ptr, projected_ptr, steps_ptr, bc_ptr, tl.minimum(token + 2, last), head, own, here, n, real, num_channels,
            num_projected, num_heads, DIM, SIZE, GROUPS, KIND, GATED,
        )  # fmt: skip
        x, k, q, shrink, written, silu = _ready(
            value, key, query, step, strength, gate, decays, bias, scale, KIND, GATED
        )
        while token <= last:
            block = position // INTERVAL
            first = token  # of what the state of this block is made of
            end = tl.minimum(last + 1, token + (block + 1) * INTERVAL - position)
            position += end - token
            while token < end:
                value3, key3, query3, step3, strength3, gate3 = _inputs(
                    mixed_ptr, projected_ptr, steps_ptr, bc_ptr, tl.minimum(token + 3, last), head, own, here, n, real,
                    num_channels, num_projected, num_heads, DIM, SIZE, GROUPS, KIND, GATED,
                )  # fmt: skip
                x1, k1, q1, shrink1, written1, silu1 = _ready(
                    value1, key1, query1, step1, strength1, gate1, decays, bias, scale, KIND, GATED
                )
                state = state * shrink
                if KIND == 2:
                    written = (x - tl.sum(state * k[:, None], 0)) * written
                state += k[:, None] * written[None, :]
                out = tl.sum(state * q[:, None], 0)
                if HAS_SKIP:
                    out += skip * x
                if GATED:
                    out *= silu
                tl.store(
                    out_ptr + token.to(tl.int64) * inner + own,
                    out.to(out_ptr.dtype.element_ty),
                    mask=here,
                )
                x, k, q, shrink, written, silu = x1, k1, q1, shrink1, written1, silu1
                value1, key1, query1, step1, strength1, gate1 = (
                    value2,
                    key2,
                    query2,
                    step2,
                    strength2,
                    gate2,
                )
                value2, key2, query2, step2, strength2, gate2 = (
                    value3,
                    key3,
                    query3,
                    step3,
                    strength3,
                    gate3,
                )
                token += 1
            to = _place(
                tables_ptr, pieces_ptr, 1 + head, row, block, table_width, table_stride, page_words
            )
            tl.store(pool_ptr + to + at, state, mask=inside)
            from_to = end - (KERNEL - 1) + rank  # the last inputs of the convolution
            new = projected_ptr + from_to.to(tl.int64) * num_projected + channel
            old = pool_ptr + kept + (from_to - first + KERNEL - 1) * num_channels + channel
            latest = tl.load(new, mask=keeps & (from_to >= first), other=0.0).to(tl.float32)
            latest += tl.load(
                old,
                mask=keeps & (from_to < first) & (from_to * 0 + has_old.to(tl.int32) > 0),
                other=0.0,
            )
            kept = _place(
                tables_ptr, pieces_ptr, 0, row, block, table_width, table_stride, page_words
            )
            tl.debug_barrier()  # it may be what others have still to read
            tl.store(pool_ptr + kept + rank * num_channels + channel, latest, mask=keeps)
            tl.debug_barrier()
            has_old = position > 0
        record += tl.num_programs(2) * CHAIN_WIDTH
        num = tl.load(record + CHAIN_TOKENS)
    begin(AHEAD)  # those without work, too


@triton.jit
def _norm_heads(
    values_ptr, projected_ptr, norm_ptr, out_ptr, num_inner, num_channels, num_projected, size, eps,
    GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gate and norm of `size` values of a token. Reference: `state.TorchStates`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    column = tl.program_id(1) * size + at
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0)
    gate = _silu(
        tl.load(
            projected_ptr + token * num_projected + num_channels + column, mask=inside, other=0.0
        ).to(tl.float32)
    )
    begin(AHEAD)
    value = tl.load(values_ptr + token * num_inner + column, mask=inside, other=0.0)
    if GATE_FIRST:
        value *= gate
    value = value / tl.sqrt(tl.sum(value * value, 0) / size + eps) * weight
    if not GATE_FIRST:
        value *= gate
    tl.store(out_ptr + token * num_inner + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x_ptr, gate_ptr, out_ptr, num, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Sigmoid gate. Reference: `gate.gate_reference`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin(AHEAD)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=at < num)


def gate(x_TH: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate)."""
    out = torch.empty_like(x_TH)
    launch(
        _gate,
        (triton.cdiv(x_TH.numel(), 1024),),
        x_TH,
        gate_TH,
        out,
        x_TH.numel(),
        BLOCK=1024,
        **HOW,
    )
    return out


class CudaStates:
    """The common part of all steps."""

    def __init__(self, states: PagedStates) -> None:
        self.states, device = states, states.pool.device
        self.words = states.pool.view(torch.float32)
        self.pieces = [
            torch.tensor(pieces, dtype=torch.int32, device=device)
            for pieces in states.layout.pieces
        ]
        first, *others = states.tables
        stride = others[0].storage_offset() - first.storage_offset() if others else 0
        self.tables, self.sizes = first, (first.stride(0), stride, self.words.shape[1])

    def step(self, lists: StateLists) -> CudaStateStep:
        return CudaStateStep(self, lists)


@dataclass(slots=True)
class CudaStateStep:
    made: CudaStates
    lists: StateLists

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        spec, made, lists = self.made.states.spec(layer), self.made, self.lists
        out = projected_TC.new_empty(projected_TC.shape[0], spec.num_channels)
        bias = learned.conv_KC if learned.conv_bias_C is None else learned.conv_bias_C
        block = min(_CHANNELS, triton.next_power_of_2(spec.num_channels))
        launch(
            _convolve, (projected_TC.shape[0], triton.cdiv(spec.num_channels, block)),
            projected_TC, learned.conv_KC, bias, out, made.words, made.tables, made.pieces[layer], lists.rows_T,
            lists.positions_T, spec.num_channels, spec.num_projected, *made.sizes, INTERVAL=made.states.interval,
            KERNEL=spec.kernel, TAPS=triton.next_power_of_2(spec.kernel), HAS_BIAS=learned.conv_bias_C is not None, BLOCK=block,
            num_warps=4, **HOW,
        )  # fmt: skip
        return out

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        spec, made = self.made.states.spec(layer), self.made
        mixed, projected = inputs.mixed_TC, inputs.projected_TC
        steps, bc = (mixed if one is None else one for one in (inputs.steps_TI, inputs.bc_TS2))
        skip, bias = (
            learned.decay if one is None else one for one in (learned.skip_I, learned.step_bias)
        )
        has_norm = learned.norm_I is not None
        values = mixed.new_empty(
            mixed.shape[0], spec.num_inner, dtype=torch.float32 if has_norm else mixed.dtype
        )
        rows = triton.next_power_of_2(spec.state_size)
        columns = min(
            _MOST_COLUMNS,
            max(_FEWEST_COLUMNS, _TILE // rows),
            triton.next_power_of_2(spec.head_dim),
        )
        tiles = triton.cdiv(spec.head_dim, columns)
        launch(
            _scan, (tiles, spec.num_heads, self.lists.num_chains), mixed, projected, steps, bc, values, learned.decay, skip, bias,
            made.words, made.tables, made.pieces[layer], self.lists.words, spec.num_channels, spec.num_projected, spec.num_heads,
            *made.sizes, spec.state_size**-0.5, WORD=STATES, INTERVAL=made.states.interval, KERNEL=spec.kernel,
            KEPT=triton.next_power_of_2(max(1, spec.kernel - 1)),
            KEEPS=triton.next_power_of_2(triton.cdiv(spec.num_channels, tiles * spec.num_heads)),
            DIM=spec.head_dim, SIZE=spec.state_size, GROUPS=spec.num_groups, KIND=STATE_KINDS.index(spec.kind),
            HAS_SKIP=learned.skip_I is not None, GATED=not has_norm, ROWS=rows, COLUMNS=columns,
            num_warps=max(1, rows * columns // _TILE), **HOW,
        )  # fmt: skip
        return self._norm(spec, values, projected, learned) if has_norm else values

    def _norm(
        self,
        spec: StateSpec,
        values_TI: torch.Tensor,
        projected_TC: torch.Tensor,
        learned: StateWeights,
    ) -> torch.Tensor:
        out, block = projected_TC.new_empty(values_TI.shape), triton.next_power_of_2(spec.norm_size)
        launch(
            _norm_heads, (values_TI.shape[0], spec.num_inner // spec.norm_size), values_TI, projected_TC, learned.norm_I, out,
            spec.num_inner, spec.num_channels, spec.num_projected, spec.norm_size, learned.eps,
            GATE_FIRST=spec.kind != "delta", BLOCK=block, num_warps=min(8, max(1, block // 512)), **HOW,
        )  # fmt: skip
        return out
