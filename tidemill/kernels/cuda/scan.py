"""Layers with a state of constant size on a GPU: convolution and recurrence over states in pages (kernels/state.py).

Every token is computed by the same operations in the same order, by one program for a sequence, head and tile of columns: neither
batches nor chunks change a bit. A prompt is therefore as slow as its tokens one after the other. (Matmuls over chunks of tokens
would sum in another order than a token alone does: decoding would have to compute its chunk anew, up to 64 times the work, or
bits would depend on how a prompt is cut.)

The host's lists are those of the CPU: segments and chains, the latter padded with empty ones; and the chain of each token, -1 for
padding. So a recorded graph serves any number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.state import PagedStates, ScanInputs, Segments, StateWeights
from tidemill.model_config import StateSpec

_CHANNELS = 256  # of a program
_COLUMNS = 32
ROW, TOKEN, COUNT, SOURCE, TARGET, FIELDS = (tl.constexpr(i) for i in range(6))  # of a segment


@dataclass(slots=True)
class StateLists:
    """On the device, int32. `num_chains`: programs are launched for so many."""

    segments: torch.Tensor
    chains: torch.Tensor  # [num_chains + 1]
    chain_of: torch.Tensor  # of each token
    num_chains: int


def list_words(segments: Segments, num_chains: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Chains and the chain of each token, padded."""
    chains = np.full(num_chains + 1, segments.chains[-1], np.int32)
    chains[: segments.chains.size] = segments.chains
    chain_of, records = np.full(num_tokens, -1, np.int32), segments.records
    of_segment = np.repeat(np.arange(segments.chains.size - 1), np.diff(segments.chains))
    counts = records[:, COUNT.value]
    chain_of[: counts.sum()] = np.repeat(of_segment, counts)  # a step's tokens are in the order of its segments
    return chains, chain_of


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
    """Of a piece, in words."""
    page = tl.load(pieces_ptr + 2 * number)
    held = tl.load(tables_ptr + page * table_stride + row * table_width + block).to(tl.int64)
    return held * page_words + tl.load(pieces_ptr + 2 * number + 1) // 4


