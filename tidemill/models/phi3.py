"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama whose files hold q, k and v in one matrix, and gate and up in another."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.llama import Llama

_FUSED = {
    "blocks.{}.attn.qkv": ("model.layers.{}.self_attn.qkv_proj", "blk.{}.attn_qkv"),
    "blocks.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_up_proj", "blk.{}.ffn_up"),
}


class Phi3(Llama):
    NAMES: ClassVar = [(layer, part, *_FUSED.get(layer, stored)) for layer, part, *stored in Llama.NAMES]

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return
