"""Shapes of well-known models, so that one can plan without their files."""

from __future__ import annotations

from tidemill.model_config import AttentionSpec, ModelConfig, MoESpec, alike


def _dense(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, head: int = 128, tied: bool = False
) -> ModelConfig:
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head, scale=head**-0.5, rotation=None)
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


def _experts(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, num: int, top_k: int, size: int) -> ModelConfig:
    dense = _dense(layers, hidden, size, heads, kv_heads, vocab)
    moe = MoESpec(num_experts=num, top_k=top_k, expert_size=size, renormalise=True)
    return ModelConfig(
        architecture="shape",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=size,
        layers=dense.layers,
        max_context=dense.max_context,
        norm_eps=dense.norm_eps,
        experts=(moe,) * layers,
    )


SHAPES: dict[str, ModelConfig] = {
    "smollm2": _dense(30, 576, 1536, 9, 3, 49_152, 64, tied=True),
    "qwen06b": _dense(28, 1024, 3072, 16, 8, 151_936, tied=True),
    "llama8b": _dense(32, 4096, 14_336, 32, 8, 128_256),
    "qwen14b": _dense(40, 5120, 17_408, 40, 8, 151_936),
    "qwen32b": _dense(64, 5120, 25_600, 64, 8, 151_936),
    "llama70b": _dense(80, 8192, 28_672, 64, 8, 128_256),
    "qwen30b": _experts(48, 2048, 32, 4, 151_936, 128, 8, 768),  # 3B of 30B active
}

NAMES = {  # by which `tidemill serve` finds one of that shape
    "smollm2": "smollm2",
    "qwen06b": "Qwen/Qwen3-0.6B",
    "llama8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen14b": "Qwen/Qwen3-14B",
    "qwen32b": "Qwen/Qwen3-32B",
    "llama70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen30b": "Qwen/Qwen3-30B-A3B",
}
