"""A feed-forward that is a mixture of experts: a router, and experts of which each token uses a
few."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tidemill.distributed.cuts import Cut, even, expert_cut, shared_cut, together
from tidemill.distributed.group import group_of
from tidemill.distributed.shard import WHOLE
from tidemill.errors import CheckpointError
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.kernels.routing import ExpertScores
from tidemill.layers.base import Layer, columns_of, read_values, rows_of
from tidemill.layers.expert_parallel import ParallelExperts
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.quant import ExpertParts, ExpertStacks, WeightPlan
from tidemill.types.model_config import ModelConfig, MoESpec
from tidemill.weights.checkpoint import WeightTensor

_SIDES = ("gate", "up", "down")


class Router(Linear):
    """Logits of the experts in float32; the last is the shared expert's, where it is gated."""

    def __init__(self, hidden_size: int, spec: MoESpec, weights: WeightPlan) -> None:
        outs = {"router": spec.num_experts} | ({"shared": 1} if spec.gates_shared else {})
        super().__init__(hidden_size, outs, bias=spec.has_bias, weights=weights.of_tables)

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """GGUF files have the shared expert's row as a vector."""
        return super().fits(part, shape) or (part == "shared" and shape == self.parts[part][1:])

    def load(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None = None) -> None:
        super().load(
            part, _Row(tensor) if len(tensor.shape) == 1 and part == "shared" else tensor, row_order
        )

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.weight.logits(x_TH)


class Scores(Layer):
    """Weights of the experts by their scores, in the place of logits."""

    def __init__(self, spec: MoESpec) -> None:
        assert spec.routing is not None
        has_bias = spec.routing.has_bias
        super().__init__({"bias": (spec.num_experts,)} if has_bias else {})
        empty = torch.empty(spec.num_experts) if has_bias else None
        self.bias = None if empty is None else nn.Parameter(empty, requires_grad=False)
        self._spec = spec
        self._score: ExpertScores | None = None

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        value = torch.empty(self.parts[part], dtype=torch.float32, device="cpu")
        tensor.read_into(value)
        self.bias = nn.Parameter(value, requires_grad=False)

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """Some files have a row."""
        return math.prod(shape) == self._spec.num_experts

    def forward(self, logits_TE: torch.Tensor) -> torch.Tensor:
        if self._score is None:
            self._score = ExpertScores(self._spec, self.bias)
        return self._score(logits_TE)


