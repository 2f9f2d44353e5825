"""OLMoE: experts in every layer, and norms of all query heads and all key heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.errors import CheckpointError
from tidemill.model_config import ModelConfig
from tidemill.models.llama import Block, Llama
from tidemill.models.mixtral import expert_names, gguf_experts, hf_experts
from tidemill.models.olmo2 import NormedAttention
from tidemill.weights.checkpoint import Checkpoint


class OlmoeBlock(Block):
    attention: ClassVar = NormedAttention


class Olmoe(Llama):
    block: ClassVar = OlmoeBlock
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *expert_names("model.layers.{}.mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config, data = super().read_config(checkpoint), checkpoint.metadata
        clip = data.get("clip_qkv", data.get(f"{checkpoint.architecture}.attention.clamp_kqv"))
        if clip:
            raise CheckpointError(f"{checkpoint.path}: queries, keys and values cut off at {clip} (clip_qkv) are not supported.")
        if checkpoint.format == "gguf":
            spec = gguf_experts(checkpoint, config, renormalise=False)
        else:
            spec = hf_experts(checkpoint, config, renormalise=bool(data.get("norm_topk_prob")))
        return replace(config, experts=(spec,) * config.num_layers)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return
