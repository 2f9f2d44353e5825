"""Attention over the paged cache, from a fused q, k, v projection."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import nn

from tidemill.layers.linear import Linear
from tidemill.layers.norm import RMSNorm

QKNorm: TypeAlias = tuple[torch.Tensor, torch.Tensor, float]  # weights of q's and k's norms, and epsilon


class AttentionStep(Protocol):
    """A step as an attention backend laid it out: made once, used by every layer."""

    def attend(self, layer: int, qkv_TC: torch.Tensor, qk_norm: QKNorm | None = None) -> torch.Tensor:
        """Norm each head's q and k (if the model does), rotate them, enter k and v into the layer's cache, attend. qkv may be
        overwritten. Returns [T, N * D]."""
        ...


class Attention(nn.Module):
    """Projection, attention, projection."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        out_bias: bool,
        dtype: str,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        outs = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self.qkv = Linear(hidden_size, outs, bias=bias, dtype=dtype)
        self.out = Linear(num_heads * head_dim, {"out": hidden_size}, bias=out_bias, dtype=dtype)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.out(step.attend(self.layer, self.qkv(x_TH), norm))
