"""Attention over the paged cache, from a fused q, k, v projection."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tidemill.layers.linear import Linear


class AttentionStep(Protocol):
    """A step as an attention backend laid it out: made once, used by every layer."""

    def attend(self, layer: int, qkv_TC: torch.Tensor) -> torch.Tensor:
        """Rotate q and k, enter k and v into the layer's cache, attend. qkv may be overwritten. Returns [T, N * D]."""
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
    ) -> None:
        super().__init__()
        self.layer = layer
        outs = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self.qkv = Linear(hidden_size, outs, bias=bias, dtype=dtype)
        self.out = Linear(num_heads * head_dim, {"out": hidden_size}, bias=out_bias, dtype=dtype)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return self.out(step.attend(self.layer, self.qkv(x_TH)))
