"""A feed-forward that is a mixture of experts: a router, and experts of which each token uses a few."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.moe import ExpertWeights
from tidemill.layers.base import Layer
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import GatedMLP
from tidemill.model_config import ModelConfig, MoESpec
from tidemill.quant import ExpertParts, ExpertStacks, WeightPlan
from tidemill.weights.checkpoint import WeightTensor

_SIDES = ("gate", "up", "down")


class Router(Linear):
    """Logits of the experts in float32; the last is the shared expert's, where there is one."""

    def __init__(self, hidden_size: int, spec: MoESpec, weights: WeightPlan) -> None:
        outs = {"router": spec.num_experts} | ({"shared": 1} if spec.shared_size else {})
        super().__init__(hidden_size, outs, bias=spec.has_bias, weights=weights.of_tables)

    def load(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None = None) -> None:
        """GGUF files have the shared expert's row as a vector."""
        is_vector = part == "shared" and len(tensor.shape) == 1
        super().load(part, _Row(tensor) if is_vector else tensor, row_order)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.weight.logits(x_TH)


class Experts(Layer):
    """The matrices of all experts. A file may have each by itself (part "gate.3"), those of all experts as one tensor ("gates"),
    or gate and up of all as one ("gate_ups", rows of gate first)."""

    def __init__(self, hidden_size: int, spec: MoESpec, weights: WeightPlan) -> None:
        super().__init__(self._shapes(hidden_size, spec))
        self.spec, self.num_experts = spec, spec.num_experts
        self._method = weights.method
        self._hidden_size = hidden_size
        self._stacks: ExpertStacks | None = None
        self._read: dict[tuple[str, int], Any] = {}  # matrices by side and expert, until all are there
        self._biases: dict[str, torch.Tensor] = {}
        self._wanted = {(side, expert) for side in _SIDES for expert in range(spec.num_experts)}
        if spec.shared_size:
            self._wanted |= {(side, spec.num_experts) for side in _SIDES}
        self._wanted_biases = {"gate", "up", "down"} if spec.has_bias else set[str]()
        self._weights: ExpertWeights | None = None

    def _shapes(self, hidden_size: int, spec: MoESpec) -> dict[str, tuple[int, ...]]:
        """Of all parts in which matrices may come."""
        num, size = spec.num_experts, spec.expert_size
        shapes: dict[str, tuple[int, ...]] = {}
        for side in _SIDES:
            one = (hidden_size, size) if side == "down" else (size, hidden_size)
            shapes |= {f"{side}.{expert}": one for expert in range(num)} | {f"{side}s": (num, *one)}
            if spec.has_bias:
                shapes[f"{side}s.bias"] = (num, one[0])
            if spec.shared_size:
                whole = spec.shared_size
                shapes[f"shared_{side}"] = (hidden_size, whole) if side == "down" else (whole, hidden_size)
        return shapes | {"gate_ups": (num, 2 * size, hidden_size)}

    def _brings(self, part: str) -> set[tuple[str, int]]:
        """The matrices in a part, by side and expert."""
        kind, _, number = part.partition(".")
        if number == "bias":
            return set()
        if kind.startswith("shared_"):
            return {(kind.removeprefix("shared_"), self.num_experts)}
        sides = ("gate", "up") if kind == "gate_ups" else (kind.removesuffix("s"),)
        return {(side, expert) for side in sides for expert in ([int(number)] if number else range(self.num_experts))}

    @property
    def missing(self) -> set[str]:
        """Every part of which all is missing."""
        biases = {f"{side}s.bias" for side in self._wanted_biases}
        return biases | {part for part in self.parts if (brings := self._brings(part)) and brings <= self._wanted}

    def lacks(self, part: str) -> bool:
        brings = self._brings(part)
        return brings <= self._wanted if brings else part in self.missing

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        side, _, number = part.partition(".")
        if number == "bias":
            self._take_bias(side.removesuffix("s"), tensor)
        elif number:
            self._add(side, int(number), tensor)
        elif side.startswith("shared_"):
            self._add(side.removeprefix("shared_"), self.num_experts, tensor)
        else:
            for expert in range(self.num_experts):
                self._add(side.removesuffix("s"), expert, tensor.matrix(expert))

    def _add(self, side: str, expert: int, tensor: WeightTensor, row_order: torch.Tensor | None = None) -> None:
        """A matrix of one expert. `side` gate_up: both, rows of gate first."""
        brings = {("gate", expert), ("up", expert)} if side == "gate_up" else {(side, expert)}
        if not brings <= self._wanted:
            raise CheckpointError(f"Tensor {tensor.name} brings matrices of expert {expert} that another tensor has brought.")
        self._wanted -= brings
        is_shared = expert == self.num_experts
        if self._stacks is None and not is_shared:
            self._stacks = self._method.new_stacks(self.spec, self._hidden_size)
        if self._stacks is None or is_shared:
            self._read[side, expert] = self._method.read(tensor, row_order)
        else:
            self._stacks.read(side, expert, tensor, row_order)

    def _take_bias(self, side: str, tensor: WeightTensor) -> None:
        self._biases[side] = read_values(tensor)
        self._wanted_biases -= {side}

    def is_complete(self) -> bool:
        return not self._wanted and not self._wanted_biases

    def finish(self) -> None:
        num, biases, read = self.num_experts, self._biases, self._read
        apart = range(0 if self._stacks else num)
        gate_up_bias = torch.cat([biases["gate"], biases["up"]], dim=1) if "gate" in biases else None
        parts = ExpertParts[Any](
            [self._gate_up(expert) for expert in apart],
            [read["down", expert] for expert in apart],
            gate_up_bias,
            biases.get("down"),
            (self._gate_up(num), read["down", num]) if self.spec.shared_size else None,
            self._stacks,
        )
        self._read, self._biases, self._stacks = {}, {}, None
        self._weights = self._method.join_experts(parts, self.spec)

    def _gate_up(self, expert: int) -> list[Any]:
        both = self._read.get(("gate_up", expert))
        return [self._read["gate", expert], self._read["up", expert]] if both is None else [both]

    @property
    def weights(self) -> ExpertWeights:
        assert self._weights is not None
        return self._weights

    def forward(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        return self.weights(x_TH, logits_TL)


class MoE(nn.Module):
    experts_class = Experts

    def __init__(self, hidden_size: int, spec: MoESpec, weights: WeightPlan) -> None:
        super().__init__()
        self.router = Router(hidden_size, spec, weights)
        self.experts = self.experts_class(hidden_size, spec, weights)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.experts(x_TH, self.router(x_TH))


def feed_forward(config: ModelConfig, layer: int, weights: WeightPlan) -> nn.Module:
    """A layer's, dense or with experts."""
    spec = config.moe(layer)
    if spec is not None:
        return MoE(config.hidden_size, spec, weights)
    return GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, weights, config.act)


def read_values(tensor: WeightTensor) -> torch.Tensor:
    values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    tensor.read_into(values)
    return values


class _Row:
    """A stored vector as a matrix of one row."""

    def __init__(self, tensor: WeightTensor) -> None:
        self._tensor = tensor
        self.name, self.type_name, self.num_bytes = tensor.name, tensor.type_name, tensor.num_bytes
        self.shape = (1, *tensor.shape)

    def read_into(self, out: torch.Tensor) -> None:
        self._tensor.read_into(out[0])

    def codes(self) -> None:
        return None

    def matrix(self, number: int) -> WeightTensor:
        raise AssertionError("a row is no stack of matrices")
