"""Layers with a state of constant size: projection, convolution, recurrence (kernels/state.py),
projection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tidemill.distributed.cuts import Cut, Size, heads_of, rank_spec, together
from tidemill.distributed.group import group_of
from tidemill.distributed.shard import Shard
from tidemill.kernels.norm import NormGroup, shared_rms_norm
from tidemill.kernels.state import ScanInputs, StateWeights
from tidemill.layers.base import Layer, read_values
from tidemill.layers.linear import Linear
from tidemill.quant import WeightPlan
from tidemill.types.model_config import LayerSpec, ModelConfig, StateSpec
from tidemill.weights.checkpoint import WeightTensor


@dataclass(frozen=True, slots=True)
class StateCut:
    """The cut of a layer with a state: heads, inner values, and what the convolution sees."""

    heads: Cut
    groups: Cut
    inner: Cut
    channels: Cut


def state_cut(spec: LayerSpec, shard: Shard) -> StateCut:
    assert isinstance(spec, StateSpec)
    own = heads_of(spec, shard)
    inner, keys = own.heads.times(spec.head_dim), own.groups.times(spec.state_size)
    channels = inner if spec.kind == "mamba" else together(inner, keys, keys)
    return StateCut(own.heads, own.groups, inner, channels)


class StateStep(Protocol):
    """A step as a backend of states laid it out: made once, used by every layer."""

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        """silu of the channels' convolution, [T, channels]; keeps what later steps need."""
        ...

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        """The recurrence, gated and normed, [T, inner]; keeps the state. Inputs may be overwritten."""
        ...


class Conv(Layer):
    """A causal convolution of each channel with itself, stored [channels, 1, kernel] or [channels,
    kernel]."""

    def __init__(self, spec: StateSpec, channels: Cut, bias: bool) -> None:
        parts: dict[str, tuple[int, ...]] = {"conv": (channels.whole, 1, spec.kernel)}
        cuts = dict.fromkeys(("conv", "conv.bias"), (channels.size, 0))
        super().__init__(parts | ({"conv.bias": (channels.whole,)} if bias else {}), cuts=cuts)
        self.weight_KC = nn.Parameter(torch.empty(spec.kernel, channels.num), requires_grad=False)
        self.bias_C = nn.Parameter(torch.empty(channels.num), requires_grad=False) if bias else None

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = read_values(tensor, row_order)
        if part == "conv":
            self.weight_KC = nn.Parameter(value.flatten(1).t().contiguous(), requires_grad=False)
        else:
            self.bias_C = nn.Parameter(value, requires_grad=False)

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        return _wide(shape) == _wide(self.parts[part])


class StateParameters(Layer):
    """A (of which Hugging Face's files hold log(-A)), D and the bias of time steps."""

    decay: nn.Parameter
    skip: nn.Parameter

    def __init__(self, spec: StateSpec, own: StateCut) -> None:
        is_mamba = spec.kind == "mamba"
        rows = own.inner if is_mamba else own.heads
        names = [
            "decay",
            *(["skip"] if spec.kind != "delta" else []),
            *([] if is_mamba else ["step_bias"]),
        ]
        wide = {"decay": (spec.state_size,)} if is_mamba else {}
        parts: dict[str, tuple[int, ...]] = {
            name: (rows.whole, *wide.get(name, ())) for name in names
        }
        super().__init__(parts, cuts=dict.fromkeys(names, (rows.size, 0)))
        self._spec, self._num_heads = spec, own.heads.num
        self._shapes = {name: (rows.num, *wide.get(name, ())) for name in names}
        for name, shape in self._shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        return _wide(shape) == _wide(self.parts[part])

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = read_values(tensor, row_order).view(self._shapes[part])
        setattr(self, part, nn.Parameter(value, requires_grad=False))

    def settle(self, is_log: bool) -> None:
        """Once all are there: lay them out as the kernels read them."""
        spec, decay = self._spec, -torch.exp(self.decay) if is_log else self.decay
        if spec.kind == "mamba":  # as a head's state lies
            decay = decay.view(self._num_heads, spec.head_dim, spec.state_size).transpose(1, 2)
        elif spec.kind == "mamba2":
            self.skip = nn.Parameter(
                self.skip.repeat_interleave(spec.head_dim), requires_grad=False
            )
        self.decay = nn.Parameter(decay.contiguous(), requires_grad=False)


