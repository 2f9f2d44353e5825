"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in most layers. Qwen2-MoE has one more that
all tokens go through."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Llama, from_settings, source_of, windows_of, with_windows
from tidemill.models.mixtral import expert_names, gguf_experts, hf_experts
from tidemill.models.qwen2 import Qwen2
from tidemill.models.qwen3 import Qwen3
from tidemill.models.settings import Nullable, Settings, required, rope_keys
from tidemill.types.model_config import ModelConfig, MoESpec
from tidemill.weights.checkpoint import Checkpoint

_NAMES = expert_names("model.layers.{}.mlp", "gate", "gate_proj", "up_proj", "down_proj")


def with_experts(config: ModelConfig, spec: MoESpec, settings: Settings) -> ModelConfig:
    """Experts in every so many layers, unless they are listed as dense."""
    every, dense = max(1, settings["decoder_sparse_step"]), settings["mlp_only_layers"] or []
    sparse = (layer not in dense and (layer + 1) % every == 0 for layer in range(config.num_layers))
    return replace(config, experts=tuple(spec if is_sparse else None for is_sparse in sparse))


class Qwen2MoE(Qwen2):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *_NAMES,
        (
            "blocks.{}.mlp.router",
            "shared",
            "model.layers.{}.mlp.shared_expert_gate",
            "blk.{}.ffn_gate_inp_shexp",
        ),
        (
            "blocks.{}.mlp.experts",
            "shared_gate",
            "model.layers.{}.mlp.shared_expert.gate_proj",
            "blk.{}.ffn_gate_shexp",
        ),
        (
            "blocks.{}.mlp.experts",
            "shared_up",
            "model.layers.{}.mlp.shared_expert.up_proj",
            "blk.{}.ffn_up_shexp",
        ),
        (
            "blocks.{}.mlp.experts",
            "shared_down",
            "model.layers.{}.mlp.shared_expert.down_proj",
            "blk.{}.ffn_down_shexp",
        ),
    ]

    KEYS: ClassVar = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": Nullable(int, 16), "head_dim": Nullable(int), "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": Nullable(int, 4096), "max_window_layers": 28,
        "layer_types": Nullable(list), "qkv_bias": True, "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
        "mlp_only_layers": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config, num_layers = from_settings(settings, checkpoint), settings["num_hidden_layers"]
        window = settings["sliding_window"] if settings["use_sliding_window"] else None
        kinds = settings["layer_types"] or [
            "full_attention" if i % 2 or i >= settings["max_window_layers"] else "sliding_attention"
            for i in range(num_layers)
        ]
        config = with_windows(config, windows_of(kinds, window, num_layers, source_of(checkpoint)))
        spec = hf_experts(
            settings, config, size="moe_intermediate_size", shared_size=settings["shared_expert_intermediate_size"],
            renormalise=settings["norm_topk_prob"],
        )  # fmt: skip
        return with_experts(replace(config, attention_bias=settings["qkv_bias"]), spec, settings)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        key = f"{checkpoint.architecture}.expert_shared_feed_forward_length"
        shared = required(checkpoint.metadata, key, int, checkpoint.path)
        spec = gguf_experts(checkpoint, config, renormalise=False, shared_size=shared)
        return replace(config, experts=(spec,) * config.num_layers)


class Qwen3MoE(Qwen3):
    has_experts: ClassVar = True
    NAMES: ClassVar = [*Qwen3.NAMES, *_NAMES]

    KEYS: ClassVar = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": Nullable(int, 4),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": Nullable(int, 4096),
        "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        "num_experts": 128, "norm_topk_prob": False, "mlp_only_layers": Nullable(list),
        **rope_keys(),
    }  # fmt: skip
    ALIASES: ClassVar = {"num_local_experts": "num_experts"}

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """A window is every layer's."""
        window = settings["sliding_window"] if settings["use_sliding_window"] else None
        config = from_settings(settings | {"sliding_window": window}, checkpoint)
        spec = hf_experts(
            settings, config, size="moe_intermediate_size", renormalise=settings["norm_topk_prob"]
        )
        return with_experts(config, spec, settings)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        return replace(
            config,
            experts=(gguf_experts(checkpoint, config, renormalise=True),) * config.num_layers,
        )
