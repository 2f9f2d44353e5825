"""OLMo 2 and 3: norms after attention and feed-forward instead of before them, and of all query
heads and all key heads together. OLMo 3 has windows in most layers, whose rotation is not
scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.distributed.cuts import heads_of
from tidemill.distributed.group import group_of
from tidemill.kernels.kv_cache import PLAIN, HeadWeights
from tidemill.kernels.norm import NormGroup, qk_norm, shared_rms_norm
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.models.llama import Llama, from_settings, gguf_windows, source_of, windows_of
from tidemill.models.settings import Nullable, Settings, read_layered_rope, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, Rotation
from tidemill.weights.checkpoint import Checkpoint

_EVERY = 4  # layers, the last of which is without a window, in files that do not say


class NormedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        own, dim = heads_of(config.layers[0], weights.shard), config.head_dim
        q, k = own.heads.times(dim), own.groups.times(dim)
        self.q_norm, self.k_norm = (
            RMSNorm(q.size, config.norm_eps),
            RMSNorm(k.size, config.norm_eps),
        )
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
        return shared_rms_norm(
            self.qkv(x_TH), self._groups, 2, weights, eps, self._group.all_reduce
        )

    def _learned(self) -> HeadWeights:
        return PLAIN


class Block(nn.Module):
    attention: ClassVar[type[Attention]] = NormedAttention

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn, self.post_attn_norm = self.attention(config, layer, weights), RMSNorm(size, eps)
        self.mlp = GatedMLP(
            size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act
        )
        self.post_mlp_norm = RMSNorm(size, eps)

    def forward(self, hidden_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        hidden_TH = self.post_attn_norm.added_to(hidden_TH, self.attn(hidden_TH, step))
        return self.post_mlp_norm.added_to(hidden_TH, self.mlp(hidden_TH))


class Olmo2(Llama):
    PAIRS: ClassVar = ()
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(
            line
            for line in Llama.NAMES
            if line[0] not in ("blocks.{}.attn_norm", "blocks.{}.mlp_norm")
        ),
        (
            "blocks.{}.attn.q_norm",
            "weight",
            "model.layers.{}.self_attn.q_norm",
            "blk.{}.attn_q_norm",
        ),
        (
            "blocks.{}.attn.k_norm",
            "weight",
            "model.layers.{}.self_attn.k_norm",
            "blk.{}.attn_k_norm",
        ),
        (
            "blocks.{}.post_attn_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.post_attention_norm",
        ),
        (
            "blocks.{}.post_mlp_norm",
            "weight",
            "model.layers.{}.post_feedforward_layernorm",
            "blk.{}.post_ffw_norm",
        ),
    ]

    KEYS: ClassVar = {
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, **rope_keys(),
    }  # fmt: skip

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        for block in self.blocks:
            residual_TH = block(residual_TH, step)
        return self.norm(residual_TH)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        """GGUF has one name for both; only OLMo 3 has windows."""
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        layers = []
        for spec, window in zip(
            config.layers, gguf_windows(checkpoint, config.num_layers, _EVERY), strict=True
        ):
            assert spec.rotation is not None
            rotation = replace(spec.rotation, scaling=None) if window else spec.rotation
            layers.append(spec.but(window=window, rotation=rotation))
        return replace(config, layers=tuple(layers))


class Olmo3(Olmo2):
    KEYS: ClassVar = {
        **Olmo2.KEYS, "sliding_window": Nullable(int, 4096), "layer_types": Nullable(list),
        **rope_keys(500000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config, source, num_layers = (
            from_settings(settings, checkpoint),
            source_of(checkpoint),
            settings["num_hidden_layers"],
        )
        ropes = read_layered_rope(settings, settings["rope_theta"], source)
        local, full = (
            Rotation(num_dims=config.head_dim, theta=rope.theta, scaling=rope.scaling)
            for rope in ropes
        )
        kinds = settings["layer_types"] or [
            "sliding_attention" if (i + 1) % _EVERY else "full_attention" for i in range(num_layers)
        ]
        sizes = windows_of(kinds, settings["sliding_window"], num_layers, source)
        layers = (
            spec.but(window=size, rotation=local if kind == "sliding_attention" else full)
            for spec, size, kind in zip(config.layers, sizes, kinds, strict=True)
        )
        return replace(config, layers=tuple(layers))
