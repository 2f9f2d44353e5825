"""BERT: an encoder. Every token sees the whole input; norms come after the residual additions;
positions and the texts of a pair have learned embeddings. Embedding models (MiniLM, BGE, E5) and
cross-encoders; other encoders derive from it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.glu import activate
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Embedding
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import MLP
from tidemill.layers.norm import LayerNorm
from tidemill.models.base import Model, stored_values
from tidemill.models.heads import Labels
from tidemill.models.settings import Keys, Nullable, Settings, one_of, read_settings, refuse
from tidemill.quant import WeightPlan
from tidemill.types.model_config import AttentionSpec, ModelConfig, Pooler, alike
from tidemill.weights.checkpoint import Checkpoint
from tidemill.weights.sentence_transformers import Modules

_ACTS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "silu": "silu", "swish": "silu", "relu": "relu",
    "relu2": "relu2",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn = Attention(config, layer, weights)
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(
            config.hidden_size, config.intermediate_size, config.mlp_bias, weights, config.act
        )
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
    KEYS: ClassVar[Keys] = {  # of config.json
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "is_decoder": False,
        "position_embedding_type": "absolute", "matryoshka_dimensions": Nullable(list),
    }  # fmt: skip
    ALIASES: ClassVar[dict[str, str]] = {}  # other names of keys
    has_distance_bias: ClassVar = False

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        size = config.embedding_size or config.hidden_size
        # in the table of positions
        self.first_position = config.num_positions - config.most_positions
        self.embed = Embedding(config.vocab_size, size, weights)
        self.positions = Embedding(config.num_positions, size, weights)
        self.embed_norm = LayerNorm(size, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config, i, weights) for i in range(config.num_layers))
        if config.num_token_types:
            self.types = Embedding(config.num_token_types, size, weights)
            self.names = [*self.names, ("types", "weight", "embeddings.token_type_embeddings", "")]

    def embed_at(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, types_T: torch.Tensor | None
    ) -> torch.Tensor:
        states = self.embed(ids_T)
        if self.config.num_token_types:
            states += self.types(torch.zeros_like(ids_T) if types_T is None else types_T)
        return states.add_(self.positions(positions_T + self.first_position))

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        x_TH = self.embed_norm(residual_TH)
        for block in self.blocks:
            x_TH = block(x_TH, step)
        return x_TH

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        source = checkpoint.path / "config.json"
        settings = read_settings(checkpoint.metadata, cls.KEYS, source, cls.ALIASES)
        config = cls.of_settings(settings, checkpoint, source)
        if config.labels is not None:
            return config
        modules, dimensions = Modules.read(checkpoint.path), settings["matryoshka_dimensions"] or []
        if not all(isinstance(num, int) and num > 0 for num in dimensions):
            raise CheckpointError(
                f"{source}: matryoshka_dimensions is {str(dimensions)[:100]}; it must be a list of numbers."
            )
        pooler = Pooler(
            how=modules.pooling, is_normalized=modules.is_normalized, dimensions=tuple(dimensions)
        )
        return replace(
            config,
            pooler=pooler,
            max_context=min(config.max_context, modules.max_length or config.max_context),
        )

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
        one_of(settings, "position_embedding_type", {"absolute": "absolute"}, source)
        refuse(
            settings,
            ["is_decoder"],
            source,
            f"is true, which is not supported for {checkpoint.architecture}",
        )
        act = one_of(settings, "hidden_act", _ACTS, source)
        num_heads, hidden_size = settings["num_attention_heads"], settings["hidden_size"]
        if num_heads < 1 or hidden_size % num_heads:
            raise CheckpointError(
                f"{source}: hidden_size {hidden_size} is not a multiple of the {num_heads} heads."
            )
        num_positions, first = settings["max_position_embeddings"], cls.first_of(settings)
        if num_positions <= first:
            raise CheckpointError(
                f"{source}: max_position_embeddings is {num_positions}, which leaves none for an input."
            )
        if not 0 <= settings["layer_norm_eps"] <= 1:
            raise CheckpointError(f"{source}: layer_norm_eps is {settings['layer_norm_eps']}.")
        head_dim = hidden_size // num_heads
        spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5, rotation=None,
            is_bidirectional=True, has_distance_bias=cls.has_distance_bias,
        )  # fmt: skip
        return ModelConfig(
            architecture=checkpoint.architecture,
            vocab_size=settings["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=settings["intermediate_size"],
            layers=alike(settings["num_hidden_layers"], spec),
            max_context=num_positions - first,
            norm_eps=settings["layer_norm_eps"],
            tie_embeddings=True,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            act=act,
            is_gated=False,
            num_positions=num_positions,
            most_positions=num_positions - first,
            num_token_types=settings.get("type_vocab_size", 0),
            labels=Labels.read(checkpoint),
            pooler=Pooler(how="score"),
            stored=stored_values(checkpoint),
        )

    @classmethod
    def first_of(cls, settings: Settings) -> int:
        """The number where positions begin in their table."""
        return 0


class BertCrossEncoder(Bert):
    """Scores of a pair of texts, from the first token's hidden state."""

    HEAD: ClassVar = [
        ("dense", "dense", "bert.pooler.dense", ""),
        ("labels", "labels", "classifier", ""),
    ]
    IGNORED: ClassVar = (r"(\w+\.)?embeddings\.(position_ids|token_type_ids)",)
    head_act: ClassVar = "tanh"  # between the matrices of the head

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.dense = Linear(
            config.hidden_size, {"dense": config.hidden_size}, bias=True, weights=weights
        )
        self.labels = Labels(config, weights, bias=True)
        self.names = [*self.names, *self.HEAD]

    def scores(self, one_SH: torch.Tensor) -> torch.Tensor:
        states = self.dense(one_SH)
        return super().scores(
            torch.tanh(states) if self.head_act == "tanh" else activate(states, self.head_act)
        )
