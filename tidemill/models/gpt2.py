"""GPT-2: learned positions instead of rotation, LayerNorm, biases everywhere, a feed-forward block
without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.embedding import Embedding
from tidemill.layers.mlp import MLP, inner_size
from tidemill.layers.norm import LayerNorm
from tidemill.models.base import stored_kv_bits, stored_values
from tidemill.models.llama import ACTS, Llama, check_numbers, source_of, table_rows
from tidemill.models.settings import Nullable, Settings, one_of, optional, refuse, required
from tidemill.quant import WeightPlan
from tidemill.types.model_config import AttentionSpec, ModelConfig, alike
from tidemill.weights.checkpoint import Checkpoint, WeightTensor
from tidemill.weights.packed.base import PackedTensor
from tidemill.weights.views import View

_PREFIX = "transformer."
# Hugging Face's files hold [in, out]
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_GGUF = {  # keys of GGUF files, after the architecture, by those of config.json
    "n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count", "n_positions": "context_length",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = MLP(
            config.hidden_size,
            inner_size(config, layer, weights),
            config.mlp_bias,
            weights,
            config.act,
        )

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds
        what came before it."""
        delta_TH = self.attn(self.attn_norm.add(delta_TH, residual_TH), step)
        return self.mlp(self.mlp_norm.add(delta_TH, residual_TH))


class GPT2(Llama):
    PAIRS: ClassVar = ()
    block: ClassVar = Block
    KEYS: ClassVar = {
        "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_inner": Nullable(int), "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False, "tie_word_embeddings": True,
    }  # fmt: skip
    ALIASES: ClassVar = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }  # fmt: skip
    NAMES: ClassVar = [
        ("embed", "weight", "transformer.wte", "token_embd"),
        ("positions", "weight", "transformer.wpe", "position_embd"),
        ("blocks.{}.attn_norm", "weight", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
        *(
            ("blocks.{}.attn.qkv", part, "transformer.h.{}.attn.c_attn", "blk.{}.attn_qkv")
            for part in ("q", "k", "v")
        ),
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
        has_prefix = tensor.name.startswith((_PREFIX, "lm_head.", "score."))
        name = tensor.name if has_prefix else _PREFIX + tensor.name
        # quantized matrices are [out, in] in every layout
        is_packed = isinstance(tensor, PackedTensor)
        return View(tensor, name, transposed=name.endswith(_TRANSPOSED) and not is_packed)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = _from_gguf(checkpoint) if checkpoint.format == "gguf" else cls.read_hf(checkpoint)
        check_numbers(config, checkpoint.path)
        return config

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        source = source_of(checkpoint)
        refuse(settings, ["add_cross_attention"], source)
        config = _config(settings, checkpoint, source)
        scale = config.head_dim**-0.5 if settings["scale_attn_weights"] else 1.0
        by_layer = settings["scale_attn_by_inverse_layer_idx"]
        layers = (
            spec.but(scale=scale / (i + 1 if by_layer else 1))
            for i, spec in enumerate(config.layers)
        )
        return replace(
            config, layers=tuple(layers), act=one_of(settings, "activation_function", ACTS, source)
        )

    @classmethod
    def table_names(cls) -> tuple[str, ...]:
        return "transformer.wte.weight", "wte.weight"


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    data, source = checkpoint.metadata, checkpoint.path
    settings: Settings = {
        key: required(data, f"gpt2.{name}", int, source) for key, name in _GGUF.items()
    }
    settings["layer_norm_epsilon"] = required(
        data, "gpt2.attention.layer_norm_epsilon", float, source
    )
    settings["n_inner"] = optional(data, "gpt2.feed_forward_length", int, None, source)
    settings["vocab_size"] = table_rows(checkpoint)
    has_head = any(tensor.name == "output.weight" for tensor in checkpoint.tensors())
    return replace(_config(settings, checkpoint, source), tie_embeddings=not has_head)


def _config(settings: Settings, checkpoint: Checkpoint, source: object) -> ModelConfig:
    size, num_heads, context = settings["n_embd"], settings["n_head"], settings["n_positions"]
    if num_heads < 1 or size % num_heads:
        raise CheckpointError(f"{source}: {num_heads} heads do not divide {size} dimensions.")
    dim = size // num_heads
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=dim, scale=dim**-0.5, rotation=None
    )
    return ModelConfig(
        architecture=checkpoint.architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=size,
        intermediate_size=settings["n_inner"] or 4 * size,
        layers=alike(settings["n_layer"], spec),
        max_context=context,
        num_positions=context,
        norm_eps=settings["layer_norm_epsilon"],
        act="gelu_tanh",
        is_gated=False,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        stored=stored_values(checkpoint),
        kv_bits=stored_kv_bits(checkpoint),
    )
