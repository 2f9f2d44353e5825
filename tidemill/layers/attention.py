"""Attention over the paged cache, from a fused q, k, v projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from tidemill.distributed.cuts import Cut, heads_of
from tidemill.kernels.kv_cache import HeadWeights
from tidemill.kernels.linear import Weight
from tidemill.kernels.pending import Pending
from tidemill.layers.base import Layer
from tidemill.layers.linear import Linear
from tidemill.layers.norm import RMSNorm
from tidemill.quant import WeightPlan
from tidemill.types.model_config import AttentionSpec, ModelConfig


class AttentionStep(Protocol):
    """A step as an attention backend laid it out: made once, used by every layer."""

    def attend(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        """Norm each head's q and k (if the model does), rotate them, enter k and v into the layer's
        cache, attend as the layer's spec says. qkv may be overwritten. Returns [T, N * D]."""
        ...


def adds(step: AttentionStep) -> bool:
    """Tells if the step adds to qkv what adapters do, where the projection has left that
    (`Linear.pending_lora`)."""
    return getattr(step, "adds", False)


class EnteringStep(AttentionStep, Protocol):
    def enter(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> None:
        """Enters keys and values; same as `attend`, up to the cache: for tokens whose attention
        nobody reads."""
        ...


class Sinks(Layer):
    """A score for each head that joins its softmax."""

    def __init__(self, heads: Cut) -> None:
        super().__init__({"weight": (heads.whole,)}, cuts={"weight": (heads.size, 0)})
        self.weight = nn.Parameter(torch.empty(heads.num), requires_grad=False)


class Attention(nn.Module):
    """Projection, attention, projection."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.layer, spec = layer, config.layers[layer]
        assert isinstance(spec, AttentionSpec)
        self.q_norm = RMSNorm(spec.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = (
            RMSNorm(spec.head_dim, config.norm_eps) if config.qk_norm and spec.stored else None
        )
        own = heads_of(spec, weights.shard)
        self.sinks = Sinks(own.heads) if spec.has_sinks else None
        columns = {part.name[0]: own.groups.times(part.dim).size for part in spec.stored}  # k and v
        q, inner = own.heads.times(spec.head_dim).size, own.heads.times(spec.value_dim).size
        self.qkv = Linear(
            config.hidden_size, {"q": q, **columns}, bias=config.attention_bias, weights=weights
        )
        self.out = Linear(
            inner, {"out": config.hidden_size}, bias=config.attention_out_bias, weights=weights
        )
        # an RMSNorm that adds the result to the residual is all that reads it
        self.fused_norm = False
        # of a predictor that says which KV heads a token needs
        self.head_scores: Weight | None = None

    @property
    def reads_input_once(self) -> bool:
        return self.head_scores is None and self.qkv.accepts_quantized

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> Pending:
        learned = self._learned()
        if self.head_scores is not None:
            learned = replace(learned, chosen=self.head_scores(x_TH))
        attended = step.attend(self.layer, self._project(x_TH, step), learned)
        return self.out.split_k(attended) if self.fused_norm else self.out(attended)

    def enter(self, x_TH: torch.Tensor, step: EnteringStep) -> None:
        """Keys and values alone."""
        step.enter(self.layer, self._project(x_TH, step), self._learned())

    def _project(self, x_TH: torch.Tensor, step: AttentionStep) -> Any:
        """To what the step takes."""
        return self.qkv.pending_lora(x_TH) if adds(step) else self.qkv(x_TH)

    def _learned(self) -> HeadWeights:
        sinks = None if self.sinks is None else self.sinks.weight
        if self.q_norm is None:
            return HeadWeights(sinks=sinks)
        k_norm = None if self.k_norm is None else self.k_norm.weight
        return HeadWeights(self.q_norm.weight, k_norm, self.q_norm.eps, sinks)