@triton.jit
def _convolve(
    projected_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, tables_ptr, pieces_ptr, segments_ptr, chains_ptr, chain_of_ptr,
    num_channels, num_projected, table_width, table_stride, page_words,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    begin(AHEAD)
    chain = tl.load(chain_of_ptr + token)
    if chain >= 0:
        segment = segments_ptr + tl.load(chains_ptr + chain) * FIELDS
        first, source, row = tl.load(segment + TOKEN), tl.load(segment + SOURCE), tl.load(segment + ROW)
        kept = _place(tables_ptr, pieces_ptr, 0, row, tl.maximum(source, 0), table_width, table_stride, page_words)
        total = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=inside, other=0.0)
        for k in tl.static_range(KERNEL):
            at = channel * 0 + token - (KERNEL - 1 - k)  # (the interpreter's masks are of vectors only)
            old = kept + (at - first + KERNEL - 1) * num_channels + channel
            x = tl.load(projected_ptr + at * num_projected + channel, mask=inside & (at >= first), other=0.0).to(tl.float32)
            x += tl.load(pool_ptr + old, mask=inside & (at < first) & (at * 0 + source >= 0), other=0.0)
            total = tl.fma(x, tl.load(weight_ptr + k * num_channels + channel, mask=inside, other=0.0), total)
        tl.store(out_ptr + token * num_channels + channel, _silu(total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keep(
    projected_ptr, pool_ptr, tables_ptr, pieces_ptr, segments_ptr, chains_ptr,
    num_channels, num_projected, table_width, table_stride, page_words,
    KERNEL: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The last inputs of each of a chain's segments, BLOCK channels. KEPT: KERNEL - 1, to a power of two."""
    chain = tl.program_id(0)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    rank = tl.arange(0, KEPT)[:, None]
    inside = (channel < num_channels) & (rank < KERNEL - 1)
    begin(AHEAD)
    begin_at, end = tl.load(chains_ptr + chain), tl.load(chains_ptr + chain + 1)
    if begin_at < end:
        segment = segments_ptr + begin_at * FIELDS
        first, source, row = tl.load(segment + TOKEN).to(tl.int64), tl.load(segment + SOURCE), tl.load(segment + ROW)
        kept = _place(tables_ptr, pieces_ptr, 0, row, tl.maximum(source, 0), table_width, table_stride, page_words)
        number = begin_at
        while number < end:
            segment = segments_ptr + number * FIELDS
            at = tl.load(segment + TOKEN) + tl.load(segment + COUNT) - (KERNEL - 1) + rank
            x = tl.load(projected_ptr + at * num_projected + channel, mask=inside & (at >= first), other=0.0).to(tl.float32)
            old = kept + (at - first + KERNEL - 1) * num_channels + channel
            x += tl.load(pool_ptr + old, mask=inside & (at < first) & (at * 0 + source >= 0), other=0.0)
            target = tl.load(segment + TARGET)
            to = _place(tables_ptr, pieces_ptr, 0, row, target, table_width, table_stride, page_words)
            tl.debug_barrier()  # it may be what others have still to read
            tl.store(pool_ptr + to + rank * num_channels + channel, x, mask=inside)
            tl.debug_barrier()
            kept, source = to, target
            first = (tl.load(segment + TOKEN) + tl.load(segment + COUNT)).to(tl.int64)
            number += 1


@triton.jit
def _scan(
    mixed_ptr, projected_ptr, steps_ptr, bc_ptr, out_ptr, decay_ptr, skip_ptr, step_bias_ptr,
    pool_ptr, tables_ptr, pieces_ptr, segments_ptr, chains_ptr,
    num_channels, num_projected, num_heads, table_width, table_stride, page_words, scale,
    DIM: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, HAS_SKIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A chain's tokens one after the other: COLUMNS columns of a head. ROWS: SIZE, to a power of two. KIND: 0 mamba, 1 mamba2, 2
    delta."""
    chain, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, ROWS)
    here, real = column < DIM, n < SIZE
    inside = real[:, None] & here[None, :]
    at = n[:, None] * DIM + column[None, :]
    inner, own = num_heads * DIM, head * DIM + column
    if KIND == 0:
        decays = tl.load(decay_ptr + head * SIZE * DIM + at, mask=inside, other=0.0)
    else:
        rate = tl.load(decay_ptr + head)
        bias = tl.load(step_bias_ptr + head)
    if HAS_SKIP:
        skip = tl.load(skip_ptr + own, mask=here, other=0.0)
    begin(AHEAD)
    number, end = tl.load(chains_ptr + chain), tl.load(chains_ptr + chain + 1)
    if number < end:
        segment = segments_ptr + number * FIELDS
        source, row = tl.load(segment + SOURCE), tl.load(segment + ROW)
        from_ = _place(tables_ptr, pieces_ptr, 1 + head, row, tl.maximum(source, 0), table_width, table_stride, page_words)
        state = tl.load(pool_ptr + from_ + at, mask=inside & (at * 0 + source >= 0), other=0.0)
        while number < end:
            segment = segments_ptr + number * FIELDS
            token = tl.load(segment + TOKEN).to(tl.int64)
            last = token + tl.load(segment + COUNT)
            while token < last:
                mixed = mixed_ptr + token * num_channels
                value = tl.load(mixed + own, mask=here, other=0.0).to(tl.float32)
                if KIND == 0:
                    step = _softplus(tl.load(steps_ptr + token * inner + own, mask=here, other=0.0).to(tl.float32))
                    key = tl.load(bc_ptr + token * 2 * SIZE + n, mask=real, other=0.0).to(tl.float32)
                    query = tl.load(bc_ptr + token * 2 * SIZE + SIZE + n, mask=real, other=0.0).to(tl.float32)
                    state = state * tl.exp(step[None, :] * decays) + key[:, None] * (value * step)[None, :]
                else:
                    keys = mixed + inner + head // (num_heads // GROUPS) * SIZE + n
                    key = tl.load(keys, mask=real, other=0.0).to(tl.float32)
                    query = tl.load(keys + GROUPS * SIZE, mask=real, other=0.0).to(tl.float32)
                    more = projected_ptr + token * num_projected + num_channels + inner + head
                    step = _softplus(tl.load(more).to(tl.float32) + bias)
                    state = state * tl.exp(step * rate)
                    if KIND == 2:
                        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
                        query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6) * scale
                        strength = 1.0 / (1.0 + tl.exp(-tl.load(more + num_heads).to(tl.float32)))
                        known = tl.sum(state * key[:, None], 0)
                        state += key[:, None] * ((value - known) * strength)[None, :]
                    else:
                        state += key[:, None] * (value * step)[None, :]
                out = tl.sum(state * query[:, None], 0)
                if HAS_SKIP:
                    out += skip * value
                tl.store(out_ptr + token * inner + own, out, mask=here)
                token += 1
            target = tl.load(segment + TARGET)
            to = _place(tables_ptr, pieces_ptr, 1 + head, row, target, table_width, table_stride, page_words)
            tl.store(pool_ptr + to + at, state, mask=inside)
            number += 1


@triton.jit
def _finish_scan(
    values_ptr, projected_ptr, norm_ptr, out_ptr, num_inner, num_channels, num_projected, size, eps,
    GATE_FIRST: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gate and norm of `size` values of a token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    column = tl.program_id(1) * size + at
    begin(AHEAD)
    gate = _silu(tl.load(projected_ptr + token * num_projected + num_channels + column, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(values_ptr + token * num_inner + column, mask=inside, other=0.0)
    if GATE_FIRST:
        value *= gate
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0)
        value = value / tl.sqrt(tl.sum(value * value, 0) / size + eps) * weight
    if not GATE_FIRST:
        value *= gate
    tl.store(out_ptr + token * num_inner + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x_ptr, gate_ptr, out_ptr, num, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin(AHEAD)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=at < num)


def gate(x_TH: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate)."""
    out = torch.empty_like(x_TH)
    launch(_gate, (triton.cdiv(x_TH.numel(), 1024),), x_TH, gate_TH, out, x_TH.numel(), BLOCK=1024, **HOW)
    return out


class CudaStates:
    """What all steps have in common."""

    def __init__(self, states: PagedStates) -> None:
        self.states, device = states, states.pool.device
        self.words = states.pool.view(torch.float32)
        self.pieces = [torch.tensor(pieces, dtype=torch.int32, device=device) for pieces in states.layout.pieces]
        first, *others = states.tables
        self.tables, self.width = first, first.stride(0)
        self.stride = others[0].storage_offset() - first.storage_offset() if others else 0

    def step(self, lists: StateLists) -> CudaStateStep:
        return CudaStateStep(self, lists)


@dataclass(slots=True)
class CudaStateStep:
    made: CudaStates
    lists: StateLists

    def convolve(self, layer: int, projected_TC: torch.Tensor, learned: StateWeights) -> torch.Tensor:
        spec, made, lists = self.made.states.spec(layer), self.made, self.lists
        num, channels, block = projected_TC.shape[0], spec.num_channels, _CHANNELS
        out = projected_TC.new_empty(num, channels)
        sizes = channels, spec.num_projected, made.width, made.stride, made.words.shape[1]
        bias = learned.conv_KC if learned.conv_bias_C is None else learned.conv_bias_C
        blocks = triton.cdiv(channels, block)
        launch(
            _convolve, (num, blocks), projected_TC, learned.conv_KC, bias, out, made.words, made.tables, made.pieces[layer],
            lists.segments, lists.chains, lists.chain_of, *sizes,
            KERNEL=spec.kernel, HAS_BIAS=learned.conv_bias_C is not None, BLOCK=block, num_warps=4, **HOW,
        )  # fmt: skip
        launch(
            _keep, (lists.num_chains, blocks), projected_TC, made.words, made.tables, made.pieces[layer], lists.segments,
            lists.chains, *sizes,
            KERNEL=spec.kernel, KEPT=triton.next_power_of_2(spec.kernel - 1), BLOCK=block, num_warps=4, **HOW,
        )  # fmt: skip
        return out

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        spec, made, lists = self.made.states.spec(layer), self.made, self.lists
        mixed, projected = inputs.mixed_TC, inputs.projected_TC
        steps, bc = (mixed if one is None else one for one in (inputs.steps_TI, inputs.bc_TS2))
        values = torch.empty(mixed.shape[0], spec.num_inner, dtype=torch.float32, device=mixed.device)
        skip, bias = (learned.decay if one is None else one for one in (learned.skip_I, learned.step_bias))
        columns = min(_COLUMNS, triton.next_power_of_2(spec.head_dim))
        launch(
            _scan, (lists.num_chains, spec.num_heads, triton.cdiv(spec.head_dim, columns)), mixed, projected, steps, bc, values,
            learned.decay, skip, bias, made.words, made.tables, made.pieces[layer], lists.segments, lists.chains,
            spec.num_channels, spec.num_projected, spec.num_heads, made.width, made.stride, made.words.shape[1],
            spec.state_size**-0.5, DIM=spec.head_dim, SIZE=spec.state_size, GROUPS=spec.num_groups, KIND=_kind(spec),
            HAS_SKIP=learned.skip_I is not None, ROWS=triton.next_power_of_2(spec.state_size), COLUMNS=columns,
            num_warps=4, **HOW,
        )  # fmt: skip
        return self._finish(spec, values, projected, learned)

    def _finish(
        self, spec: StateSpec, values_TI: torch.Tensor, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        out = projected_TC.new_empty(values_TI.shape)
        size = spec.norm_size or min(spec.num_inner, spec.head_dim)
        norm = values_TI if learned.norm_I is None else learned.norm_I
        block = triton.next_power_of_2(size)
        launch(
            _finish_scan, (values_TI.shape[0], spec.num_inner // size), values_TI, projected_TC, norm, out,
            spec.num_inner, spec.num_channels, spec.num_projected, size, learned.eps,
            GATE_FIRST=spec.kind != "delta", HAS_NORM=learned.norm_I is not None, BLOCK=block,
            num_warps=min(8, max(1, block // 512)), **HOW,
        )  # fmt: skip
        return out


def _kind(spec: StateSpec) -> int:
    return ("mamba", "mamba2", "delta").index(spec.kind)
