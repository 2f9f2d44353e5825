"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without a gate, windows in all layers or
none."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.layers.norm import LayerNorm
from tidemill.models.gpt2 import Block
from tidemill.models.llama import Llama, from_settings
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_MLP = {
    "gate": ("blocks.{}.mlp.up", "up", "model.layers.{}.mlp.c_fc", "blk.{}.ffn_up"),
    "down": ("blocks.{}.mlp.down", "down", "model.layers.{}.mlp.c_proj", "blk.{}.ffn_down"),
}


class Starcoder2(Llama):
    block: ClassVar = Block
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        _MLP.get(line[1], line) for line in Llama.NAMES if line[1] != "up" and line[0] != "ropes.0"
    ]
    KEYS: ClassVar = {
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
        "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
        "tie_word_embeddings": True, "use_bias": True, "sliding_window": Nullable(int), **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        has_bias = settings["use_bias"]
        more = {
            "rms_norm_eps": settings["norm_epsilon"],
            "attention_bias": has_bias,
            "mlp_bias": has_bias,
        }
        return from_settings(settings | more, checkpoint)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = replace(super().read_config(checkpoint), is_gated=False)
        if checkpoint.format != "gguf":
            return config
        return replace(
            config, act="gelu_tanh", attention_bias=True, attention_out_bias=True, mlp_bias=True
        )
