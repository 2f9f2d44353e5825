"""Granite 3: a Llama with multipliers of embeddings, scores, residuals and logits; with experts, too."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.model_config import ModelConfig
from tidemill.models.base import optional
from tidemill.models.llama import Llama
from tidemill.models.mixtral import gguf_experts, hf_experts
from tidemill.weights.checkpoint import Checkpoint

_KEYS = {  # of embeddings, scores, residuals; what logits are divided by
    "hf": ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    "gguf": ("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),  # after the architecture
}


class Granite(Llama):
    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_T) * self.config.embedding_scale

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden_TH * self.config.logits_scale, out)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        is_gguf = checkpoint.format == "gguf"
        source, prefix = (checkpoint.path, f"{checkpoint.architecture}.") if is_gguf else (checkpoint.path / "config.json", "")
        of_scores = config.attention_layers[0].scale if is_gguf else 1.0  # where the file does not say
        values = []
        for name, default in zip(_KEYS[checkpoint.format], (1.0, of_scores, 1.0, 1.0), strict=True):
            key = prefix + name
            values.append(optional(checkpoint.metadata, key, float, default, source))
            if not 1e-6 < values[-1] < 1e6:
                raise CheckpointError(f"{source}: {key} is {values[-1]}, which cannot be used.")
        embedding, attention, residual, logits = values
        layers = tuple(replace(spec, scale=attention) for spec in config.attention_layers)
        return replace(config, layers=layers, embedding_scale=embedding, residual_scale=residual, logits_scale=1 / logits)


class GraniteMoE(Granite):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        ("blocks.{}.mlp.router", "router", "model.layers.{}.block_sparse_moe.router.layer", "blk.{}.ffn_gate_inp"),
        ("blocks.{}.mlp.experts", "gate_ups", "=model.layers.{}.block_sparse_moe.input_linear.weight", ""),
        ("blocks.{}.mlp.experts", "gates", "", "blk.{}.ffn_gate_exps"),
        ("blocks.{}.mlp.experts", "ups", "", "blk.{}.ffn_up_exps"),
        ("blocks.{}.mlp.experts", "downs", "=model.layers.{}.block_sparse_moe.output_linear.weight", "blk.{}.ffn_down_exps"),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        read = gguf_experts if checkpoint.format == "gguf" else hf_experts
        return replace(config, experts=(read(checkpoint, config, renormalise=True),) * config.num_layers)
