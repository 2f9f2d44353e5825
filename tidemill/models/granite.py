"""Granite 3: a Llama with multipliers of embeddings, scores, residuals and logits; with experts,
too."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.mixtral import gguf_experts, hf_experts
from tidemill.models.settings import Nullable, Settings, optional, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

# after the architecture
_GGUF = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
# Of embeddings, scores and residuals; what logits are divided by.
_SCALES = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


class Granite(Llama):
    KEYS: ClassVar = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, **_SCALES, **rope_keys(),
    }  # fmt: skip

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_T) * self.config.embedding_scale

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden_TH * self.config.logits_scale, out)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        return _scaled(
            from_settings(settings, checkpoint),
            {key: settings[key] for key in _SCALES},
            source_of(checkpoint),
        )

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        defaults = (1.0, config.layers[0].scale, 1.0, 1.0)  # where the file does not say
        keys = [f"{checkpoint.architecture}.{key}" for key in _GGUF]
        multipliers = zip(keys, defaults, strict=True)
        values = {
            key: optional(checkpoint.metadata, key, float, default, checkpoint.path)
            for key, default in multipliers
        }
        return _scaled(config, values, checkpoint.path)


def _scaled(config: ModelConfig, values: Settings, source: object) -> ModelConfig:
    for key, value in values.items():
        if not 1e-6 < value < 1e6:
            raise CheckpointError(f"{source}: {key} is {value}, which cannot be used.")
    embedding, attention, residual, logits = values.values()
    layers = tuple(spec.but(scale=attention) for spec in config.layers)
    return replace(
        config,
        layers=layers,
        embedding_scale=embedding,
        residual_scale=residual,
        logits_scale=1 / logits,
    )


class GraniteMoE(Granite):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        (
            "blocks.{}.mlp.router",
            "router",
            "model.layers.{}.block_sparse_moe.router.layer",
            "blk.{}.ffn_gate_inp",
        ),
        (
            "blocks.{}.mlp.experts",
            "gate_ups",
            "=model.layers.{}.block_sparse_moe.input_linear.weight",
            "",
        ),
        ("blocks.{}.mlp.experts", "gates", "", "blk.{}.ffn_gate_exps"),
        ("blocks.{}.mlp.experts", "ups", "", "blk.{}.ffn_up_exps"),
        (
            "blocks.{}.mlp.experts",
            "downs",
            "=model.layers.{}.block_sparse_moe.output_linear.weight",
            "blk.{}.ffn_down_exps",
        ),
    ]
    KEYS: ClassVar = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "num_local_experts": 8, "num_experts_per_tok": 2, **_SCALES, **rope_keys(),
    }  # fmt: skip

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        return replace(
            config,
            experts=(gguf_experts(checkpoint, config, renormalise=True),) * config.num_layers,
        )

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = super().of_settings(settings, checkpoint)
        spec = hf_experts(settings, config, num="num_local_experts", renormalise=True)
        return replace(config, experts=(spec,) * config.num_layers)
