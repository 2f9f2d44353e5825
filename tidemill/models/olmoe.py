"""OLMoE: experts in every layer, and norms of all query heads and all key heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Block, Llama, from_settings, source_of
from tidemill.models.mixtral import expert_names, gguf_experts, hf_experts
from tidemill.models.olmo2 import NormedAttention
from tidemill.models.settings import Nullable, Settings, refuse, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class OlmoeBlock(Block):
    attention: ClassVar = NormedAttention


class Olmoe(Llama):
    PAIRS: ClassVar = ()
    block: ClassVar = OlmoeBlock
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *expert_names("model.layers.{}.mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        (
            "blocks.{}.attn.q_norm",
            "weight",
            "model.layers.{}.self_attn.q_norm",
            "blk.{}.attn_q_norm",
        ),
        (
            "blocks.{}.attn.k_norm",
            "weight",
            "model.layers.{}.self_attn.k_norm",
            "blk.{}.attn_k_norm",
        ),
    ]

    KEYS: ClassVar = {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        "clip_qkv": Nullable(float), "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False, **rope_keys(),
    }  # fmt: skip
    ALIASES: ClassVar = {"num_local_experts": "num_experts"}

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        refuse(
            settings,
            ["clip_qkv"],
            source_of(checkpoint),
            "(a limit of queries, keys and values) is not supported",
        )
        config = from_settings(settings, checkpoint)
        spec = hf_experts(settings, config, renormalise=settings["norm_topk_prob"])
        return replace(config, experts=(spec,) * config.num_layers)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        refuse(checkpoint.metadata, ["olmoe.attention.clamp_kqv"], checkpoint.path)
        return replace(
            config,
            experts=(gguf_experts(checkpoint, config, renormalise=False),) * config.num_layers,
        )
