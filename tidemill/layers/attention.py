"""Attention over the paged cache, from a fused q, k, v projection."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tidemill.kernels.kv_cache import HeadWeights
from tidemill.layers.base import Layer
from tidemill.layers.linear import Linear
from tidemill.layers.norm import RMSNorm
from tidemill.model_config import AttentionSpec, ModelConfig
from tidemill.quant import WeightPlan


class AttentionStep(Protocol):
    """A step as an attention backend laid it out: made once, used by every layer."""

    def attend(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        """Norm each head's q and k (if the model does), rotate them, enter k and v into the layer's cache, attend as the layer's
        spec says. qkv may be overwritten. Returns [T, N * D]."""
        ...


class Sinks(Layer):
    """A score for each head that joins its softmax."""

    def __init__(self, num_heads: int) -> None:
        super().__init__({"weight": (num_heads,)})
        self.weight = nn.Parameter(torch.empty(num_heads), requires_grad=False)


class Attention(nn.Module):
    """Projection, attention, projection."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.layer, spec, dim = layer, config.layers[layer], config.head_dim
        assert isinstance(spec, AttentionSpec)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.sinks = Sinks(spec.num_heads) if spec.has_sinks else None
        outs = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim}
        self.qkv = Linear(config.hidden_size, outs, bias=config.attention_bias, weights=weights)
        self.out = Linear(outs["q"], {"out": config.hidden_size}, bias=config.attention_out_bias, weights=weights)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return self.out(step.attend(self.layer, self.qkv(x_TH), self._learned()))

    def _learned(self) -> HeadWeights:
        sinks = None if self.sinks is None else self.sinks.weight
        if self.q_norm is None or self.k_norm is None:
            return HeadWeights(sinks=sinks)
        return HeadWeights(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, sinks)