class Experts(Layer):
    """The matrices of all experts. A file may have each by itself (part "gate.3"), those of all
    experts as one tensor ("gates"), or gate and up of all as one ("gate_ups", rows of gate first).
    Of several ranks, each has some columns of every expert, or some experts; of the shared expert
    some columns either way. With some experts, ranks on CPUs send each other rows; on GPUs each
    adds up what its own experts give, and the sums are added: that takes the same kernels for any
    routing."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        spec, shard, hidden_size = config.moe(layer), weights.shard, config.hidden_size
        assert spec is not None
        super().__init__(self._shapes(hidden_size, spec))
        self.spec, self.num_experts = spec, spec.num_experts
        self._shard, self._group = shard, group_of(shard)
        self._by_number = weights.expert_parallel and shard.size > 1
        # rows go to the ranks that have their experts
        self._sends = self._by_number and weights.device != "cuda"
        self._own = shard.range(spec.num_experts) if self._by_number else range(spec.num_experts)
        self._columns = (
            even(spec.expert_size, WHOLE) if self._by_number else expert_cut(config, layer, shard)
        )
        self._shared_columns = shared_cut(config, spec, shard)
        self.method = weights.method
        self._hidden_size = hidden_size
        self._stacks: ExpertStacks | None = None
        # matrices by side and expert, until all are there
        self._read: dict[tuple[str, int], Any] = {}
        self._biases: dict[str, torch.Tensor] = {}
        self._wanted = {(side, expert) for side in _SIDES for expert in self._own}
        if spec.shared_size:
            self._wanted |= {(side, spec.num_experts) for side in _SIDES}
        self._wanted_biases = {"gate", "up", "down"} if spec.has_bias else set[str]()
        self._weights: ExpertWeights | None = None

    def _shapes(self, hidden_size: int, spec: MoESpec) -> dict[str, tuple[int, ...]]:
        """The shapes of all parts in which matrices may come."""
        num, size = spec.num_experts, spec.expert_size
        shapes: dict[str, tuple[int, ...]] = {}
        for side in _SIDES:
            one = (hidden_size, size) if side == "down" else (size, hidden_size)
            shapes |= {f"{side}.{expert}": one for expert in range(num)} | {f"{side}s": (num, *one)}
            if spec.has_bias:
                shapes[f"{side}s.bias"] = (num, one[0])
            if spec.shared_size:
                whole = spec.shared_size
                shapes[f"shared_{side}"] = (
                    (hidden_size, whole) if side == "down" else (whole, hidden_size)
                )
        return shapes | {"gate_ups": (num, 2 * size, hidden_size)}

    def read_only(self, experts: range) -> None:
        """Only these are read; what becomes of the others is its method's to know."""
        self._own = experts
        self._wanted = {
            (side, expert)
            for side, expert in self._wanted
            if expert in experts or expert == self.num_experts
        }

    def _brings(self, part: str) -> set[tuple[str, int]]:
        """The matrices in a part, by side and expert."""
        kind, _, number = part.partition(".")
        if number == "bias":
            return set()
        if kind.startswith("shared_"):
            return {(kind.removeprefix("shared_"), self.num_experts)}
        sides = ("gate", "up") if kind == "gate_ups" else (kind.removesuffix("s"),)
        experts = [int(number)] if number else range(self.num_experts)
        return {(side, expert) for side in sides for expert in experts if expert in self._own}

    @property
    def missing(self) -> set[str]:
        """Every part of which all is missing."""
        biases = {f"{side}s.bias" for side in self._wanted_biases}
        return biases | {
            part for part in self.parts if (brings := self._brings(part)) and brings <= self._wanted
        }

    def lacks(self, part: str) -> bool:
        brings = self._brings(part)
        return brings <= self._wanted if brings else part in self.missing

    def own(
        self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> tuple[WeightTensor, torch.Tensor | None]:
        """Cut matrix by matrix."""
        return tensor, row_order

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        side, _, number = part.partition(".")
        if number == "bias":
            self._take_bias(side.removesuffix("s"), tensor)
        elif number:
            self._add(side, int(number), tensor)
        elif side.startswith("shared_"):
            self._add(side.removeprefix("shared_"), self.num_experts, tensor)
        else:
            for expert in self._own:
                self._add(side.removesuffix("s"), expert, tensor.matrix(expert))

    def _add(
        self, side: str, expert: int, tensor: WeightTensor, row_order: torch.Tensor | None = None
    ) -> None:
        """A matrix of one expert. `side` gate_up: both, rows of gate first."""
        if expert not in self._own and expert != self.num_experts:
            return
        tensor, row_order = self._part(
            side,
            self._shared_columns if expert == self.num_experts else self._columns,
            tensor,
            row_order,
        )
        self.num_bytes += tensor.num_bytes
        brings = {("gate", expert), ("up", expert)} if side == "gate_up" else {(side, expert)}
        if not brings <= self._wanted:
            raise CheckpointError(
                f"Tensor {tensor.name} brings matrices of expert {expert} that another tensor has brought."
            )
        self._wanted -= brings
        is_shared = expert == self.num_experts
        if self._stacks is None and not is_shared:
            self._stacks = self.method.new_stacks(self._held, self._hidden_size)
        if self._stacks is None or is_shared:
            self._read[side, expert] = self.method.read(tensor, row_order)
        else:
            self._stacks.read(side, expert - self._own.start, tensor, row_order)

    @staticmethod
    def _part(
        side: str, cut: Cut, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> tuple[WeightTensor, torch.Tensor | None]:
        """The part of a matrix that belongs to these inner values of the expert."""
        if cut.is_whole:
            return tensor, row_order
        if side == "down":
            return columns_of(tensor, cut), row_order
        return rows_of(tensor, together(cut, cut) if side == "gate_up" else cut, row_order)

    @property
    def _held(self) -> MoESpec:
        """The spec of the experts that this rank has. By number: perhaps fewer experts than a token
        goes through, one at a time."""
        if not self._by_number:
            return self._cut
        return replace(
            self.spec,
            num_experts=len(self._own),
            top_k=1,
            scoring="topk_then_softmax",
            renormalise=False,
            shared_size=0,
            routing=None,
        )

    @property
    def _cut(self) -> MoESpec:
        """All experts, with this rank's columns of them."""
        return replace(
            self.spec, expert_size=self._columns.num, shared_size=self._shared_columns.num
        )

    def _take_bias(self, side: str, tensor: WeightTensor) -> None:
        self._set_bias(side, read_values(tensor))

    def _set_bias(self, side: str, bias_EN: torch.Tensor) -> None:
        self.num_bytes += bias_EN[self._own.start : self._own.stop].nbytes
        bias_EN, (run,) = bias_EN[self._own.start : self._own.stop], self._columns.runs
        is_once = side != "down" or self._by_number or self._shard.rank == 0
        if is_once:
            self._biases[side] = (
                bias_EN if side == "down" else bias_EN[:, run.start : run.stop]
            ).contiguous()
        self._wanted_biases -= {side}

    def is_complete(self) -> bool:
        return not self._wanted and not self._wanted_biases

    def finish(self) -> None:
        if self._weights is not None:  # what comes now are other ranks' experts
            return
        biases, read = self._biases, self._read
        apart = [] if self._stacks else self._own
        gate_up_bias = (
            torch.cat([biases["gate"], biases["up"]], dim=1) if "gate" in biases else None
        )
        shared = (
            (self._gate_up(self.num_experts), read["down", self.num_experts])
            if self.spec.shared_size
            else None
        )
        parts = ExpertParts[Any](
            [self._gate_up(expert) for expert in apart],
            [read["down", expert] for expert in apart],
            gate_up_bias,
            biases.get("down"),
            None if self._sends else shared,
            self._stacks,
            self._own.start if self._by_number else 0,
        )
        self._read, self._biases, self._stacks = {}, {}, None
        self._weights = self.method.join_experts(parts, self._held if self._sends else self._cut)
        if self._sends:
            self._weights = ParallelExperts(
                self.spec, self._weights, self._group, self._shared_weights(shared)
            )

    def _shared_weights(self, shared: tuple[list[Any], Any] | None) -> tuple[Weight, Weight] | None:
        if shared is None:
            return None
        (gate, up), down = shared
        return self.method.join_gated(gate, up, None, self.spec.act), self.method.join([down], None)

    def _gate_up(self, expert: int) -> list[Any]:
        both = self._read.get(("gate_up", expert))
        return [self._read["gate", expert], self._read["up", expert]] if both is None else [both]

    @property
    def weights(self) -> ExpertWeights:
        assert self._weights is not None
        return self._weights

    def forward(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        out_TH = self.weights(x_TH, logits_TL)
        is_all = self._sends or (self._columns.is_whole and not self._by_number)
        return out_TH if is_all else self._group.all_reduce(out_TH)


class MoE(nn.Module):
    experts_class = Experts

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        spec = config.moe(layer)
        assert spec is not None
        self.router = Router(config.hidden_size, spec, weights)
        self.scores = None if spec.routing is None else Scores(spec)
        self.experts = self.experts_class(config, layer, weights)

    def choose(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Logits of the experts, as `ExpertWeights` take them."""
        logits_TL = self.router(x_TH)
        return logits_TL if self.scores is None else self.scores(logits_TL)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.experts(x_TH, self.choose(x_TH))


def feed_forward(config: ModelConfig, layer: int, weights: WeightPlan) -> nn.Module:
    """A layer's, dense or with experts."""
    if config.moe(layer) is not None:
        return MoE(config, layer, weights)
    return GatedMLP(
        config.hidden_size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act
    )


class _Row:
    """A stored vector as a matrix of one row."""

    reads_rows = False

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

    def rows(self, begin: int, end: int) -> WeightTensor:
        raise AssertionError("a row has no rows")

    def columns(self, begin: int, end: int) -> WeightTensor:
        return _Row(self._tensor.rows(begin, end))
