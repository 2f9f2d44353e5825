"""ELECTRA: a BERT whose embeddings may have another size than its layers, which they are projected
to."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.layers.attention import AttentionStep
from tidemill.layers.linear import Linear
from tidemill.models.bert import Bert, BertCrossEncoder
from tidemill.models.settings import Settings
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Electra(Bert):
    PREFIXES: ClassVar = ("", "electra.")
    NAMES: ClassVar = [*Bert.NAMES, ("project", "project", "embeddings_project", "")]
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Bert.IGNORED,
        r"(discriminator|generator)_(predictions|lm_head)\..*",
    )
    KEYS: ClassVar = {
        **Bert.KEYS, "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024,
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        if config.embedding_size:
            self.project = Linear(
                config.embedding_size, {"project": config.hidden_size}, bias=True, weights=weights
            )

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        x_TH = self.embed_norm(residual_TH)
        if self.config.embedding_size:
            x_TH = self.project(x_TH)
        for block in self.blocks:
            x_TH = block(x_TH, step)
        return x_TH

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
        config, size = super().of_settings(settings, checkpoint, source), settings["embedding_size"]
        return replace(config, embedding_size=size if size != config.hidden_size else 0)


class ElectraCrossEncoder(Electra, BertCrossEncoder):
    HEAD: ClassVar = [
        ("dense", "dense", "classifier.dense", ""),
        ("labels", "labels", "classifier.out_proj", ""),
    ]
    IGNORED: ClassVar = BertCrossEncoder.IGNORED
    head_act: ClassVar = "gelu"
