"""GLM-4: a Llama with biases of q, k and v, gate and up in one matrix, of which half of each head's
dimensions are rotated, in neighbouring pairs. GLM-4-0414 has norms behind attention and
feed-forward, too."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.gemma import Block
from tidemill.models.llama import Llama
from tidemill.models.phi3 import FUSED_GATE_UP
from tidemill.models.settings import Nullable, rope_keys


class Glm(Llama):
    PAIRS: ClassVar = ("hf", "gguf")
    NAMES: ClassVar = [
        (layer, part, *(FUSED_GATE_UP if layer.endswith("gate_up") else stored))
        for layer, part, *stored in Llama.NAMES
        if layer != "ropes.0"
    ]
    KEYS: ClassVar = {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": Nullable(int, 2),
        "head_dim": Nullable(int, 128), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": False, "attention_bias": True,
        "partial_rotary_factor": 0.5, **rope_keys(),
    }  # fmt: skip


class Glm4(Glm):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(line for line in Glm.NAMES if line[0] != "blocks.{}.mlp_norm"),
        (
            "blocks.{}.post_attn_norm",
            "weight",
            "model.layers.{}.post_self_attn_layernorm",
            "blk.{}.post_attention_norm",
        ),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.ffn_norm",
        ),
        (
            "blocks.{}.post_mlp_norm",
            "weight",
            "model.layers.{}.post_mlp_layernorm",
            "blk.{}.post_ffw_norm",
        ),
    ]
