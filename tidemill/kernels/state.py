"""States of constant size in pages: how a step is cut, and the recurrences in torch.

A sequence's state after every `interval` tokens is a *block*, of `block_pages` pages; the last one
holds the running state. Block i is written by tokens i * interval .. (i + 1) * interval - 1 and
starts from block i - 1, or from zeros. A step's tokens of a row are cut there into *segments*,
which follow each other as a *chain*. A block that this step writes must not be another row's source
in it: chains run side by side.

Every token is computed by the same operations in the same order, one after the other, so that neither chunks nor batches change
a bit. Columns of a token's projection are [values | keys | queries | gate | time steps (| write strengths)], of which the
first three (the channels) are convolved; a selective scan convolves values only, and makes the rest from the result:

    mamba   S = exp(dt A) S + B (dt x)         y = C S + D x    norm(y) = y            out = y silu(gate)
    mamba2  the same, with one dt and A a head                  norm(y silu(gate))
    delta   S = exp(dt A) S;  S = S + k b (v - k S)    y = q S  norm(y) of each head   out = norm(y) silu(gate)

with S [state_size, head_dim] of a head. Shape letters of kernels/__init__; C channels, I inner
values, K kernel, S state size, P columns of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.types.cache_layout import StateLayout
from tidemill.types.model_config import LayerSpec, StateSpec

_UNIT_EPS = 1e-6  # in the norm of a delta rule's keys and queries
# row of the table, first token in the step, tokens, source block (-1: zeros), target block
SEGMENT_FIELDS = 5


@dataclass(frozen=True, slots=True)
class StateWeights:
    """The learned parameters of a state layer besides its projections."""

    conv_KC: torch.Tensor
    conv_bias_C: torch.Tensor | None
    decay: torch.Tensor  # A, negative: [heads, S, P] of a mamba, else [heads]
    skip_I: torch.Tensor | None = None  # D
    step_bias: torch.Tensor | None = None  # [heads]; a mamba's projection of time steps has its own
    norm_I: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """A token's inputs: convolved channels, and the projection they came from; of a mamba also its
    time steps, and B and C."""

    mixed_TC: torch.Tensor
    projected_TC: torch.Tensor
    steps_TI: torch.Tensor | None = None
    bc_TS2: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segments:
    """`records`: [n, SEGMENT_FIELDS] int32. Chain c has those numbered chains[c] .. chains[c + 1] -
    1."""

    records: np.ndarray
    chains: np.ndarray  # int32

    def of_chains(self) -> Iterator[list[list[int]]]:
        for begin, end in zip(self.chains[:-1], self.chains[1:], strict=True):
            yield self.records[begin:end].tolist()


def cut(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, interval: int) -> Segments:
    """The segments of a step whose item i computes counts[i] tokens of rows[i] from position
    starts[i] on."""
    nums = (starts + counts - 1) // interval - starts // interval + 1
    chains = np.concatenate([[0], np.cumsum(nums)])
    item = np.repeat(np.arange(rows.size), nums)
    block = starts[item] // interval + np.arange(item.size) - chains[:-1][item]
    begin = np.maximum(starts[item], block * interval)
    end = np.minimum(starts[item] + counts[item], (block + 1) * interval)
    token = (np.cumsum(counts) - counts)[item] + begin - starts[item]
    source = np.where(begin % interval == 0, block - 1, block)
    records = np.stack([rows[item], token, end - begin, source, block], axis=1)
    return Segments(np.ascontiguousarray(records, dtype=np.int32), chains.astype(np.int32))


@dataclass(frozen=True, slots=True)
class PagedStates:
    """The states that a backend works on."""

    pool: torch.Tensor  # [pages, page_bytes] uint8
    # of each page of a block: [rows, blocks] int32; side by side in memory
    tables: list[torch.Tensor]
    layout: StateLayout
    specs: tuple[LayerSpec, ...]  # of each layer
    interval: int

    def spec(self, layer: int) -> StateSpec:
        spec = self.specs[layer]
        assert isinstance(spec, StateSpec)
        return spec


class TorchStates:
    """The backend that runs anywhere torch does."""

    def __init__(self, states: PagedStates) -> None:
        self._states = states

    def plan(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> TorchStateStep:
        return TorchStateStep(self._states, cut(rows, starts, counts, self._states.interval))


@dataclass(slots=True)
class TorchStateStep:
    states: PagedStates
    segments: Segments

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        """silu of each channel's convolution over its last K tokens, [T, C]."""
        spec = self.states.spec(layer)
        num_kept, out = (
            spec.kernel - 1,
            projected_TC.new_empty(projected_TC.shape[0], spec.num_channels),
        )
        weights = learned.conv_KC.unsqueeze(1)
        for chain in self.segments.of_chains():
            kept = self._load(layer, 0, chain[0], (num_kept, spec.num_channels))
            first, end = chain[0][1], chain[-1][1] + chain[-1][2]
            inputs = torch.cat([kept, projected_TC[first:end, : spec.num_channels].float()])
            total = inputs[: end - first] * weights[0]
            for k in range(1, spec.kernel):
                total = total + inputs[k : k + end - first] * weights[k]
            if learned.conv_bias_C is not None:
                total = total + learned.conv_bias_C
            out[first:end] = _silu(total)
            for row, token, count, _, target in chain:
                after = token + count - first  # tokens of the chain up to there
                self._piece(layer, 0, row, target, (num_kept, spec.num_channels)).copy_(
                    inputs[after : after + num_kept]
                )
        return out

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        """The recurrence, gated and normed, [T, I]. Inputs may be overwritten."""
        spec = self.states.spec(layer)
        shape = spec.state_size, spec.head_dim
        out = inputs.mixed_TC.new_empty(inputs.mixed_TC.shape[0], spec.num_inner)
        for chain in self.segments.of_chains():
            state = torch.stack(
                [self._load(layer, 1 + head, chain[0], shape) for head in range(spec.num_heads)]
            )
            for row, first, count, _, target in chain:
                for token in range(first, first + count):
                    state, out[token] = _advance(spec, state, inputs, learned, token)
                for head in range(spec.num_heads):
                    self._piece(layer, 1 + head, row, target, shape).copy_(state[head])
        return _finish(
            spec, out, inputs.projected_TC[:, spec.num_channels :][:, : spec.num_inner], learned
        )

    def _piece(
        self, layer: int, number: int, row: int, block: int, shape: tuple[int, int]
    ) -> torch.Tensor:
        pieces = self.states.layout.pieces[layer]
        page, offset = pieces[number]
        held = int(self.states.tables[page][row, block])
        flat = self.states.pool[held].view(torch.float32)
        return flat[offset // 4 : offset // 4 + shape[0] * shape[1]].view(shape)

    def _load(
        self, layer: int, number: int, first: list[int], shape: tuple[int, int]
    ) -> torch.Tensor:
        """Loads the state that a chain starts from; a copy."""
        row, _, _, source, _ = first
        return (
            torch.zeros(shape)
            if source < 0
            else self._piece(layer, number, row, source, shape).clone()
        )


def _advance(
    spec: StateSpec, state_NSP: torch.Tensor, inputs: ScanInputs, learned: StateWeights, token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state, and what it yields, [I]. All ops have the same shapes for every
    token, and so the same bits."""
    num_heads, num_inner = spec.num_heads, spec.num_inner
    mixed = inputs.mixed_TC[token].float()
    values = mixed[:num_inner].view(num_heads, 1, -1)
    if spec.kind == "mamba":
        assert inputs.steps_TI is not None
        assert inputs.bc_TS2 is not None
        steps = _softplus(inputs.steps_TI[token].float()).view(num_heads, 1, -1)
        keys, queries = inputs.bc_TS2[token].float().view(2, 1, -1, 1)
        decays = torch.exp(steps * learned.decay)
    else:
        assert learned.step_bias is not None
        more = inputs.projected_TC[token, spec.num_channels + num_inner :].float()
        steps = _softplus(more[:num_heads] + learned.step_bias).view(-1, 1, 1)
        keys, queries = mixed[num_inner:].view(2, spec.num_groups, spec.state_size)
        if spec.kind == "delta":
            keys, queries = _unit(keys), _unit(queries) * spec.state_size**-0.5
        keys, queries = (
            part.repeat_interleave(num_heads // spec.num_groups, 0).unsqueeze(-1)
            for part in (keys, queries)
        )
        decays = torch.exp(steps * learned.decay.view(-1, 1, 1))
    state = state_NSP * decays
    if spec.kind == "delta":
        known = (state * keys).sum(1, keepdim=True)
        state = state + keys * ((values - known) * torch.sigmoid(more[num_heads:]).view(-1, 1, 1))
    else:
        state = state + keys * (values * steps)
    out = (state * queries).sum(1).flatten()
    return state, out if learned.skip_I is None else out + mixed[:num_inner] * learned.skip_I


def _finish(
    spec: StateSpec, out_TI: torch.Tensor, gate_TI: torch.Tensor, learned: StateWeights
) -> torch.Tensor:
    gate = _silu(gate_TI.float())
    if learned.norm_I is None:
        return out_TI * gate
    values = (
        (out_TI * gate if spec.kind == "mamba2" else out_TI)
        .float()
        .unflatten(-1, (-1, spec.norm_size))
    )
    normed = F.rms_norm(values, (spec.norm_size,), eps=learned.eps).flatten(1) * learned.norm_I
    return (normed if spec.kind == "mamba2" else normed * gate).to(out_TI.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """The SiLU of kernels/glu.py: an element's bits do not depend on where it stands."""
    return x / (1 + torch.exp(-x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _UNIT_EPS)
