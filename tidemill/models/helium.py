"""Helium: a Llama whose rotated pairs are neighbouring dimensions."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.llama import Llama
from tidemill.models.settings import rope_keys


class Helium(Llama):
    PAIRS: ClassVar = ("hf",)
    KEYS: ClassVar = {
        "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040,
        "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, **rope_keys(100000.0),
    }  # fmt: skip
