"""Attention over the paged cache, from a fused q, k, v projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tidemill.kernels.attention import AttentionPlan, paged_attention
from tidemill.kernels.kv_cache import write_kv
from tidemill.layers.linear import Linear
from tidemill.layers.rope import Rope


@dataclass(slots=True)
class StepContext:
    """What a forward pass needs beside tokens and positions: where KV lives and how the step is laid out."""

    cache: torch.Tensor  # [layers, 2, G, P, S, D]
    slot_index: torch.Tensor  # where this step's keys and values go
    plan: AttentionPlan
    angles: tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Projection, rotation, write to the cache, attention, projection."""

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
        self.layer, self.num_heads, self.num_kv_heads, self.head_dim = layer, num_heads, num_kv_heads, head_dim
        outs = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self.qkv = Linear(hidden_size, outs, bias=bias, dtype=dtype)
        self.out = Linear(num_heads * head_dim, {"out": hidden_size}, bias=out_bias, dtype=dtype)

    def forward(self, x_TH: torch.Tensor, step: StepContext) -> torch.Tensor:
        heads = self.qkv(x_TH).view(x_TH.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = Rope.apply_to(heads[:, :num_rotated], step.angles)
        keys, values = step.cache[self.layer]
        write_kv(keys, step.slot_index, rotated[:, self.num_heads :])
        write_kv(values, step.slot_index, heads[:, num_rotated:])
        mixed = paged_attention(rotated[:, : self.num_heads], keys, values, step.plan, self.head_dim**-0.5)
        return self.out(mixed.flatten(1))
