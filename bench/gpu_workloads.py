"""What engines are measured on with a GPU: lists of (prompt ids, tokens to generate), greedy, no
early end, random weights.

The numbers are drawn in one order from one seed, so that every engine that draws them alike
computes the same tokens.
"""

from __future__ import annotations

import random
from typing import Any

Request = tuple[list[int], int]

MODELS: dict[str, dict[str, Any]] = {
    "llama8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "qwen06b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "qwen30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip

# vLLM 0.25.1 on an H200: seconds for the whole workload; for latency_b1 the time per output token
# in ms.
_NAMES = (
    "latency_b1",
    "mixed_256",
    "mixed_1000",
    "prefill_4k",
    "decode_b256",
    "shared_prefix",
    "long_ctx_b8",
)
VLLM = {
    "llama8b": dict(zip(_NAMES, (4.92, 14.49, 51.58, 6.49, 7.06, 2.75, 6.23), strict=True)),
    "qwen06b": dict(zip(_NAMES, (1.68, 6.26, 29.86, 0.79, 3.22, 1.92, 1.97), strict=True)),
    "qwen30b": {"latency_b1": 4.13, "mixed_256": 24.78, "prefill_4k": 4.22, "decode_b256": 11.96},
}
# The same with fp8 weights and activations: its output or prompt tokens a second, as seconds for
# the whole.
VLLM_FP8 = {
    "latency_b1": 3.49,
    "mixed_256": 14.49 * 10321 / 12420,
    "prefill_4k": 64 * 4096 / 61254,
    "decode_b256": 256 * 512 / 23142,
}


def workloads(vocabulary: int) -> dict[str, list[Request]]:
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(num)]

    def mixed(num: int) -> list[Request]:
        return [(ids(draw.randint(100, 1024)), draw.randint(100, 1024)) for _ in range(num)]

    made = {"latency_b1": [(ids(128), 256)], "mixed_256": mixed(256), "mixed_1000": mixed(1000)}
    made["prefill_4k"] = [(ids(4096), 1) for _ in range(64)]
    made["decode_b256"] = [(ids(128), 512) for _ in range(256)]
    shared = ids(4096)
    made["shared_prefix"] = [(shared + ids(64), 64) for _ in range(256)]
    made["long_ctx_b8"] = [(ids(16384), 256) for _ in range(8)]
    made["prompt_32k"] = [(ids(32000), 1)]
    made["prompts_2k_6k"] = [(ids(draw.randint(2000, 6000)), 1) for _ in range(128)]
    return made
