"""Granite 3: a Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from tidemill.errors import CheckpointError
from tidemill.model_config import ModelConfig
from tidemill.models.base import optional
from tidemill.models.llama import Llama
from tidemill.weights.checkpoint import Checkpoint

_KEYS = {  # of embeddings, scores, residuals; what logits are divided by
    "hf": ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    "gguf": ("granite.embedding_scale", "granite.attention.scale", "granite.residual_scale", "granite.logit_scale"),
}


class Granite(Llama):
    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_T) * self.config.embedding_scale

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden_TH * self.config.logits_scale, out)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        source = checkpoint.path if checkpoint.format == "gguf" else checkpoint.path / "config.json"
        of_scores = config.attention_layers[0].scale if checkpoint.format == "gguf" else 1.0  # where the file does not say
        values = []
        for key, default in zip(_KEYS[checkpoint.format], (1.0, of_scores, 1.0, 1.0), strict=True):
            values.append(optional(checkpoint.metadata, key, float, default, source))
            if not 1e-6 < values[-1] < 1e6:
                raise CheckpointError(f"{source}: {key} is {values[-1]}, which cannot be used.")
        embedding, attention, residual, logits = values
        layers = tuple(replace(spec, scale=attention) for spec in config.attention_layers)
        return replace(config, layers=layers, embedding_scale=embedding, residual_scale=residual, logits_scale=1 / logits)
