"""Qwen3, dense: a Llama whose queries and keys are normed head by head before they are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.model_config import ModelConfig
from tidemill.models.llama import Llama
from tidemill.weights.checkpoint import Checkpoint


class Qwen3(Llama):
    NAMES: ClassVar = [
        *Llama.NAMES,
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        return replace(super().read_config(checkpoint), qk_norm=True)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return
