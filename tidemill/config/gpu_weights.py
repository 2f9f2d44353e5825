"""Bytes that a model's weights take on a GPU, by their scheme."""

from __future__ import annotations

from tidemill.types.model_config import ModelConfig
from tidemill.types.weight_types import HELD

_BFLOAT16 = 2  # bytes of what is not quantized


def gpu_weight_bytes(model: ModelConfig, scheme: str) -> int:
    """The bytes of the weights on a GPU, with the buffer in which a packed matrix is dequantized."""
    experts = sum(
        3 * model.hidden_size * moe.expert_size * moe.num_experts for moe in model.experts if moe
    )
    tables = model.vocab_size * (1 if model.tie_embeddings else 2) * model.hidden_size
    buffer = (
        _BFLOAT16
        * 2
        * model.hidden_size
        * max(model.intermediate_size, model.num_heads * model.head_dim)
    )
    bytes_of = HELD[scheme, "cuda"].bytes_of
    if scheme == "dense":
        return _BFLOAT16 * model.num_parameters
    if scheme != "quantized":
        linears = max(0, model.num_parameters - experts - tables)
        return int(_BFLOAT16 * (experts + tables) + linears * bytes_of("BF16", True)) + (
            buffer if scheme == "int4" else 0
        )
    share = experts / model.num_parameters
    stored = sum(
        num * ((1 - share) * bytes_of(kind, True) + share * _BFLOAT16)
        for kind, num in model.stored.items()
    )
    return int(stored) + buffer
