"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in most layers. Qwen2-MoE has one more that all tokens go through."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.model_config import ModelConfig
from tidemill.models.base import optional, required
from tidemill.models.llama import Llama
from tidemill.models.mixtral import expert_names, gguf_experts, hf_experts
from tidemill.models.qwen2 import Qwen2
from tidemill.models.qwen3 import Qwen3
from tidemill.weights.checkpoint import Checkpoint

_NAMES = expert_names("model.layers.{}.mlp", "gate", "gate_proj", "up_proj", "down_proj")


def are_sparse(checkpoint: Checkpoint, num_layers: int) -> list[bool]:
    """Which layers have experts. GGUF files have no word for it: all have."""
    if checkpoint.format == "gguf":
        return [True] * num_layers
    data, source = checkpoint.metadata, checkpoint.path / "config.json"
    every = max(1, optional(data, "decoder_sparse_step", int, 1, source))
    dense = optional(data, "mlp_only_layers", list, None, source) or []
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]


class Qwen2MoE(Qwen2):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *_NAMES,
        ("blocks.{}.mlp.router", "shared", "model.layers.{}.mlp.shared_expert_gate", "blk.{}.ffn_gate_inp_shexp"),
        ("blocks.{}.mlp.experts", "shared_gate", "model.layers.{}.mlp.shared_expert.gate_proj", "blk.{}.ffn_gate_shexp"),
        ("blocks.{}.mlp.experts", "shared_up", "model.layers.{}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp"),
        ("blocks.{}.mlp.experts", "shared_down", "model.layers.{}.mlp.shared_expert.down_proj", "blk.{}.ffn_down_shexp"),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data, arch = checkpoint.metadata, checkpoint.architecture
        config = super().read_config(checkpoint)
        if checkpoint.format == "gguf":
            key = f"{arch}.expert_shared_feed_forward_length"
            spec = gguf_experts(checkpoint, config, renormalise=False, shared_size=required(data, key, int, checkpoint.path))
        else:
            config = replace(config, attention_bias=data.get("qkv_bias") is not False, attention_out_bias=False)
            key, source = "shared_expert_intermediate_size", checkpoint.path / "config.json"
            spec = hf_experts(
                checkpoint, config, renormalise=bool(data.get("norm_topk_prob")), shared_size=required(data, key, int, source)
            )
        sparse = are_sparse(checkpoint, config.num_layers)
        return replace(config, experts=tuple(spec if is_sparse else None for is_sparse in sparse))


class Qwen3MoE(Qwen3):
    has_experts: ClassVar = True
    NAMES: ClassVar = [*Qwen3.NAMES, *_NAMES]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format == "gguf":
            spec = gguf_experts(checkpoint, config, renormalise=True)
        else:
            spec = hf_experts(checkpoint, config, renormalise=bool(checkpoint.metadata.get("norm_topk_prob")))
        sparse = are_sparse(checkpoint, config.num_layers)
        return replace(config, experts=tuple(spec if is_sparse else None for is_sparse in sparse))
