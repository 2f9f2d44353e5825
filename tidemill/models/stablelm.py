"""StableLM: a Llama with LayerNorm, of which a quarter of each head's dimensions is rotated. In
some, attention and feed-forward read the same norm, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.kernels.norm import add
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.settings import Settings, refuse, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, inner = config.hidden_size, inner_size(config, layer, weights)
        self.attn_norm = LayerNorm(size, config.norm_eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm = None if config.is_parallel else LayerNorm(size, config.norm_eps)
        self.mlp = GatedMLP(size, inner, config.mlp_bias, weights, config.act)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        x_TH = self.attn_norm.add(delta_TH, residual_TH)
        delta_TH = self.attn(x_TH, step)
        if self.mlp_norm is not None:
            return self.mlp(self.mlp_norm.add(delta_TH, residual_TH))
        add(self.mlp(x_TH), delta_TH)
        return delta_TH


class StableLm(Llama):
    block: ClassVar = Block
    PAIRS: ClassVar = ()
    KEYS: ClassVar = {
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "hidden_act": "silu", "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False, "use_qkv_bias": False, "qk_layernorm": False,
        "use_parallel_residual": False, "partial_rotary_factor": 0.25, **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        why = "(norms of query and key heads) is not supported"
        refuse(settings, ["qk_layernorm"], source_of(checkpoint), why)
        config = from_settings(settings | {"rms_norm_eps": settings["layer_norm_eps"]}, checkpoint)
        is_parallel, has_bias = settings["use_parallel_residual"], settings["use_qkv_bias"]
        return replace(config, is_parallel=is_parallel, attention_bias=has_bias)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        is_parallel = all(tensor.name != "blk.0.ffn_norm.weight" for tensor in checkpoint.tensors())
        return replace(config, is_parallel=is_parallel)
