"""ALBERT: a BERT with small embeddings, whose layers share their weights in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.layers.attention import AttentionStep
from tidemill.layers.linear import Linear
from tidemill.models.bert import Bert, BertCrossEncoder
from tidemill.models.settings import Settings
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_LAYER = "encoder.albert_layer_groups.{}.albert_layers.0"


class Albert(Bert):
    PREFIXES: ClassVar = ("", "albert.")
    NAMES: ClassVar = [
        *(line for line in Bert.NAMES if not line[0].startswith("blocks")),
        ("project", "project", "encoder.embedding_hidden_mapping_in", ""),
        ("blocks.{}.attn.qkv", "q", f"{_LAYER}.attention.query", ""),
        ("blocks.{}.attn.qkv", "k", f"{_LAYER}.attention.key", ""),
        ("blocks.{}.attn.qkv", "v", f"{_LAYER}.attention.value", ""),
        ("blocks.{}.attn.out", "out", f"{_LAYER}.attention.dense", ""),
        ("blocks.{}.attn_norm", "weight", f"{_LAYER}.attention.LayerNorm", ""),
        ("blocks.{}.mlp.up", "up", f"{_LAYER}.ffn", ""),
        ("blocks.{}.mlp.down", "down", f"{_LAYER}.ffn_output", ""),
        ("blocks.{}.mlp_norm", "weight", f"{_LAYER}.full_layer_layer_norm", ""),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Bert.IGNORED,
        r"(albert\.)?pooler\.(weight|bias)",
        r"(predictions|sop_classifier)\..*",
    )
    KEYS: ClassVar = {
        **Bert.KEYS, "vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096,
        "num_hidden_groups": 1, "inner_group_num": 1, "num_attention_heads": 64,
        "intermediate_size": 16384, "hidden_act": "gelu_new",
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(replace(config, layers=config.layers[: config.num_own_layers]), weights)
        self.config = self.whole = config
        self.project = Linear(
            config.embedding_size, {"project": config.hidden_size}, bias=True, weights=weights
        )

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        x_TH, repeats = (
            self.project(self.embed_norm(residual_TH)),
            self.config.num_layers // self.config.num_own_layers,
        )
        for block in self.blocks:
            for _ in range(repeats):
                x_TH = block(x_TH, step)
        return x_TH

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
        config, groups = (
            super().of_settings(settings, checkpoint, source),
            settings["num_hidden_groups"],
        )
        if settings["inner_group_num"] != 1 or groups < 1 or config.num_layers % groups:
            raise CheckpointError(
                f"{source}: {config.num_layers} layers in {groups} groups of {settings['inner_group_num']} are not supported.",
                fix="num_hidden_groups must divide num_hidden_layers, and inner_group_num be 1.",
            )
        return replace(config, embedding_size=settings["embedding_size"], num_own_layers=groups)


class AlbertCrossEncoder(Albert, BertCrossEncoder):
    HEAD: ClassVar = [
        ("dense", "dense", "albert.pooler", ""),
        ("labels", "labels", "classifier", ""),
    ]
    IGNORED: ClassVar = BertCrossEncoder.IGNORED
