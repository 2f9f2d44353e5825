"""Nemotron and Minitron: LayerNorm whose weights are stored less 1, squared ReLU without a gate,
half of each head's dimensions rotated."""

from __future__ import annotations

from typing import ClassVar

from tidemill.layers.norm import LayerNorm
from tidemill.models.arcee import Arcee
from tidemill.models.gpt2 import Block
from tidemill.models.llama import from_settings
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Nemotron(Arcee):
    block: ClassVar = Block
    PAIRS: ClassVar = ()
    KEYS: ClassVar = {
        "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "relu2", "max_position_embeddings": 4096,
        "norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.5, **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def loaded(self, checkpoint_format: str) -> None:
        for module in self.modules() if checkpoint_format == "hf" else ():
            if isinstance(module, LayerNorm):
                module.weight.add_(1)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        return from_settings(settings | {"rms_norm_eps": settings["norm_eps"]}, checkpoint)
