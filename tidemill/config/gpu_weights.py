"""Bytes that weights take on a GPU, by their scheme."""

from __future__ import annotations

from tidemill.model_config import ModelConfig
from tidemill.weight_types import PLAIN_TYPES

_BFLOAT16 = 2
# A value with its part of a scale; of 2:4 sparse ones, if they should not be sparse.
_BITS = {"fp8": 8.0, "int8": 8.0, "int4": 4 + 32 / 128, "sparse24": 16.0}
_FOUR = frozenset({"Q4_0", "Q4_1", "Q4_K", "MXFP4", "INT4", "UINT4", "NF4", "FP4", "E2M1"})
_GROUP = 32  # of GGUF's types
_SCALE = 32  # bits of a scale with its zero or offset


def _stored_bytes(kind: str) -> float:
    """Of one value that stays as it is stored, as `PackedTensor.type_name` and GGUF name it."""
    if kind in PLAIN_TYPES:
        return _BFLOAT16
    name, _, group = kind.partition("-")
    size = int(group[1:]) if group[:1] == "G" and group[1:].isdigit() else 0
    bits = 4 if name in _FOUR else 2 if name == "TERNARY" else 8
    if not group and name.startswith(("Q", "IQ", "MX", "TQ")):
        size = _GROUP
    return (bits + (_SCALE / size if size else 0)) / 8


def gpu_weight_bytes(model: ModelConfig, scheme: str) -> int:
    """With the buffer in which a packed matrix is dequantized."""
    experts = sum(3 * model.hidden_size * moe.expert_size * moe.num_experts for moe in model.experts if moe)
    tables = model.vocab_size * (1 if model.tie_embeddings else 2) * model.hidden_size
    buffer = _BFLOAT16 * 2 * model.hidden_size * max(model.intermediate_size, model.num_heads * model.head_dim)
    if scheme == "dense":
        return _BFLOAT16 * model.num_parameters
    if scheme != "quantized":
        linears = max(0, model.num_parameters - experts - tables)
        return int(_BFLOAT16 * (experts + tables) + linears * _BITS[scheme] / 8) + (buffer if scheme == "int4" else 0)
    share = experts / model.num_parameters
    stored = sum(num * ((1 - share) * _stored_bytes(kind) + share * _BFLOAT16) for kind, num in model.stored.items())
    return int(stored) + buffer
