"""Arcee (AFM): a Llama with a feed-forward without a gate, of squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import MLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.models.llama import Llama
from tidemill.models.settings import Nullable, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_MLP = {
    "gate": ("blocks.{}.mlp.up", "up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "down": ("blocks.{}.mlp.down", "down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
}


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, inner = config.hidden_size, inner_size(config, layer, weights)
        self.attn_norm, self.mlp_norm = (
            RMSNorm(size, config.norm_eps),
            RMSNorm(size, config.norm_eps),
        )
        self.attn = Attention(config, layer, weights)
        self.mlp = MLP(size, inner, config.mlp_bias, weights, config.act)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        delta_TH = self.attn(self.attn_norm.add(delta_TH, residual_TH), step)
        return self.mlp(self.mlp_norm.add(delta_TH, residual_TH))


class Arcee(Llama):
    block: ClassVar[type[nn.Module]] = Block
    NAMES: ClassVar = [_MLP.get(line[1], line) for line in Llama.NAMES if line[1] != "up"]
    KEYS: ClassVar = {
        "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "relu2", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, **rope_keys(),
    }  # fmt: skip

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        act = "relu2" if checkpoint.format == "gguf" else config.act
        return replace(config, act=act, is_gated=False)
