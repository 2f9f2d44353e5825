"""DistilBERT: a BERT without types of texts."""

from __future__ import annotations

from typing import ClassVar

from tidemill.models.bert import Bert, BertCrossEncoder
from tidemill.models.settings import Nullable, Settings
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_EPS = 1e-12


class DistilBert(Bert):
    PREFIXES: ClassVar = ("", "distilbert.")
    NAMES: ClassVar = [
        *(line for line in Bert.NAMES if not line[0].startswith("blocks")),
        ("blocks.{}.attn.qkv", "q", "transformer.layer.{}.attention.q_lin", ""),
        ("blocks.{}.attn.qkv", "k", "transformer.layer.{}.attention.k_lin", ""),
        ("blocks.{}.attn.qkv", "v", "transformer.layer.{}.attention.v_lin", ""),
        ("blocks.{}.attn.out", "out", "transformer.layer.{}.attention.out_lin", ""),
        ("blocks.{}.attn_norm", "weight", "transformer.layer.{}.sa_layer_norm", ""),
        ("blocks.{}.mlp.up", "up", "transformer.layer.{}.ffn.lin1", ""),
        ("blocks.{}.mlp.down", "down", "transformer.layer.{}.ffn.lin2", ""),
        ("blocks.{}.mlp_norm", "weight", "transformer.layer.{}.output_layer_norm", ""),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Bert.IGNORED,
        r"vocab_(transform|layer_norm|projector)\..*",
    )
    KEYS: ClassVar = {
        "vocab_size": 30522, "max_position_embeddings": 512, "n_layers": 6, "n_heads": 12,
        "dim": 768, "hidden_dim": 3072, "activation": "gelu",
        "matryoshka_dimensions": Nullable(list),
    }  # fmt: skip
    ALIASES: ClassVar = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
        """A BERT's keys by other names."""
        own = {alias: settings[key] for alias, key in cls.ALIASES.items()}
        own |= {
            "intermediate_size": settings["hidden_dim"],
            "hidden_act": settings["activation"],
            "layer_norm_eps": _EPS,
        }
        return super().of_settings(
            settings | own | {"position_embedding_type": "absolute"}, checkpoint, source
        )


class DistilBertCrossEncoder(DistilBert, BertCrossEncoder):
    HEAD: ClassVar = [
        ("dense", "dense", "pre_classifier", ""),
        ("labels", "labels", "classifier", ""),
    ]
    IGNORED: ClassVar = BertCrossEncoder.IGNORED
    head_act: ClassVar = "relu"
