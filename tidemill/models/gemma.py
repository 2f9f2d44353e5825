"""Gemma 2 and the text models of Gemma 3: norms before and after attention and feed-forward, windows in most layers, embeddings
scaled by the square root of their size. Gemma 2 caps its scores and logits; Gemma 3 norms queries and keys, and rotates windowed
layers by angles of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.kernels.masks import capped
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.model_config import ModelConfig, RopeScaling, Rotation
from tidemill.models.base import optional, required
from tidemill.models.llama import Llama, gguf_windows, hf_scaling
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint

_LOCAL_THETA = 10000.0  # of Gemma 3's windowed layers, in files that do not say
_PATTERN = {"gemma2": 2, "gemma3": 6}  # in GGUF files: every so many layers, one is without a window
_WIDE = (46, 62)  # layers of the 27B models, whose scores are scaled by the size of a head as if hidden_size were cut into heads


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn_norm, self.post_attn_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm, self.post_mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mlp = GatedMLP(size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)

    def forward(self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds what came before it."""
        delta_TH = self.post_attn_norm(self.attn(self.attn_norm.add(delta_TH, residual_TH), step))
        return self.post_mlp_norm(self.mlp(self.mlp_norm.add(delta_TH, residual_TH)))


class Gemma2(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.mlp_norm", "ropes.0")),
        ("blocks.{}.post_attn_norm", "weight", "model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm"),
        ("blocks.{}.mlp_norm", "weight", "model.layers.{}.pre_feedforward_layernorm", "blk.{}.ffn_norm"),
        ("blocks.{}.post_mlp_norm", "weight", "model.layers.{}.post_feedforward_layernorm", "blk.{}.post_ffw_norm"),
    ]

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids_T)
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return capped(super().logits(hidden_TH, out), self.config.logits_softcap)

    def loaded(self, checkpoint_format: str) -> None:
        """Hugging Face's files hold what is added to a norm's weight of 1."""
        if checkpoint_format == "hf":
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.add_(1)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        return cls._of_gguf(config, checkpoint) if checkpoint.format == "gguf" else cls._of_hf(config, checkpoint)

    @classmethod
    def _of_hf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        scalar = optional(data, "query_pre_attn_scalar", float, float(config.head_dim), source)
        softcap = optional(data, "attn_logit_softcapping", float, None, source) or 0.0
        return replace(
            config,
            layers=tuple(replace(spec, scale=scalar**-0.5, softcap=softcap) for spec in config.attention_layers),
            logits_softcap=optional(data, "final_logit_softcapping", float, None, source) or 0.0,
            tie_embeddings=bool(data.get("tie_word_embeddings", True)),
        )

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        windows = gguf_windows(checkpoint, config.num_layers, _PATTERN[arch])
        wide = config.num_layers in _WIDE
        scalar = config.hidden_size / config.num_heads if wide else config.head_dim
        softcap = optional(data, f"{arch}.attn_logit_softcapping", float, 0.0, source)
        layers = [
            replace(spec, scale=scalar**-0.5, softcap=softcap, window=window)
            for spec, window in zip(config.attention_layers, windows, strict=True)
        ]
        return replace(
            config,
            layers=tuple(layers),
            logits_softcap=optional(data, f"{arch}.final_logit_softcapping", float, 0.0, source),
            act="gelu_tanh",
        )


class Gemma3(Gemma2):
    NAMES: ClassVar = [
        *Gemma2.NAMES,
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    ]

    @classmethod
    def _of_hf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        rope = optional(data, "rope_parameters", dict, {}, source)
        kinds: dict[str, dict[str, Any]] = {kind: rope[kind] for kind in ("sliding_attention", "full_attention") if kind in rope}
        if not kinds:  # older files
            scaled = optional(data, "rope_scaling", dict, None, source) or {}
            kinds = {
                "sliding_attention": {"rope_theta": optional(data, "rope_local_base_freq", float, _LOCAL_THETA, source)},
                "full_attention": {"rope_theta": optional(data, "rope_theta", float, 1e6, source), **scaled},
            }
        return cls._with_rotations(
            super()._of_hf(config, checkpoint),
            *(
                (required(kinds[kind], "rope_theta", float, source), hf_scaling(kinds[kind], config.max_context, source))
                for kind in ("sliding_attention", "full_attention")
            ),
        )

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        whole = config.attention_layers[0].rotation
        assert whole is not None
        key = f"{checkpoint.architecture}.rope.freq_base_swa"
        local = optional(checkpoint.metadata, key, float, _LOCAL_THETA, checkpoint.path)
        return cls._with_rotations(super()._of_gguf(config, checkpoint), (local, None), (whole.theta, whole.scaling))

    @classmethod
    def _with_rotations(
        cls, config: ModelConfig, local: tuple[float, RopeScaling | None], whole: tuple[float, RopeScaling | None]
    ) -> ModelConfig:
        dim = config.head_dim
        rotations = [Rotation(num_dims=dim, theta=theta, scaling=scaling) for theta, scaling in (local, whole)]
        layers = (replace(spec, rotation=rotations[0 if spec.window else 1]) for spec in config.attention_layers)
        return replace(config, layers=tuple(layers), qk_norm=True)
