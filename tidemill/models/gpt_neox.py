"""GPT-NeoX and Pythia: LayerNorm, biases, a feed-forward without a gate, a quarter of each head's
dimensions rotated. Attention and feed-forward read norms of their own of the same residual, side by
side."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from tidemill.kernels.norm import add
from tidemill.layers.attention import AttentionStep
from tidemill.layers.norm import LayerNorm
from tidemill.models.gpt2 import Block as GPT2Block
from tidemill.models.llama import Llama, from_settings
from tidemill.models.settings import Settings, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint


class Block(GPT2Block):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        self.is_parallel = config.is_parallel

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        if not self.is_parallel:
            return super().forward(delta_TH, residual_TH, step)
        delta_TH = self.attn(self.attn_norm.add(delta_TH, residual_TH), step)
        add(self.mlp(self.mlp_norm(residual_TH)), delta_TH)
        return delta_TH


class GPTNeoX(Llama):
    block: ClassVar = Block
    PAIRS: ClassVar = ()
    PREFIXES: ClassVar = ("gpt_neox.", "")
    HEADS: ClassVar = ("embed_out.weight", "lm_head.weight")
    NAMES: ClassVar = [
        ("embed", "weight", "gpt_neox.embed_in", ""),
        ("blocks.{}.attn_norm", "weight", "gpt_neox.layers.{}.input_layernorm", ""),
        *(
            ("blocks.{}.attn.qkv", part, "gpt_neox.layers.{}.attention.query_key_value", "")
            for part in "qkv"
        ),
        ("blocks.{}.attn.out", "out", "gpt_neox.layers.{}.attention.dense", ""),
        ("blocks.{}.mlp_norm", "weight", "gpt_neox.layers.{}.post_attention_layernorm", ""),
        ("blocks.{}.mlp.up", "up", "gpt_neox.layers.{}.mlp.dense_h_to_4h", ""),
        ("blocks.{}.mlp.down", "down", "gpt_neox.layers.{}.mlp.dense_4h_to_h", ""),
        ("norm", "weight", "gpt_neox.final_layer_norm", ""),
    ]
    IGNORED: ClassVar = (
        r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    )
    KEYS: ClassVar = {
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_act": "gelu",
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True, "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        **{key: value for key, value in rope_keys().items() if key != "rope_theta"},
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)

    def stored_rows(self, name: str) -> torch.Tensor | None:
        """Each head's query, key and value are stored side by side."""
        return self.heads_apart() if ".query_key_value." in name else None

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        heads, has_bias = settings["num_attention_heads"], settings["attention_bias"]
        more = {
            "rms_norm_eps": settings["layer_norm_eps"], "num_key_value_heads": heads, "mlp_bias": True,
            "rope_theta": settings["rotary_emb_base"], "partial_rotary_factor": settings["rotary_pct"],
        }  # fmt: skip
        config = from_settings(settings | more, checkpoint)
        is_parallel = settings["use_parallel_residual"]
        return replace(config, is_gated=False, is_parallel=is_parallel, attention_out_bias=has_bias)
