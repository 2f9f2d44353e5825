"""Shapes of well-known models, so that one can plan without their files."""

from __future__ import annotations

from dataclasses import replace

from tidemill.types.model_config import (
    AttentionSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
    StateSpec,
    alike,
)


def _dense(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    head: int = 128,
    tied: bool = False,
) -> ModelConfig:
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head, scale=head**-0.5, rotation=None
    )
    return ModelConfig(
        architecture="shape",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=alike(layers, spec),
        max_context=131_072,
        norm_eps=1e-5,
        tie_embeddings=tied,
    )


def _experts(dense: ModelConfig, num: int, top_k: int, shared: int = 0) -> ModelConfig:
    moe = MoESpec(
        num_experts=num,
        top_k=top_k,
        expert_size=dense.intermediate_size,
        renormalise=True,
        shared_size=shared,
    )
    return replace(dense, experts=(moe,) * dense.num_layers)


def _but_every(nth: int, model: ModelConfig, spec: LayerSpec) -> ModelConfig:
    """The model in which all layers but each nth have this spec."""
    layers = [own if number % nth == 0 else spec for number, own in enumerate(model.layers, 1)]
    return replace(model, layers=tuple(layers))


_GEMMA = _dense(62, 5376, 21_504, 32, 16, 262_208, tied=True)
_WINDOW = _GEMMA.layers[0].but(window=1024)
_DELTA = StateSpec(
    kind="delta", num_heads=32, head_dim=128, state_size=128, num_groups=16, norm_size=128
)

SHAPES: dict[str, ModelConfig] = {
    "smollm2": _dense(30, 576, 1536, 9, 3, 49_152, 64, tied=True),
    "qwen06b": _dense(28, 1024, 3072, 16, 8, 151_936, tied=True),
    "llama8b": _dense(32, 4096, 14_336, 32, 8, 128_256),
    "qwen14b": _dense(40, 5120, 17_408, 40, 8, 151_936),
    "qwen32b": _dense(64, 5120, 25_600, 64, 8, 151_936),
    "llama70b": _dense(80, 8192, 28_672, 64, 8, 128_256),
    "gemma27b": _but_every(6, _GEMMA, _WINDOW),
    "qwen30b": _experts(_dense(48, 2048, 768, 32, 4, 151_936), 128, 8),  # 3B of 30B active
    # 3B active
    "qwen80b": _but_every(
        4, _experts(_dense(48, 2048, 512, 16, 2, 151_936, 256), 512, 10, shared=512), _DELTA
    ),
}

NAMES = {  # by which `tidemill serve` finds one of that shape
    "smollm2": "smollm2",
    "qwen06b": "Qwen/Qwen3-0.6B",
    "llama8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen14b": "Qwen/Qwen3-14B",
    "qwen32b": "Qwen/Qwen3-32B",
    "llama70b": "meta-llama/Llama-3.3-70B-Instruct",
    "gemma27b": "google/gemma-3-27b-it",
    "qwen30b": "Qwen/Qwen3-30B-A3B",
    "qwen80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
