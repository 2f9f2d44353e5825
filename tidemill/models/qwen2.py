"""Qwen2 and Qwen2.5: a Llama with biases of q, k and v."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Llama, from_settings, source_of, windows_of, with_windows
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Qwen2(Llama):
    PAIRS: ClassVar = ()
    KEYS: ClassVar = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": Nullable(int, 32), "head_dim": Nullable(int), "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": Nullable(int, 4096), "max_window_layers": 28,
        "layer_types": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = replace(from_settings(settings, checkpoint), attention_bias=True)
        return with_windows(config, late_windows(settings, checkpoint))

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        return replace(config, attention_bias=True) if checkpoint.format == "gguf" else config


def late_windows(settings: Settings, checkpoint: Checkpoint) -> list[int]:
    """Each layer's sliding window: switched on by a key of their own, from a certain layer on
    unless the layers are listed."""
    num_layers, first = settings["num_hidden_layers"], settings["max_window_layers"]
    window = settings["sliding_window"] if settings["use_sliding_window"] else None
    kinds = settings["layer_types"] or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    return windows_of(kinds, window, num_layers, source_of(checkpoint))
