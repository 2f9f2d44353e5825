"""Qwen2 and Qwen2.5: a Llama with biases of q, k and v."""

from __future__ import annotations

from dataclasses import replace

from tidemill.model_config import ModelConfig
from tidemill.models.llama import Llama
from tidemill.weights.checkpoint import Checkpoint


class Qwen2(Llama):
    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        return replace(super().read_config(checkpoint), attention_bias=True)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return
