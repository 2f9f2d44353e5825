"""Feed-forwards with a ReLU whose up and down go to a file of prepared weights neuron by neuron;
the gate stays in memory."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from tidemill.kernels.linear import PlacedMatrix, Weight
from tidemill.kernels.memory import PAGE
from tidemill.kernels.moe import ExpertWeights
from tidemill.kernels.neurons import NeuronLayout, NeuronWeights, lay_out
from tidemill.quant.base import ExpertParts, LinearMethod
from tidemill.quant.streamed import Store
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor


class StreamedNeurons:
    """The streamed neurons of one feed-forward, under a name in a store: the methods of its two
    layers."""

    def __init__(
        self, gate_up: LinearMethod[Any], down: LinearMethod[Any], store: Store, name: str
    ) -> None:
        self.store, self.name = store, name
        self.gate_up, self.down = _GateUp(gate_up, self), _Down(down, self)
        self._up: tuple[Any, torch.Tensor | None] | None = None
        self._down: tuple[Any, torch.Tensor | None] | None = None

    def take_up(self, up: Any, bias: torch.Tensor | None) -> None:
        self._up = up, bias
        self._put()

    def take_down(self, down: Any, bias: torch.Tensor | None) -> None:
        self._down = down, bias
        self._put()

    def _put(self) -> None:
        """Once both are there."""
        if self._up is None or self._down is None:
            return
        (up, up_bias), (down, down_bias) = self._up, self._down
        if self.store.is_new:
            layout, made = lay_out(up, down, PAGE)
            self.store.put_array(self.name, made, {"layout": list(astuple(layout))})
        self._up, self._down = (None, up_bias), (None, down_bias)

    def weights(self) -> NeuronWeights:
        assert self._up is not None
        assert self._down is not None
        layout = NeuronLayout(*self.store.about(self.name)["layout"])
        return NeuronWeights(layout, self._up[1], self._down[1])


class _Part(LinearMethod[Any]):
    def __init__(self, inner: LinearMethod[Any], neurons: StreamedNeurons) -> None:
        super().__init__()
        self._inner, self._neurons = inner, neurons

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        raise AssertionError("a feed-forward without experts")


class _GateUp(_Part):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return self._inner.read(tensor, row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        raise AssertionError("a gated layer")

    def join_gated(self, gate: Any, up: Any, bias: torch.Tensor | None, act: str) -> Weight:
        """The gate alone, before its activation."""
        assert act == "relu"
        gate_bias, up_bias = (
            (None, None) if bias is None else (part.contiguous() for part in bias.chunk(2))
        )
        self._neurons.take_up(up, up_bias)
        return self._inner.join([gate], gate_bias)


class _Down(_Part):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        """Nothing, if the store has it."""
        return self._inner.read(tensor, row_order) if self._neurons.store.is_new else None

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        self._neurons.take_down(parts[0], bias)
        return PlacedMatrix(0, 0, 0, None)  # which nobody multiplies by
