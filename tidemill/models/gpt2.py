"""GPT-2: learned positions instead of rotation, LayerNorm, biases everywhere, a feed-forward block without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Embedding
from tidemill.layers.mlp import MLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.model_config import AttentionSpec, ModelConfig, alike
from tidemill.models.base import optional, required, stored_kv_bits, stored_values
from tidemill.models.llama import ACTS, Llama, check_numbers, table_rows
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint, WeightTensor
from tidemill.weights.packed.base import PackedTensor
from tidemill.weights.views import View

_PREFIX = "transformer."
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face's files hold [in, out]
_KEYS = {
    "hf": ("n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon"),
    "gguf": (
        "gpt2.embedding_length", "gpt2.block_count", "gpt2.attention.head_count", "gpt2.context_length",
        "gpt2.attention.layer_norm_epsilon",
    ),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = MLP(config.hidden_size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)

    def forward(self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds what came before it."""
        delta_TH = self.attn(self.attn_norm.add(delta_TH, residual_TH), step)
        return self.mlp(self.mlp_norm.add(delta_TH, residual_TH))


class GPT2(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        ("embed", "weight", "transformer.wte", "token_embd"),
        ("positions", "weight", "transformer.wpe", "position_embd"),
        ("blocks.{}.attn_norm", "weight", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
        *(("blocks.{}.attn.qkv", part, "transformer.h.{}.attn.c_attn", "blk.{}.attn_qkv") for part in ("q", "k", "v")),
        ("blocks.{}.attn.out", "out", "transformer.h.{}.attn.c_proj", "blk.{}.attn_output"),
        ("blocks.{}.mlp_norm", "weight", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
        ("blocks.{}.mlp.up", "up", "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_up"),
        ("blocks.{}.mlp.down", "down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
        ("norm", "weight", "transformer.ln_f", "output_norm"),
    ]
    IGNORED: ClassVar = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)  # causal masks

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.positions = Embedding(config.num_positions, config.hidden_size, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_T) + self.positions(positions_T)

    def as_named(self, tensor: WeightTensor, checkpoint_format: str) -> WeightTensor:
        """The first files of the family leave out the prefix."""
        if checkpoint_format == "gguf":
            return tensor
        has_prefix = tensor.name.startswith((_PREFIX, "lm_head."))
        name = tensor.name if has_prefix else _PREFIX + tensor.name
        is_packed = isinstance(tensor, PackedTensor)  # quantized matrices are [out, in] in every layout
        return View(tensor, name, transposed=name.endswith(_TRANSPOSED) and not is_packed)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """Nothing is rotated."""
        return

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data, is_gguf = checkpoint.metadata, checkpoint.format == "gguf"
        source = checkpoint.path if is_gguf else checkpoint.path / "config.json"
        kinds = (int, int, int, int, float)
        values: list[Any] = [required(data, key, kind, source) for key, kind in zip(_KEYS[checkpoint.format], kinds, strict=True)]
        size, num_layers, num_heads, context, eps = values
        if num_heads < 1 or size % num_heads:
            raise CheckpointError(f"{source}: {num_heads} heads do not divide {size} dimensions.")
        dim = size // num_heads
        config = ModelConfig(
            architecture=checkpoint.architecture,
            vocab_size=table_rows(checkpoint) if is_gguf else required(data, "vocab_size", int, source),
            hidden_size=size,
            intermediate_size=optional(data, "gpt2.feed_forward_length" if is_gguf else "n_inner", int, 4 * size, source),
            layers=alike(
                num_layers,
                AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=dim, scale=dim**-0.5, rotation=None),
            ),
            max_context=context,
            num_positions=context,
            norm_eps=eps,
            act="gelu_tanh",
            is_gated=False,
            tie_embeddings=True,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            stored=stored_values(checkpoint),
            kv_bits=stored_kv_bits(checkpoint),
        )
        config = _of_gguf(config, checkpoint) if is_gguf else _of_hf(config, data, source)
        check_numbers(config, source)
        return config


def _of_gguf(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    has_head = any(tensor.name == "output.weight" for tensor in checkpoint.tensors())
    return replace(config, tie_embeddings=not has_head)


def _of_hf(config: ModelConfig, data: dict[str, Any], source: object) -> ModelConfig:
    act = data.get("activation_function", "gelu_new")
    if act not in ACTS:
        raise CheckpointError(f"{source}: activation_function {act!r} is not supported.", fix=f"{', '.join(ACTS)} are.")
    if data.get("add_cross_attention"):
        raise CheckpointError(f"{source}: add_cross_attention is not supported.")
    scale = 1.0 if data.get("scale_attn_weights") is False else config.head_dim**-0.5
    by_layer = bool(data.get("scale_attn_by_inverse_layer_idx"))
    layers = (replace(spec, scale=scale / (i + 1 if by_layer else 1)) for i, spec in enumerate(config.attention_layers))
    tied = data.get("tie_word_embeddings") is not False
    return replace(config, layers=tuple(layers), act=ACTS[act], tie_embeddings=tied)