class GatedNorm(Layer):
    """The scale of a norm that belongs to a gate: of all inner values, or of each head's. Its
    kernel is the recurrence's."""

    def __init__(self, spec: StateSpec, own: StateCut) -> None:
        is_each_heads = spec.kind != "mamba2"
        super().__init__({"weight": (spec.norm_size if is_each_heads else spec.num_inner,)})
        self._repeats = own.inner.num // spec.norm_size if is_each_heads else 1
        self._own = (
            slice(None) if is_each_heads else slice(own.inner.runs[0].start, own.inner.runs[0].stop)
        )
        self.weight = nn.Parameter(torch.empty(own.inner.num), requires_grad=False)

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """GGUF stores [groups, values]."""
        return math.prod(shape) == math.prod(self.parts[part])

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = read_values(tensor).flatten()[self._own].repeat(self._repeats)
        self.weight = nn.Parameter(value, requires_grad=False)


def _wide(shape: tuple[int, ...]) -> list[int]:
    """Without dimensions of 1, in which formats differ."""
    return [size for size in shape if size > 1]


class StateMixer(nn.Module):
    """Mamba-2 and the gated delta rule. `ins`: stored matrices of the first projection, whose rows
    a model's `row_order` brings into the order of kernels/state.py."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: WeightPlan,
        ins: Mapping[str, Size],
        *,
        stored: dict[str, int] | None = None,
        bias: bool = False,
        conv_bias: bool = True,
    ) -> None:
        super().__init__()
        spec = config.layers[layer]
        assert isinstance(spec, StateSpec)
        self.layer, self.eps = layer, config.norm_eps
        self.own, self._group = state_cut(spec, weights.shard), group_of(weights.shard)
        is_split = spec.norm_size and rank_spec(spec, weights.shard) == rank_spec(
            spec.but(norm_size=0), weights.shard
        )
        self._groups = _norm_groups(spec, self.own.inner) if is_split else []
        self._num_groups = spec.num_inner // spec.norm_size if self._groups else 0
        self.ins = Linear(config.hidden_size, ins, bias=bias, weights=weights, stored=stored)
        self.conv = Conv(spec, self.own.channels, conv_bias)
        self.parameters_ = StateParameters(spec, self.own)
        self.norm = GatedNorm(spec, self.own) if spec.norm_size else None
        self.out = Linear(
            self.own.inner.size, {"out": config.hidden_size}, bias=bias, weights=weights
        )

    def forward(self, x_TH: torch.Tensor, step: StateStep) -> torch.Tensor:
        projected, learned = self.ins(x_TH), self.learned()
        mixed = step.convolve(self.layer, projected, learned)
        return self.out(self._normed(step.scan(self.layer, ScanInputs(mixed, projected), learned)))

    def _normed(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The normed output, where ranks have parts of what is normed together: the recurrence only
        gates."""
        if not self._groups:
            return x_TI
        assert self.norm is not None
        weights = [self.norm.weight[group.columns] for group in self._groups]
        return shared_rms_norm(
            x_TI, self._groups, self._num_groups, weights, self.eps, self._group.all_reduce
        )

    def learned(self) -> StateWeights:
        own = self.parameters_
        return StateWeights(
            conv_KC=self.conv.weight_KC,
            conv_bias_C=self.conv.bias_C,
            decay=own.decay,
            skip_I=getattr(own, "skip", None),
            step_bias=getattr(own, "step_bias", None),
            norm_I=None if self.norm is None or self._groups else self.norm.weight,
            eps=self.eps,
        )


def _norm_groups(spec: StateSpec, inner: Cut) -> list[NormGroup]:
    (run,) = inner.runs
    made, begin = list[NormGroup](), run.start
    while begin < run.stop:
        number = begin // spec.norm_size
        end = min(run.stop, (number + 1) * spec.norm_size)
        made.append(NormGroup(number, slice(begin - run.start, end - run.start), spec.norm_size))
        begin = end
    return made


class MambaMixer(StateMixer):
    """Mamba: time steps, B and C are projections of what was convolved."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: WeightPlan, bias: bool, conv_bias: bool
    ) -> None:
        spec = config.layers[layer]
        assert isinstance(spec, StateSpec)
        inner = state_cut(spec, weights.shard).inner
        super().__init__(
            config,
            layer,
            weights,
            {"in": together(inner, inner).size},
            bias=bias,
            conv_bias=conv_bias,
        )
        self.to_rank = Linear(inner.size, {"rank": spec.rank}, weights=weights)
        self.to_bc = Linear(inner.size, {"bc": 2 * spec.state_size}, weights=weights)
        self.to_steps = Linear(spec.rank, {"steps": inner.size}, bias=True, weights=weights)

    def forward(self, x_TH: torch.Tensor, step: StateStep) -> torch.Tensor:
        projected, learned = self.ins(x_TH), self.learned()
        mixed = step.convolve(self.layer, projected, learned)
        inputs = ScanInputs(mixed, projected, self.to_steps(self.to_rank(mixed)), self.to_bc(mixed))
        return self.out(step.scan(self.layer, inputs, learned))
