"""Seed-OSS: a Llama with biases of q, k and v."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Llama, from_settings
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class SeedOss(Llama):
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] != "blocks.{}.mlp_norm"),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.post_attention_norm",
        ),
    ]
    KEYS: ClassVar = {
        "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": Nullable(int, 8),
        "head_dim": Nullable(int, 128), "hidden_act": "silu", "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": True,
        "attention_out_bias": False, "mlp_bias": False, **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = from_settings(settings, checkpoint)
        return replace(config, attention_out_bias=settings["attention_out_bias"])
