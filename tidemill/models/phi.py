"""Phi-1, 1.5 and 2: attention and feed-forward read the same norm, side by side. LayerNorm, biases, partial rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.norm import add
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Head
from tidemill.layers.mlp import MLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.model_config import ModelConfig
from tidemill.models.base import optional, required
from tidemill.models.llama import Llama
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint, PartOf

_ROTATED = 0.5  # of a head, in files that do not say


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer, weights)
        self.mlp = MLP(config.hidden_size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)

    def forward(self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: the norm adds what came before it."""
        x_TH = self.attn_norm.add(delta_TH, residual_TH)
        delta_TH = self.attn(x_TH, step)
        add(self.mlp(x_TH), delta_TH)
        return delta_TH


class Phi(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        ("embed", "weight", "model.embed_tokens", "token_embd"),
        ("blocks.{}.attn_norm", "weight", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
        *(("blocks.{}.attn.qkv", part, f"model.layers.{{}}.self_attn.{part}_proj", f"blk.{{}}.attn_{part}") for part in "qkv"),
        *(("blocks.{}.attn.qkv", part, "", "blk.{}.attn_qkv") for part in "qkv"),  # in files of the first converters
        ("blocks.{}.attn.out", "out", "model.layers.{}.self_attn.dense", "blk.{}.attn_output"),
        ("blocks.{}.mlp.up", "up", "model.layers.{}.mlp.fc1", "blk.{}.ffn_up"),
        ("blocks.{}.mlp.down", "down", "model.layers.{}.mlp.fc2", "blk.{}.ffn_down"),
        ("norm", "weight", "model.final_layernorm", "output_norm"),
    ]

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Head(config.hidden_size, config.vocab_size, weights, bias=True)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        """As a Llama's, which calls the norms' epsilon otherwise."""
        data, is_gguf = checkpoint.metadata, checkpoint.format == "gguf"
        own = _of_gguf(data, checkpoint.path) if is_gguf else _of_hf(data, checkpoint.path / "config.json")
        config = super().read_config(PartOf(checkpoint, data | own))
        act = "gelu_tanh" if is_gguf else config.act
        return replace(config, act=act, is_gated=False, attention_bias=True, attention_out_bias=True, mlp_bias=True)


def _of_gguf(data: dict[str, Any], source: object) -> dict[str, Any]:
    return {"phi2.attention.layer_norm_rms_epsilon": required(data, "phi2.attention.layer_norm_epsilon", float, source)}


def _of_hf(data: dict[str, Any], source: object) -> dict[str, Any]:
    if data.get("qk_layernorm"):
        raise CheckpointError(f"{source}: qk_layernorm (norms of query and key heads) is not supported.")
    rope = optional(data, "rope_parameters", dict, {}, source)
    rotated = rope.get("partial_rotary_factor", _ROTATED)
    return {
        "rms_norm_eps": optional(data, "layer_norm_eps", float, 1e-5, source),
        "partial_rotary_factor": optional(data, "partial_rotary_factor", float, rotated, source),
        "hidden_act": data.get("hidden_act", "gelu_new"),
    }
