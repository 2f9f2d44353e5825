"""gpt-oss: windows in every second layer, attention sinks, biases everywhere, and experts whose
gate is clamped.

Its own files store experts in mxfp4 (weights/mxfp4.py), rows of gate and up in turn; files without
quantization hold transposed matrices, columns of gate and up in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.glu import SWIGLU_ALPHA, SWIGLU_LIMIT
from tidemill.layers.base import read_values
from tidemill.layers.moe import Experts, MoE
from tidemill.models.llama import Block, Llama, from_settings, source_of, windows_of, with_windows
from tidemill.models.mixtral import gguf_experts, hf_experts
from tidemill.models.settings import Nullable, Settings, required, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, MoESpec
from tidemill.weights.checkpoint import Checkpoint, WeightTensor
from tidemill.weights.views import View

_EXPERTS, _HF = "blocks.{}.mlp.experts", "model.layers.{}.mlp.experts"
_YARN = {  # of files that do not say
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_ROUTING = {"scoring": "topk_then_softmax", "act": "swiglu_clamped", "has_bias": True}


class PairedExperts(Experts):
    """Also takes matrices in which gate and up alternate: "paired" and "turned" [E, in, out],
    "paired_blocks" and "turned_blocks" [E, out, in]."""

    def _shapes(self, hidden_size: int, spec: MoESpec) -> dict[str, tuple[int, ...]]:
        num, size = spec.num_experts, spec.expert_size
        paired: dict[str, tuple[int, ...]] = {
            "paired": (num, hidden_size, 2 * size),
            "paired_blocks": (num, 2 * size, hidden_size),
            "paired_bias": (num, 2 * size),
            "turned": (num, size, hidden_size),
            "turned_blocks": (num, hidden_size, size),
        }
        return super()._shapes(hidden_size, spec) | paired

    def _brings(self, part: str) -> set[tuple[str, int]]:
        kind, _, stored = part.partition("_")
        if kind not in ("paired", "turned"):
            return super()._brings(part)
        return (
            set()
            if stored == "bias"
            else super()._brings("gate_ups" if kind == "paired" else "downs")
        )

    @property
    def missing(self) -> set[str]:
        return super().missing | (
            {"paired_bias"} if {"gate", "up"} <= self._wanted_biases else set()
        )

    def take(self, part: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        kind, _, stored = part.partition("_")
        if kind not in ("paired", "turned"):
            super().take(part, tensor, row_order)
            return
        if stored == "bias":
            gate, up = read_values(tensor).unflatten(1, (-1, 2)).unbind(2)
            self._set_bias("gate", gate)
            self._set_bias("up", up)
            return
        size = self.spec.expert_size
        order = (
            torch.arange(2 * size, device="cpu").view(size, 2).t().flatten()
            if kind == "paired"
            else None
        )
        for expert in self._own:
            matrix = tensor.matrix(expert)
            self._add(
                "gate_up" if kind == "paired" else "down",
                expert,
                matrix if stored else View(matrix, tensor.name, transposed=True),
                order,
            )


class PairedMoE(MoE):
    experts_class = PairedExperts


class GptOssBlock(Block):
    def feed_forward(self, config: ModelConfig, layer: int, weights: WeightPlan) -> nn.Module:
        return PairedMoE(config, layer, weights)


class GptOss(Llama):
    PAIRS: ClassVar = ()
    block: ClassVar = GptOssBlock
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.mlp_norm", "ropes.0")),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.post_attention_norm",
        ),
        ("blocks.{}.attn.sinks", "weight", "=model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks"),
        ("blocks.{}.mlp.router", "router", "model.layers.{}.mlp.router", "blk.{}.ffn_gate_inp"),
        (_EXPERTS, "gates", "", "blk.{}.ffn_gate_exps"),
        (_EXPERTS, "ups", "", "blk.{}.ffn_up_exps"),
        (_EXPERTS, "downs", "", "blk.{}.ffn_down_exps"),
        (_EXPERTS, "paired", f"={_HF}.gate_up_proj", ""),
        (_EXPERTS, "turned", f"={_HF}.down_proj", ""),
        (_EXPERTS, "paired_blocks", f"={_HF}.gate_up_proj_blocks", ""),
        (_EXPERTS, "turned_blocks", f"={_HF}.down_proj_blocks", ""),
        (_EXPERTS, "paired_bias", f"={_HF}.gate_up_proj_bias", ""),
        (_EXPERTS, "downs.bias", f"={_HF}.down_proj_bias", ""),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        config = cls._of_gguf(config, checkpoint) if checkpoint.format == "gguf" else config
        return replace(config, layers=tuple(spec.but(has_sinks=True) for spec in config.layers))

    KEYS: ClassVar = {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": Nullable(int, 8),
        "head_dim": Nullable(int, 64), "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": True, "sliding_window": Nullable(int, 128),
        "layer_types": Nullable(list), "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT, **rope_keys(150000.0),
    }  # fmt: skip
    ALIASES: ClassVar = {"num_experts": "num_local_experts"}

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        source, num_layers = source_of(checkpoint), settings["num_hidden_layers"]
        for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if settings[key] != value:
                raise CheckpointError(
                    f"{source}: {key} is {settings[key]}; only {value} is supported."
                )
        config = from_settings(
            settings | {"rope_parameters": settings["rope_parameters"] or _YARN}, checkpoint
        )
        kinds = settings["layer_types"] or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)
        ]
        config = with_windows(
            config, windows_of(kinds, settings["sliding_window"], num_layers, source)
        )
        more: dict[str, Any] = {"renormalise": True, **_ROUTING}
        spec = hf_experts(settings, config, num="num_local_experts", **more)
        return replace(config, experts=(spec,) * num_layers)

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        window = required(data, f"{arch}.attention.sliding_window", int, source)
        layers = []
        for i, layer in enumerate(config.layers):
            rotation = layer.rotation
            # which the format has no word for
            if rotation is not None and rotation.scaling is not None:
                rotation = replace(rotation, scaling=replace(rotation.scaling, truncate=False))
            layers.append(replace(layer, window=0 if i % 2 else window, rotation=rotation))
        spec = gguf_experts(checkpoint, config, renormalise=True, **_ROUTING)
        return replace(config, layers=tuple(layers), experts=(spec,) * config.num_layers)
