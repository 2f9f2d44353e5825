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
from tidemill.model_config import ModelConfig
from tidemill.models import gpt2
from tidemill.models.base import optional
from tidemill.models.llama import Llama
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint, PartOf

_EPS = 1e-5
_KEYS = {  # of the limit; of the norms' epsilon, as a Llama's files call it
    "hf": ("clip_qkv", "rms_norm_eps"),
    "gguf": ("olmo.attention.clamp_kqv", "olmo.attention.layer_norm_rms_epsilon"),
}


class ClippedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        self._limit = config.clip_qkv

    def _project(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return clip(self.qkv(x_TH), self._limit)


class Block(gpt2.Block):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        self.attn_norm, self.mlp_norm = (LayerNorm(config.hidden_size, config.norm_eps, is_learned=False) for _ in range(2))
        if config.clip_qkv:
            self.attn = ClippedAttention(config, layer, weights)
        self.mlp = GatedMLP(config.hidden_size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)


class Olmo(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [line for line in Llama.NAMES if not line[0].endswith("norm")]

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, is_learned=False)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path
        key, eps = _KEYS[checkpoint.format]
        limit = optional(data, key, float, None, source)
        if limit is not None and not 0 < limit < 1e30:
            raise CheckpointError(f"{source}: {key} is {limit}, which cannot be used.")
        config = super().read_config(PartOf(checkpoint, data | {eps: _EPS}))
        return replace(config, clip_qkv=limit or 0.0)
