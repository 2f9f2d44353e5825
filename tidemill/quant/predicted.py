"""Feed-forwards of which a predictor says which neurons a token needs: gate, up and down lie neuron
by neuron in memory."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.kernels.linear import PlacedMatrix, Weight, pack_linear
from tidemill.kernels.low_rank import Product
from tidemill.kernels.neurons import ChosenNeurons
from tidemill.quant.base import LinearMethod, OfAFeedForward
from tidemill.weights.predictors import Predictor


def scores_of(predictor: Predictor) -> Weight:
    return Product(pack_linear(predictor.b_UR, predictor.bias_U), pack_linear(predictor.a_RH))


class PredictedNeurons:
    """The predicted neurons of one feed-forward: the methods of its two layers. The first one's
    matmul gives the predictor's scores."""

    def __init__(
        self, gate_up: LinearMethod[Any], down: LinearMethod[Any], predictor: Predictor
    ) -> None:
        self.gate_up, self.down = _GateUp(gate_up, self), _Down(down, self)
        self.predictor = predictor
        self.first: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str] | None = None
        self.last: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def weights(self) -> ChosenNeurons:
        """Once both layers are there."""
        assert self.first is not None
        assert self.last is not None
        (gate, up, bias, act), (down, down_bias) = self.first, self.last
        self.first = self.last = None
        gate_bias, up_bias = (
            (None, None) if bias is None else (part.contiguous() for part in bias.chunk(2))
        )
        return ChosenNeurons(gate, up, down, act, (gate_bias, up_bias, down_bias))


class _Part(OfAFeedForward):
    def __init__(self, inner: LinearMethod[torch.Tensor], neurons: PredictedNeurons) -> None:
        super().__init__(inner)
        self._neurons = neurons


class _GateUp(_Part):
    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        raise AssertionError("a gated layer")

    def join_gated(
        self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str
    ) -> Weight:
        self._neurons.first = gate, up, bias, act
        return scores_of(self._neurons.predictor)


class _Down(_Part):
    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        self._neurons.last = parts[0], bias
        return PlacedMatrix(0, 0, 0, None)  # which nobody multiplies by
