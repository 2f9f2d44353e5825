"""Cohere's Command R and Command A: attention and feed-forward read the same norm, side by side;
LayerNorm without biases, pairs of neighbouring dimensions are rotated. Command R7B and A have
windows in most layers, and no rotation in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.kernels.norm import add
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.models.llama import (
    Llama,
    from_settings,
    gguf_windows,
    rotated_by_windows,
    source_of,
    windows_of,
)
from tidemill.models.settings import Nullable, Settings, optional, refuse, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_EVERY = 4  # layers, the last of which is without a window, in files that do not say


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps, ["weight"])
        self.attn = Attention(config, layer, weights)
        inner = inner_size(config, layer, weights)
        self.mlp = GatedMLP(config.hidden_size, inner, config.mlp_bias, weights, config.act)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        x_TH = self.attn_norm.add(delta_TH, residual_TH)
        delta_TH = self.attn(x_TH, step)
        add(self.mlp(x_TH), delta_TH)
        return delta_TH


class Cohere(Llama):
    block: ClassVar = Block
    PAIRS: ClassVar = ("hf", "gguf")
    NAMES: ClassVar = [line for line in Llama.NAMES if line[0] != "blocks.{}.mlp_norm"]
    KEYS: ClassVar = {
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
        "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": Nullable(int),
        "hidden_act": "silu", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625,
        "use_qk_norm": False, **rope_keys(500000.0),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, ["weight"])

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden_TH * self.config.logits_scale, out)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        why = "(norms of query and key heads) is not supported"
        refuse(settings, {"use_qk_norm"} & settings.keys(), source_of(checkpoint), why)
        config = from_settings(settings | {"rms_norm_eps": settings["layer_norm_eps"]}, checkpoint)
        return replace(config, logits_scale=settings["logit_scale"])

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        key = f"{checkpoint.architecture}.logit_scale"
        scale = optional(checkpoint.metadata, key, float, 0.0625, checkpoint.path)
        return replace(config, logits_scale=scale)


class Cohere2(Cohere):
    KEYS: ClassVar = {
        **{key: value for key, value in Cohere.KEYS.items() if key != "use_qk_norm"},
        "sliding_window": Nullable(int, 4096), "layer_types": Nullable(list),
        "sliding_window_pattern": _EVERY, **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        num, every = settings["num_hidden_layers"], settings["sliding_window_pattern"] or _EVERY
        kinds = settings["layer_types"] or [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(num)
        ]
        windows = windows_of(kinds, settings["sliding_window"], num, source_of(checkpoint))
        return rotated_by_windows(super().of_settings(settings, checkpoint), windows)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        return rotated_by_windows(config, gguf_windows(checkpoint, config.num_layers, _EVERY))
