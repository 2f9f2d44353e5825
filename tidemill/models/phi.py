"""Phi-1, 1.5 and 2: attention and feed-forward read the same norm, side by side. LayerNorm, biases,
partial rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.kernels.norm import add
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Head
from tidemill.layers.mlp import MLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.settings import Nullable, Settings, refuse, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer, weights)
        self.mlp = MLP(
            config.hidden_size,
            inner_size(config, layer, weights),
            config.mlp_bias,
            weights,
            config.act,
        )

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: the norm adds
        what came before it."""
        x_TH = self.attn_norm.add(delta_TH, residual_TH)
        delta_TH = self.attn(x_TH, step)
        add(self.mlp(x_TH), delta_TH)
        return delta_TH


class Phi(Llama):
    PAIRS: ClassVar = ()
    block: ClassVar = Block
    NAMES: ClassVar = [
        ("embed", "weight", "model.embed_tokens", "token_embd"),
        ("blocks.{}.attn_norm", "weight", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
        *(
            (
                "blocks.{}.attn.qkv",
                part,
                f"model.layers.{{}}.self_attn.{part}_proj",
                f"blk.{{}}.attn_{part}",
            )
            for part in "qkv"
        ),
        # in files of the first converters
        *(("blocks.{}.attn.qkv", part, "", "blk.{}.attn_qkv") for part in "qkv"),
        ("blocks.{}.attn.out", "out", "model.layers.{}.self_attn.dense", "blk.{}.attn_output"),
        ("blocks.{}.mlp.up", "up", "model.layers.{}.mlp.fc1", "blk.{}.ffn_up"),
        ("blocks.{}.mlp.down", "down", "model.layers.{}.mlp.fc2", "blk.{}.ffn_down"),
        ("norm", "weight", "model.final_layernorm", "output_norm"),
    ]

    KEYS: ClassVar = {
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "gelu_new", "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "partial_rotary_factor": 0.5,
        "qk_layernorm": False, **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Head(config.hidden_size, config.vocab_size, weights, bias=True)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        refuse(
            settings,
            ["qk_layernorm"],
            source_of(checkpoint),
            "(norms of query and key heads) is not supported",
        )
        return from_settings(settings | {"rms_norm_eps": settings["layer_norm_eps"]}, checkpoint)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        act = "gelu_tanh" if checkpoint.format == "gguf" else config.act
        return replace(
            config,
            act=act,
            is_gated=False,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
        )
