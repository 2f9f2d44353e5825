"""BERT: an encoder. Every token sees the whole input; norms come after the residual additions; positions and the texts of a pair
have learned embeddings. Embedding models (MiniLM, BGE, E5) and cross-encoders; RoBERTa and MPNet derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Embedding
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import MLP
from tidemill.layers.norm import LayerNorm
from tidemill.model_config import AttentionSpec, ModelConfig, Pooler, alike
from tidemill.models.base import Model, optional, required, stored_values
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint
from tidemill.weights.sentence_transformers import Modules

_ACTS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}  # of scores, classes of torch.nn
_MAX_LABELS = 4096
_MAX_LABEL_CHARS = 256


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn = Attention(config, layer, weights)
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, weights, config.act)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        x_TH = self.attn_norm.add(self.attn(x_TH, step), x_TH)
        return self.mlp_norm.add(self.mlp(x_TH), x_TH)


class Bert(Model):
    PREFIXES: ClassVar = ("", "bert.")
    NAMES: ClassVar = [
        ("embed", "weight", "embeddings.word_embeddings", ""),
        ("positions", "weight", "embeddings.position_embeddings", ""),
        ("embed_norm", "weight", "embeddings.LayerNorm", ""),
        ("blocks.{}.attn.qkv", "q", "encoder.layer.{}.attention.self.query", ""),
        ("blocks.{}.attn.qkv", "k", "encoder.layer.{}.attention.self.key", ""),
        ("blocks.{}.attn.qkv", "v", "encoder.layer.{}.attention.self.value", ""),
        ("blocks.{}.attn.out", "out", "encoder.layer.{}.attention.output.dense", ""),
        ("blocks.{}.attn_norm", "weight", "encoder.layer.{}.attention.output.LayerNorm", ""),
        ("blocks.{}.mlp.up", "up", "encoder.layer.{}.intermediate.dense", ""),
        ("blocks.{}.mlp.down", "down", "encoder.layer.{}.output.dense", ""),
        ("blocks.{}.mlp_norm", "weight", "encoder.layer.{}.output.LayerNorm", ""),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = (
        r"(\w+\.)?embeddings\.(position_ids|token_type_ids)",
        r"(\w+\.)?pooler\.dense\.(weight|bias)",  # of next-sentence prediction
        r"(cls|lm_head)\..*",  # of masked language models
    )
    first_position: ClassVar = 0  # in the table of positions

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.embed = Embedding(config.vocab_size, config.hidden_size, weights)
        self.positions = Embedding(config.num_positions, config.hidden_size, weights)
        self.embed_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config, i, weights) for i in range(config.num_layers))
        if config.num_token_types:
            self.types = Embedding(config.num_token_types, config.hidden_size, weights)
            self.names = [*self.names, ("types", "weight", "embeddings.token_type_embeddings", "")]

    def embed_at(self, ids_T: torch.Tensor, positions_T: torch.Tensor, types_T: torch.Tensor | None) -> torch.Tensor:
        made = self.embed(ids_T)
        if self.config.num_token_types:
            made += self.types(torch.zeros_like(ids_T) if types_T is None else types_T)
        return made.add_(self.positions(positions_T + self.first_position))

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        x_TH = self.embed_norm(residual_TH)
        for block in self.blocks:
            x_TH = block(x_TH, step)
        return x_TH

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        source = checkpoint.path / "config.json"
        modules = Modules.read(checkpoint.path)
        dimensions = optional(checkpoint.metadata, "matryoshka_dimensions", list, [], source)
        if not all(isinstance(num, int) and num > 0 for num in dimensions):
            raise CheckpointError(f"{source}: matryoshka_dimensions is {str(dimensions)[:100]}; it must be a list of numbers.")
        pooler = Pooler(how=modules.pooling, is_normalized=modules.is_normalized, dimensions=tuple(dimensions))
        return cls._read(checkpoint.metadata, source, checkpoint, pooler, modules.max_length)

    @classmethod
    def _read(
        cls, data: dict[str, Any], source: object, checkpoint: Checkpoint, pooler: Pooler, max_length: int | None
    ) -> ModelConfig:
        def need(key: str, kind: type = int) -> Any:
            return required(data, key, kind, source)

        if data.get("position_embedding_type", "absolute") != "absolute":
            kind = str(data["position_embedding_type"])[:100]
            raise CheckpointError(f"{source}: position_embedding_type {kind!r} is not supported.", fix="absolute is.")
        if data.get("is_decoder"):
            raise CheckpointError(f"{source}: is_decoder is true, which is not supported for {checkpoint.architecture}.")
        act = data.get("hidden_act", "gelu")
        if not isinstance(act, str) or act not in _ACTS:
            raise CheckpointError(f"{source}: hidden_act {str(act)[:100]!r} is not supported.", fix=f"{', '.join(_ACTS)} are.")
        num_heads, hidden_size, num_positions = need("num_attention_heads"), need("hidden_size"), need("max_position_embeddings")
        if num_heads < 1 or hidden_size % num_heads:
            raise CheckpointError(f"{source}: hidden_size {hidden_size} is not a multiple of the {num_heads} heads.")
        head_dim, longest = hidden_size // num_heads, num_positions - cls.first_position
        if longest < 1:
            raise CheckpointError(f"{source}: max_position_embeddings is {num_positions}, which leaves none for an input.")
        eps = optional(data, "layer_norm_eps", float, 1e-12, source)
        if not 0 <= eps <= 1:
            raise CheckpointError(f"{source}: layer_norm_eps is {eps}.")
        spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5, rotation=None,
            is_bidirectional=True, has_distance_bias=cls.has_distance_bias,
        )  # fmt: skip
        return ModelConfig(
            architecture=checkpoint.architecture,
            vocab_size=need("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=need("intermediate_size"),
            layers=alike(need("num_hidden_layers"), spec),
            max_context=min(longest, max_length or longest),
            norm_eps=eps,
            tie_embeddings=True,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            act=_ACTS[act],
            is_gated=False,
            num_positions=num_positions,
            num_token_types=optional(data, "type_vocab_size", int, 0, source) if cls.has_types else 0,
            pooler=pooler,
            stored=stored_values(checkpoint),
        )

    has_distance_bias: ClassVar = False
    has_types: ClassVar = True


class BertCrossEncoder(Bert):
    """Scores of a pair of texts, from the first token's hidden state."""

    HEAD: ClassVar = [("dense", "dense", "bert.pooler.dense", ""), ("classifier", "labels", "classifier", "")]
    IGNORED: ClassVar = (r"(\w+\.)?embeddings\.(position_ids|token_type_ids)",)

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        assert config.pooler is not None
        self.dense = Linear(config.hidden_size, {"dense": config.hidden_size}, bias=True, weights=weights)
        self.classifier = Linear(config.hidden_size, {"labels": config.pooler.num_labels}, bias=True, weights=weights)
        self.names = [*self.names, *self.HEAD]

    def scores(self, first_SH: torch.Tensor) -> torch.Tensor:
        assert self.config.pooler is not None
        scores = self.classifier.weight.logits(torch.tanh(self.dense(first_SH))).double()
        return scores.sigmoid() if self.config.pooler.activation == "sigmoid" else scores

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        labels = optional(data, "id2label", dict, None, source)
        num_labels = optional(data, "num_labels", int, 2, source) if labels is None else len(labels)
        if not 1 <= num_labels <= _MAX_LABELS:
            raise CheckpointError(f"{source}: the model has {num_labels} labels; 1 to {_MAX_LABELS} are supported.")
        names = tuple(str((labels or {}).get(str(i), f"LABEL_{i}"))[:_MAX_LABEL_CHARS] for i in range(num_labels))
        pooler = Pooler(how="score", num_labels=num_labels, labels=names, activation=_activation(data, num_labels, source))
        return cls._read(data, source, checkpoint, pooler, None)

    def _weights(self) -> Iterator[Weight | ExpertWeights]:
        own = (self.dense.weight, self.classifier.weight)
        return (weight for weight in super()._weights() if weight not in own)


def _activation(data: dict[str, Any], num_labels: int, source: object) -> str:
    """As sentence-transformers and vLLM read it: named in the configuration, else the logistic function of a single label."""
    newer = optional(data, "sentence_transformers", dict, {}, source)
    named = newer.get("activation_fn") or data.get("sbert_ce_default_activation_function")
    if named is None:
        return "sigmoid" if num_labels == 1 else "identity"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise CheckpointError(f"{source}: scores with the activation {str(named)[:100]!r} are not supported.")
    return _ACTIVATIONS[kind]
