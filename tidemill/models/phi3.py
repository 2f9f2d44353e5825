"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama whose files hold q, k and v in one matrix, and gate
and up in another."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.llama import Llama, from_settings
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

FUSED_GATE_UP = ("model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up")
_FUSED = {
    "blocks.{}.attn.qkv": ("model.layers.{}.self_attn.qkv_proj", "blk.{}.attn_qkv"),
    "blocks.{}.mlp.gate_up": FUSED_GATE_UP,
}


class Phi3(Llama):
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        (layer, part, *_FUSED.get(layer, stored)) for layer, part, *stored in Llama.NAMES
    ]
    KEYS: ClassVar = {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": Nullable(int),
        "partial_rotary_factor": 1.0, **rope_keys(), "original_max_position_embeddings": 4096,
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """Older files call longrope su or yarn."""
        for key in ("rope_scaling", "rope_parameters"):
            rope = settings[key] or {}
            if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
                settings[key] = rope | {"rope_type": "longrope"}
        return from_settings(settings, checkpoint)
