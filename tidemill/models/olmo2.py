"""OLMo 2 and 3: norms after attention and feed-forward instead of before them, and of all query heads and all key heads together.
OLMo 3 has windows in most layers, whose rotation is not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.kernels.kv_cache import PLAIN, HeadWeights
from tidemill.kernels.norm import NormGroup, qk_norm, shared_rms_norm
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.model_config import ModelConfig, Rotation
from tidemill.models.base import optional
from tidemill.models.llama import Llama, check_numbers, gguf_windows, hf_scaling, windows
from tidemill.parallel.cuts import attention_heads
from tidemill.parallel.group import group_of
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint

_EVERY = 4  # layers, the last of which is without a window, in files that do not say
_THETA = 500000.0


class NormedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        own, dim = attention_heads(config.attention_layers[0], weights.shard), config.head_dim
        q, k = own.heads.times(dim), own.groups.times(dim)
        self.q_norm, self.k_norm = RMSNorm(q.size, config.norm_eps), RMSNorm(k.size, config.norm_eps)
        self._group = group_of(weights.shard)
        self._groups = [
            NormGroup(0, slice(0, q.num), q.whole),
            NormGroup(1, slice(q.num, q.num + k.num), k.whole, counts=own.is_first),
        ]

    def _project(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        if self._group.size == 1:
            return qk_norm(self.qkv(x_TH), *weights, eps)
        return shared_rms_norm(self.qkv(x_TH), self._groups, 2, weights, eps, self._group.all_reduce)

    def _learned(self) -> HeadWeights:
        return PLAIN


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn, self.post_attn_norm = NormedAttention(config, layer, weights), RMSNorm(size, eps)
        self.mlp = GatedMLP(size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)
        self.post_mlp_norm = RMSNorm(size, eps)

    def forward(self, hidden_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        hidden_TH = self.post_attn_norm.added_to(hidden_TH, self.attn(hidden_TH, step))
        return self.post_mlp_norm.added_to(hidden_TH, self.mlp(hidden_TH))


class Olmo2(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.attn_norm", "blocks.{}.mlp_norm")),
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
        ("blocks.{}.post_attn_norm", "weight", "model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm"),
        ("blocks.{}.post_mlp_norm", "weight", "model.layers.{}.post_feedforward_layernorm", "blk.{}.post_ffw_norm"),
    ]

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        for block in self.blocks:
            residual_TH = block(residual_TH, step)
        return self.norm(residual_TH)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        """GGUF has one name for both; only OLMo 3 has windows."""
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        layers = []
        for spec, window in zip(config.attention_layers, gguf_windows(checkpoint, config.num_layers, _EVERY), strict=True):
            assert spec.rotation is not None
            rotation = replace(spec.rotation, scaling=None) if window else spec.rotation
            layers.append(replace(spec, window=window, rotation=rotation))
        return replace(config, layers=tuple(layers))


class Olmo3(Olmo2):
    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        rope = optional(data, "rope_parameters", dict, {}, source)
        scaled = optional(data, "rope_scaling", dict, {}, source)  # how older files say it
        theta = optional(data, "rope_theta", float, _THETA, source)

        def rotation(kind: str, otherwise: dict[str, Any]) -> Rotation:
            given = optional(rope, kind, dict, None, source) or otherwise
            scaling = hf_scaling(given, config.max_context, source)
            return Rotation(num_dims=config.head_dim, theta=optional(given, "rope_theta", float, theta, source), scaling=scaling)

        kinds = ["full_attention" if (i + 1) % _EVERY == 0 else "sliding_attention" for i in range(config.num_layers)]
        sizes = windows(data | {"layer_types": data.get("layer_types") or kinds}, config.num_layers, source)
        local, whole = rotation("sliding_attention", {}), rotation("full_attention", scaled)
        layers = (
            replace(spec, window=size, rotation=local if size else whole)
            for spec, size in zip(config.attention_layers, sizes, strict=True)
        )
        config = replace(config, layers=tuple(layers))
        check_numbers(config, source)
        return config
