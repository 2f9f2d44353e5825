"""OLMo 2: norms after attention and feed-forward instead of before them, and of all query heads and all key heads together."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from tidemill.config import ModelConfig
from tidemill.kernels.kv_cache import PLAIN
from tidemill.kernels.norm import qk_norm
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP
from tidemill.layers.norm import RMSNorm
from tidemill.models.llama import Llama


class NormedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, dtype: str) -> None:
        super().__init__(config, layer, dtype)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        qkv_TC = qk_norm(self.qkv(x_TH), self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.out(step.attend(self.layer, qkv_TC, PLAIN))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn, self.post_attn_norm = NormedAttention(config, layer, dtype), RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias, dtype, config.act)
        self.post_mlp_norm = RMSNorm(size, eps)

    def forward(self, hidden_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        hidden_TH = self.post_attn_norm.added_to(hidden_TH, self.attn(hidden_TH, step))
        return self.post_mlp_norm.added_to(hidden_TH, self.mlp(hidden_TH))


class Olmo2(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.attn_norm", "blocks.{}.mlp_norm")),
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
        ("blocks.{}.post_attn_norm", "weight", "model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm"),
        ("blocks.{}.post_mlp_norm", "weight", "model.layers.{}.post_feedforward_layernorm", "blk.{}.post_ffw_norm"),
    ]

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        for block in self.blocks:
            residual_TH = block(residual_TH, step)
        return self.norm(residual_TH)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return
