"""Qwen3, dense: a Llama whose queries and keys are normed head by head before they are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Llama, from_settings, with_windows
from tidemill.models.qwen2 import late_windows
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Qwen3(Llama):
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        *Llama.NAMES,
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
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": Nullable(int, 32), "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": Nullable(int, 4096),
        "max_window_layers": 28, "layer_types": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        return with_windows(from_settings(settings, checkpoint), late_windows(settings, checkpoint))

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        return replace(super().read_config(checkpoint), qk_norm=True)
