"""BLOOM: ALiBi instead of positions, a norm of the embeddings, LayerNorm, q, k and v of each head side by side in one matrix."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.layers.norm import LayerNorm
from tidemill.model_config import AttentionSpec, ModelConfig, alike
from tidemill.models.base import optional, required, stored_kv_bits, stored_values
from tidemill.models.gpt2 import Block
from tidemill.models.llama import Llama, check_numbers
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint, WeightTensor
from tidemill.weights.views import View

_CONTEXT = 2048  # of the published models, some of which do not say


class Bloom(Llama):
    block: ClassVar = Block
    PREFIXES: ClassVar = ("", "transformer.")
    NAMES: ClassVar = [
        ("embed", "weight", "word_embeddings", ""),
        ("embed_norm", "weight", "word_embeddings_layernorm", ""),
        ("blocks.{}.attn_norm", "weight", "h.{}.input_layernorm", ""),
        *(("blocks.{}.attn.qkv", part, "h.{}.self_attention.query_key_value", "") for part in ("q", "k", "v")),
        ("blocks.{}.attn.out", "out", "h.{}.self_attention.dense", ""),
        ("blocks.{}.mlp_norm", "weight", "h.{}.post_attention_layernorm", ""),
        ("blocks.{}.mlp.up", "up", "h.{}.mlp.dense_h_to_4h", ""),
        ("blocks.{}.mlp.down", "down", "h.{}.mlp.dense_4h_to_h", ""),
        ("norm", "weight", "ln_f", ""),
    ]
    IGNORED: ClassVar = ()

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.embed_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed_norm(self.embed(ids_T))

    def as_named(self, tensor: WeightTensor, checkpoint_format: str) -> WeightTensor:
        """All heads' queries first, then their keys, then their values."""
        rows = self.stored_rows(tensor.name)
        return tensor if rows is None else View(tensor, tensor.name, rows=rows)

    def stored_rows(self, name: str) -> torch.Tensor | None:
        if ".query_key_value." not in name:
            return None
        heads, dim = self.whole.num_heads, self.config.head_dim
        return torch.arange(heads * 3 * dim, device="cpu").view(heads, 3, dim).transpose(0, 1).reshape(-1)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        size, num_heads = _either(data, "hidden_size", "n_embed", source), _either(data, "n_head", "num_attention_heads", source)
        if num_heads < 1 or size % num_heads:
            raise CheckpointError(f"{source}: {num_heads} heads do not divide {size} dimensions.")
        if data.get("apply_residual_connection_post_layernorm"):
            raise CheckpointError(f"{source}: apply_residual_connection_post_layernorm is not supported.")
        dim = size // num_heads
        spec = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=dim, scale=dim**-0.5, rotation=None, has_alibi=True
        )
        config = ModelConfig(
            architecture=checkpoint.architecture,
            vocab_size=required(data, "vocab_size", int, source),
            hidden_size=size,
            intermediate_size=4 * size,
            layers=alike(_either(data, "n_layer", "num_hidden_layers", source), spec),
            max_context=optional(data, "seq_length", int, _CONTEXT, source),
            norm_eps=optional(data, "layer_norm_epsilon", float, 1e-5, source),
            act="gelu_tanh",
            is_gated=False,
            tie_embeddings=data.get("tie_word_embeddings") is not False,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            stored=stored_values(checkpoint),
            kv_bits=stored_kv_bits(checkpoint),
        )
        check_numbers(config, source)
        return config


def _either(data: dict[str, Any], key: str, other: str, source: object) -> int:
    """Files of different ages name a size differently."""
    value: int = required(data, other if data.get(key) is None else key, int, source)
    return value
