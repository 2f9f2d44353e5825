"""The feed-forward block, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tidemill.distributed.cuts import Size, feed_forward_cut
from tidemill.kernels.glu import activate
from tidemill.kernels.neurons import ChosenNeurons, NeuronWeights
from tidemill.kernels.pending import Pending
from tidemill.layers.linear import GatedLinear, Linear
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig

# A feed-forward of which some neurons are computed elsewhere: of its input and its two layers.
SplitFeedForward = Callable[[torch.Tensor, GatedLinear, Linear], torch.Tensor]


def inner_size(config: ModelConfig, layer: int, weights: WeightPlan) -> Size:
    """The inner size of a layer's feed-forward, as this rank has it."""
    return (
        config.intermediate_size
        if weights.shard.size == 1
        else feed_forward_cut(config, layer, weights.shard).size
    )


class GatedMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: Size,
        bias: bool,
        weights: WeightPlan,
        act: str = "silu",
    ) -> None:
        super().__init__()
        self.gate_up = GatedLinear(
            hidden_size, intermediate_size, bias=bias, weights=weights, act=act
        )
        self.down = Linear(intermediate_size, {"down": hidden_size}, bias=bias, weights=weights)
        self.gate_up.read_by = (self.down,)
        self.fused_norm = False  # as of Attention
        self.neurons: NeuronWeights | ChosenNeurons | None = None  # where not all are computed
        self.split: SplitFeedForward | None = None  # where some are in host memory

    @property
    def reads_input_once(self) -> bool:
        return self.split is None and self.neurons is None and self.gate_up.accepts_quantized

    def forward(self, x_TH: torch.Tensor) -> Pending:
        if self.split is not None:
            return self.split(x_TH, self.gate_up, self.down)
        if self.neurons is not None:
            return self.neurons(x_TH, self.gate_up(x_TH))
        return (
            self.down.split_k(self.gate_up(x_TH))
            if self.fused_norm
            else self.down(self.gate_up(x_TH))
        )


class MLP(nn.Module):
    """`act`: a name in `kernels/glu.py`."""

    def __init__(
        self, hidden_size: int, intermediate_size: Size, bias: bool, weights: WeightPlan, act: str
    ) -> None:
        super().__init__()
        self.up = Linear(hidden_size, {"up": intermediate_size}, bias=bias, weights=weights)
        self.down = Linear(intermediate_size, {"down": hidden_size}, bias=bias, weights=weights)
        self._act = act

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.up(x_TH), self._act))
