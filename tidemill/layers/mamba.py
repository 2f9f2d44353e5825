"""Layers with a state of constant size: projection, convolution, recurrence (kernels/state.py), projection."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from tidemill.kernels.state import ScanInputs, StateWeights
from tidemill.layers.base import Layer
from tidemill.layers.linear import Linear
from tidemill.model_config import ModelConfig, StateSpec
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import WeightTensor


class StateStep(Protocol):
    """A step as a backend of states laid it out: made once, used by every layer."""

    def convolve(self, layer: int, projected_TC: torch.Tensor, learned: StateWeights) -> torch.Tensor:
        """silu of the channels' convolution, [T, channels]; keeps what later steps need."""
        ...

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        """The recurrence, gated and normed, [T, inner]; keeps the state. Inputs may be overwritten."""
        ...


class Conv(Layer):
    """A causal convolution of each channel with itself, stored [channels, 1, kernel] or [channels, kernel]."""

    def __init__(self, spec: StateSpec, bias: bool) -> None:
        parts: dict[str, tuple[int, ...]] = {"conv": (spec.num_channels, 1, spec.kernel)}
        super().__init__(parts | ({"conv.bias": (spec.num_channels,)} if bias else {}))
        self.weight_KC = nn.Parameter(torch.empty(spec.kernel, spec.num_channels), requires_grad=False)
        self.bias_C = nn.Parameter(torch.empty(spec.num_channels), requires_grad=False) if bias else None

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        if row_order is not None:
            value = value[row_order]
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

    def __init__(self, spec: StateSpec) -> None:
        self.spec, is_mamba = spec, spec.kind == "mamba"
        parts: dict[str, tuple[int, ...]] = {"decay": (spec.num_inner, spec.state_size) if is_mamba else (spec.num_heads,)}
        if spec.kind != "delta":
            parts["skip"] = (spec.num_inner,) if is_mamba else (spec.num_heads,)
        if not is_mamba:
            parts["step_bias"] = (spec.num_heads,)
        super().__init__(parts)
        for part, shape in parts.items():
            setattr(self, part, nn.Parameter(torch.empty(shape), requires_grad=False))

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        return _wide(shape) == _wide(self.parts[part])

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        value = value.view(self.parts[part])
        setattr(self, part, nn.Parameter(value if row_order is None else value[row_order], requires_grad=False))

    def settle(self, is_log: bool) -> None:
        """Once all are there: lay them out as the kernels read them."""
        spec, decay = self.spec, -torch.exp(self.decay) if is_log else self.decay
        if spec.kind == "mamba":  # as a head's state lies
            decay = decay.view(spec.num_heads, spec.head_dim, spec.state_size).transpose(1, 2)
        elif spec.kind == "mamba2":
            self.skip = nn.Parameter(self.skip.repeat_interleave(spec.head_dim), requires_grad=False)
        self.decay = nn.Parameter(decay.contiguous(), requires_grad=False)


class GatedNorm(Layer):
    """The scale of a norm that belongs to a gate: of all inner values, or of each head's. Its kernel is the recurrence's."""

    def __init__(self, spec: StateSpec, size: int) -> None:
        super().__init__({"weight": (size,)})
        self._repeats = spec.num_inner // size
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """GGUF stores [groups, values]."""
        return math.prod(shape) == math.prod(self.parts[part])

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        self.weight = nn.Parameter(value.flatten().repeat(self._repeats), requires_grad=False)


def _wide(shape: tuple[int, ...]) -> list[int]:
    """Without dimensions of 1, in which formats differ."""
    return [size for size in shape if size > 1]


class StateMixer(nn.Module):
    """Mamba-2 and the gated delta rule. `ins`: stored matrices of the first projection, whose rows a model's `row_order` brings
    into the order of kernels/state.py."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: WeightPlan,
        ins: dict[str, int],
        *,
        stored: dict[str, int] | None = None,
        bias: bool = False,
        conv_bias: bool = True,
    ) -> None:
        super().__init__()
        spec = config.layers[layer]
        assert isinstance(spec, StateSpec)
        self.layer, self.eps = layer, config.norm_eps
        self.ins = Linear(config.hidden_size, ins, bias=bias, weights=weights, stored=stored)
        self.conv = Conv(spec, conv_bias)
        self.parameters_ = StateParameters(spec)
        self.norm = GatedNorm(spec, spec.num_inner if spec.kind == "mamba2" else spec.norm_size) if spec.norm_size else None
        self.out = Linear(spec.num_inner, {"out": config.hidden_size}, bias=bias, weights=weights)

    def forward(self, x_TH: torch.Tensor, step: StateStep) -> torch.Tensor:
        projected, learned = self.ins(x_TH), self.learned()
        mixed = step.convolve(self.layer, projected, learned)
        return self.out(step.scan(self.layer, ScanInputs(mixed, projected), learned))

    def learned(self) -> StateWeights:
        own = self.parameters_
        return StateWeights(
            conv_KC=self.conv.weight_KC,
            conv_bias_C=self.conv.bias_C,
            decay=own.decay,
            skip_I=getattr(own, "skip", None),
            step_bias=getattr(own, "step_bias", None),
            norm_I=None if self.norm is None else self.norm.weight,
            eps=self.eps,
        )


class MambaMixer(StateMixer):
    """Mamba: time steps, B and C are projections of what was convolved."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan, bias: bool, conv_bias: bool) -> None:
        spec = config.layers[layer]
        assert isinstance(spec, StateSpec)
        super().__init__(config, layer, weights, {"in": spec.num_projected}, bias=bias, conv_bias=conv_bias)
        self.to_rank = Linear(spec.num_inner, {"rank": spec.rank}, weights=weights)
        self.to_bc = Linear(spec.num_inner, {"bc": 2 * spec.state_size}, weights=weights)
        self.to_steps = Linear(spec.rank, {"steps": spec.num_inner}, bias=True, weights=weights)

    def forward(self, x_TH: torch.Tensor, step: StateStep) -> torch.Tensor:
        projected, learned = self.ins(x_TH), self.learned()
        mixed = step.convolve(self.layer, projected, learned)
        inputs = ScanInputs(mixed, projected, self.to_steps(self.to_rank(mixed)), self.to_bc(mixed))
        return self.out(step.scan(self.layer, inputs, learned))
