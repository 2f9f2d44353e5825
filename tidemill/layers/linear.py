"""Linear: one matmul, possibly of several stored matrices fused by rows (q, k, v; gate, up)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from tidemill.distributed.cuts import Cut, Size, even, num_of, unit_of, whole_of
from tidemill.distributed.group import Group, group_of
from tidemill.distributed.shard import Shard
from tidemill.kernels.linear import Weight
from tidemill.kernels.lora import LinearLora, Pair
from tidemill.kernels.parts import take_columns
from tidemill.kernels.pending import Pending, PendingLora
from tidemill.layers.base import Layer, read_values
from tidemill.quant import PLAIN, Gated, LinearRows, WeightPlan
from tidemill.weights.checkpoint import WeightTensor


class Adapters(Protocol):
    """The adapters of a model. While `is_on` is false, linear layers compute without them."""

    is_on: bool


class PartPair(NamedTuple):
    """The share of an adapter's pair that belongs to one part of a layer."""

    down_RK: torch.Tensor
    up_NR: torch.Tensor
    scale: float


class Linear(Layer):
    act = ""  # of a gated layer

    def __init__(
        self,
        num_in: Size,
        outs: Mapping[str, Size],
        *,
        bias: bool = False,
        weights: WeightPlan = PLAIN,
        stored: dict[str, int] | None = None,
    ) -> None:
        """`outs`: stored matrices by name, with their output features, in the order in which they
        are fused. `stored`: the rows of one of which the model's `row_order` takes only some.
        Sizes that are a Cut: this rank has some of the output features, or some of the input
        features, and then what it computes is a part of the sum, to which the other ranks' are
        added."""
        self._columns: range | None = None  # that are multiplied by, where the input has all
        self._gathered: tuple[Group, list[int]] | None = (
            None  # where the outputs of several ranks are put together
        )
        self._group = group_of(weights.shard) if isinstance(num_in, Cut) else None  # that adds up
        if weights.hidden.size > 1:
            num_in, outs = self._cut_hidden(num_in, outs, weights)
        self._taken = {name: whole_of(size) for name, size in outs.items()}
        parts: dict[str, tuple[int, ...]] = {
            name: ((stored or {}).get(name, num), whole_of(num_in))
            for name, num in self._taken.items()
        }
        cuts: dict[str, tuple[Size, Size]] = {name: (size, num_in) for name, size in outs.items()}
        if bias:
            parts |= {f"{name}.bias": (num_out,) for name, num_out in self._taken.items()}
            cuts |= {f"{name}.bias": (size, 0) for name, size in outs.items()}
        super().__init__(parts, cuts=cuts)
        self.num_in, self.outs = num_of(num_in), {name: num_of(size) for name, size in outs.items()}
        self._names, self._has_bias = list(outs), bias
        self.method = weights.method
        self._read: dict[str, Any] = {}  # until all are there
        self._rows: LinearRows | None = (
            None  # where they are read, if the method has a place for them
        )
        self._weight: Weight | None = None
        self.loras: Adapters | None = None  # adapters of the model, and those of this layer
        self.lora: LinearLora | None = None
        self.all_ranks: Callable[[torch.Tensor], torch.Tensor] | None = (
            None  # computes it with the parts of all ranks
        )
        self.by_rows = False  # now it does

    @property
    def is_cut(self) -> bool:
        """Other ranks have other parts of it."""
        return any(cut is not None for name in self._names for cut in self._cuts[name])

    @property
    def adds_up(self) -> bool:
        """Ranks have some of the inputs each, and add up what they compute."""
        return self._group is not None

    def _cut_hidden(
        self, num_in: Size, outs: Mapping[str, Size], weights: WeightPlan
    ) -> tuple[Size, Mapping[str, Size]]:
        """Also by the hidden size, which is the input of some linears and the output of others."""
        hidden, is_quantized = weights.hidden, weights.scheme != "dense"
        group = group_of(hidden)
        if isinstance(num_in, int) and any(isinstance(size, Cut) for size in outs.values()):
            cut = even(num_in, hidden, unit_of(num_in, hidden.size, is_quantized))
            self._columns, self._group = cut.runs[0], group
            return cut, outs
        ((name, size),) = outs.items() if isinstance(num_in, Cut) else (("", 0),)
        if isinstance(size, int) and size:
            unit = unit_of(size, hidden.size, is_quantized)
            cuts = [even(size, Shard(rank, hidden.size), unit) for rank in range(hidden.size)]
            self._gathered = group, [cut.num for cut in cuts]
            return num_in, {name: cuts[hidden.rank]}
        return num_in, outs

    def fits(self, part: str, shape: tuple[int, ...]) -> bool:
        """Some formats store by themselves the rows that others have among more."""
        name = part.partition(".")[0]
        return shape in (self.parts[part], (self._taken[name], *self.parts[part][1:]))

    def read_only(self, cuts: Mapping[str, Cut]) -> None:
        """Makes it read only these rows of its matrices; what becomes of the others is its method's
        to know."""
        self._cuts |= {name: (None if cut.is_whole else cut, None) for name, cut in cuts.items()}

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        if part not in self._names:
            self._read[part] = read_values(tensor, row_order)
            return
        if self._rows is None and not self._read.keys() & set(self._names):  # the first of them
            self._rows = self.method.new_rows(self.outs, self.num_in)
        if self._rows is not None:
            self._rows.read(part, tensor, row_order)
        else:
            self._read[part] = self.method.read(tensor, row_order)

    def finish(self) -> None:
        adds_bias = self._has_bias and (self._group is None or self._group.rank == 0)  # once
        bias = (
            torch.cat([self._read[f"{name}.bias"] for name in self._names]) if adds_bias else None
        )
        if self._rows is not None:
            self._weight, self._rows = self._of_rows(self._rows.weight(bias)), None
        else:
            self._weight = self._join([self._read[name] for name in self._names], bias)
        self._read.clear()

    def _of_rows(self, weight: Weight) -> Weight:
        """The layer's weight, made of its matrices one below the other."""
        return weight

    def _join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self.method.join(parts, bias)

    @property
    def weight(self) -> Weight:
        assert self._weight is not None
        return self._weight

    @property
    def accepts_quantized(self) -> bool:
        """Tells if it computes with what a norm has handed over, and with nothing else of its
        input."""
        return self._columns is None and not self._has_adapters and self.weight.handover is not None

    @property
    def _has_adapters(self) -> bool:
        return self.loras is not None and self.lora is not None and self.loras.is_on

    def shape_of(self, part: str) -> tuple[int, int]:
        """The shape of a matrix, on all ranks together."""
        return self._taken[part], self.parts[part][1]

    def own_pair(self, part: str, pair: Pair) -> Pair:
        """The share of an adapter's pair that belongs to the rows and columns that are here."""
        rows, columns = self._cuts[part]
        if rows is None and columns is None:
            return pair
        up = (
            pair.up_NR
            if rows is None
            else torch.cat([pair.up_NR[run.start : run.stop] for run in rows.runs])
        )
        down = pair.down_RK
        if columns is not None:
            down = torch.cat([down[:, run.start : run.stop] for run in columns.runs], 1)
        return PartPair(down, up, pair.scale)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.by_rows:
            assert self.all_ranks is not None
            return self.all_ranks(x_TK)
        if self._group is None:
            return self._multiply(x_TK)
        if self._columns is not None:
            return self.weight.activate(
                self._group.all_reduce(self.weight.matmul(take_columns(x_TK, self._columns)))
            )
        y_TN = self._group.all_reduce(self._multiply(x_TK))
        return (
            y_TN
            if self._gathered is None
            else self._gathered[0].all_gather(y_TN, 1, self._gathered[1])
        )

    def split_k(self, x_TK: torch.Tensor) -> Pending:
        """The product for a norm that adds up split-K partials, and what adapters add."""
        if self.by_rows or self._group is not None or self._has_adapters:
            return self.pending_lora(x_TK)
        return self.weight.split_k(x_TK)

    def pending_lora(self, x_TK: torch.Tensor) -> torch.Tensor | PendingLora:
        """The product for a kernel that adds what adapters do."""
        if self.by_rows or self._group is not None or self.lora is None or not self._has_adapters:
            return self(x_TK)
        return self.lora.pending(x_TK, self.weight)

    def _multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.lora is None or not self._has_adapters:
            return self.weight(x_TK)
        return self.lora.adapted(x_TK, self.weight)


class GatedLinear(Linear):
    """act(gate) * up of two matmuls of the same input. `act`: a name in `glu.ACTIVATIONS`."""

    def __init__(
        self, num_in: Size, num_out: Size, *, bias: bool, weights: WeightPlan, act: str
    ) -> None:
        super().__init__(num_in, {"gate": num_out, "up": num_out}, bias=bias, weights=weights)
        self.act = act
        self.read_by: tuple[
            Linear, ...
        ] = ()  # what takes its output; in a tuple, so that it is no part of this module

    def _of_rows(self, weight: Weight) -> Weight:
        return Gated(weight, self.act)

    def _join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        gate, up = parts
        return self.method.join_gated(gate, up, bias, self.act)
