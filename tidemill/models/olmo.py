"""OLMo 1: a Llama whose norms have no weights; some cut off queries, keys and values at a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.clip import clip
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.models import gpt2
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.settings import Nullable, Settings, optional, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint, PartOf

_EPS = 1e-5


class ClippedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        self._limit = config.clip_qkv

    def _project(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return clip(self.qkv(x_TH), self._limit)


class Block(gpt2.Block):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        self.attn_norm, self.mlp_norm = (
            LayerNorm(config.hidden_size, config.norm_eps, learned=()) for _ in range(2)
        )
        if config.clip_qkv:
            self.attn = ClippedAttention(config, layer, weights)
        self.mlp = GatedMLP(
            config.hidden_size,
            inner_size(config, layer, weights),
            config.mlp_bias,
            weights,
            config.act,
        )


class Olmo(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [line for line in Llama.NAMES if not line[0].endswith("norm")]
    KEYS: ClassVar = {
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "clip_qkv": Nullable(float),
        **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, learned=())

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = from_settings(settings | {"rms_norm_eps": _EPS}, checkpoint)
        return _clipped(config, settings["clip_qkv"], "clip_qkv", source_of(checkpoint))

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        if checkpoint.format != "gguf":
            return super().read_config(checkpoint)
        data, key = checkpoint.metadata, "olmo.attention.clamp_kqv"
        limit = optional(data, key, float, None, checkpoint.path)
        config = super().read_config(
            PartOf(checkpoint, data | {"olmo.attention.layer_norm_rms_epsilon": _EPS})
        )
        return _clipped(config, limit, key, checkpoint.path)


def _clipped(config: ModelConfig, limit: float | None, key: str, source: object) -> ModelConfig:
    if limit is not None and not 0 < limit < 1e30:
        raise CheckpointError(f"{source}: {key} is {limit}, which cannot be used.")
    return replace(config, clip_qkv=limit or 0.0)
