"""BLOOM: ALiBi instead of positions, a norm of the embeddings, LayerNorm, q, k and v of each head
side by side in one matrix."""

from __future__ import annotations

from typing import ClassVar

import torch

from tidemill.errors import CheckpointError
from tidemill.layers.norm import LayerNorm
from tidemill.models.base import stored_kv_bits, stored_values
from tidemill.models.gpt2 import Block
from tidemill.models.llama import Llama, source_of
from tidemill.models.settings import Settings, refuse
from tidemill.quant import WeightPlan
from tidemill.types.model_config import AttentionSpec, ModelConfig, alike
from tidemill.weights.checkpoint import Checkpoint

_CONTEXT = 2048  # of the published models, some of which do not say


class Bloom(Llama):
    block: ClassVar = Block
    PREFIXES: ClassVar = ("", "transformer.")
    NAMES: ClassVar = [
        ("embed", "weight", "word_embeddings", ""),
        ("embed_norm", "weight", "word_embeddings_layernorm", ""),
        ("blocks.{}.attn_norm", "weight", "h.{}.input_layernorm", ""),
        *(
            ("blocks.{}.attn.qkv", part, "h.{}.self_attention.query_key_value", "")
            for part in ("q", "k", "v")
        ),
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

    def stored_rows(self, name: str) -> torch.Tensor | None:
        """Each head's query, key and value are stored side by side."""
        return self.heads_apart() if ".query_key_value." in name else None

    KEYS: ClassVar = {
        "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8,
        "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False,
        "seq_length": _CONTEXT, "tie_word_embeddings": True,
    }  # fmt: skip
    ALIASES: ClassVar = {
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        source, size, num_heads = source_of(checkpoint), settings["hidden_size"], settings["n_head"]
        if num_heads < 1 or size % num_heads:
            raise CheckpointError(f"{source}: {num_heads} heads do not divide {size} dimensions.")
        refuse(settings, ["apply_residual_connection_post_layernorm"], source)
        dim = size // num_heads
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=dim,
            scale=dim**-0.5,
            rotation=None,
            has_alibi=True,
        )
        return ModelConfig(
            architecture=checkpoint.architecture,
            vocab_size=settings["vocab_size"],
            hidden_size=size,
            intermediate_size=4 * size,
            layers=alike(settings["n_layer"], spec),
            max_context=settings["seq_length"],
            norm_eps=settings["layer_norm_epsilon"],
            act="gelu_tanh",
            is_gated=False,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            stored=stored_values(checkpoint),
            kv_bits=stored_kv_bits(checkpoint),
        )
