"""MPNet: a RoBERTa without types, whose scores have a learned bias by the distance of query and
key, the same in all layers."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.layers.base import Layer
from tidemill.models.roberta import Roberta, RobertaCrossEncoder
from tidemill.models.settings import Nullable, Settings
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_NUM_BUCKETS, _MAX_DISTANCE = 32, 128
_FIRST = 2  # position in the table of positions


class DistanceBias(Layer):
    """A number for each head and bucket of distances: near ones have one each, the others share
    them on a logarithmic scale."""

    def __init__(self, num_heads: int) -> None:
        super().__init__({"weight": (_NUM_BUCKETS, num_heads)})
        self.weight = nn.Parameter(torch.empty(_NUM_BUCKETS, num_heads), requires_grad=False)

    def build(self, num_positions: int) -> torch.Tensor:
        """[N, 2 * num_positions - 1], by the key's position less the query's, from 1 -
        num_positions on."""
        distances = torch.arange(1 - num_positions, num_positions, device="cpu")
        return self.weight[_buckets(distances)].t().contiguous()


def _buckets(distances: torch.Tensor) -> torch.Tensor:
    """Half of them for keys after the query; of each half, half for a distance each, and the last
    for all that is far."""
    half = _NUM_BUCKETS // 2
    near, size = half // 2, distances.abs()
    far = (
        near
        + (
            torch.log(size.clamp(min=1).float() / near)
            / math.log(_MAX_DISTANCE / near)
            * (half - near)
        ).long()
    )
    return torch.where(size < near, size, far.clamp(max=half - 1)) + half * (distances > 0)


class MPNet(Roberta):
    PREFIXES: ClassVar = ("", "mpnet.")
    NAMES: ClassVar = [
        *(line for line in Roberta.NAMES if ".attn" not in line[0]),
        ("blocks.{}.attn.qkv", "q", "encoder.layer.{}.attention.attn.q", ""),
        ("blocks.{}.attn.qkv", "k", "encoder.layer.{}.attention.attn.k", ""),
        ("blocks.{}.attn.qkv", "v", "encoder.layer.{}.attention.attn.v", ""),
        ("blocks.{}.attn.out", "out", "encoder.layer.{}.attention.attn.o", ""),
        ("blocks.{}.attn_norm", "weight", "encoder.layer.{}.attention.LayerNorm", ""),
        ("distance_bias", "weight", "encoder.relative_attention_bias", ""),
    ]
    KEYS: ClassVar = {
        "vocab_size": 30527, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12, "is_decoder": False, "position_embedding_type": "absolute",
        "relative_attention_num_buckets": _NUM_BUCKETS, "matryoshka_dimensions": Nullable(list),
    }  # fmt: skip
    has_distance_bias: ClassVar = True

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.distance_bias = DistanceBias(config.num_heads)

    def distance_biases(self, num_positions: int) -> list[torch.Tensor | None]:
        table = self.distance_bias.build(num_positions)
        return [table] * self.config.num_layers

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
        buckets = settings["relative_attention_num_buckets"]
        if buckets != _NUM_BUCKETS:
            raise CheckpointError(
                f"{source}: relative_attention_num_buckets is {buckets}; {_NUM_BUCKETS} is supported."
            )
        return super().of_settings(settings, checkpoint, source)

    @classmethod
    def first_of(cls, settings: Settings) -> int:
        return _FIRST


class MPNetCrossEncoder(MPNet, RobertaCrossEncoder):
    pass
