"""Bytes that weights take in memory: by the type they are stored in, for each way of holding them.

Types are GGUF's and safetensors', and for quantized Hugging Face folders what a value is and how
many share a scale: `INT4-G128`, `NF4-G64`, or `-C` where a row does. `BF16-L3/10`: two factors of a
matrix, which have 3 values for 10 of it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

# stored types that are numbers, and their resident bytes
PLAIN_TYPES = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2}
# kernels of signed 4-bit codes, which need no offsets
SIGNED_4_BITS = platform.machine() in ("aarch64", "arm64")
_GROUP = 32
# Codes, and two or four bytes of scale and offset for 32 of them.
_GGUF = {
    "Q4_0": 20 / 32, "Q4_1": 20 / 32, "Q4_K": 20 / 32, "Q8_0": 34 / 32, "Q5_0": 34 / 32, "Q5_1": 36 / 32, "Q5_K": 36 / 32,
    "MXFP4": 18 / 32, "TQ1_0": 0.25 + 4 / 256, "TQ2_0": 0.25 + 4 / 256,
}  # fmt: skip
_FLOATS_8 = {"F8_E4M3": 2.0, "F8_E5M2": 2.0}  # become bfloat16
_ROUNDED = 34 / 32  # rounded anew to 8 bits
_SCALE = 4
# Of quantized folders: bytes of a code and of what a group has.
_GROUPED = {
    "INT4": (0.5, _SCALE if SIGNED_4_BITS else 2 * _SCALE), "UINT4": (0.5, 2 * _SCALE), "NF4": (0.5, _SCALE),
    "FP4": (0.5, _SCALE),
    "E2M1": (0.5, _SCALE), "INT8": (1.0, _SCALE), "UINT8": (1.0, 2 * _SCALE), "W8A8": (1.0, _SCALE), "TERNARY": (0.25, 0),
    "CENTROIDS4": (0.5, 0),
}  # fmt: skip


def is_packed(kind: str) -> bool:
    """Tells if the compiled kernels of the CPU multiply values as they are stored."""
    return (
        kind in _GGUF
        or low_rank(kind) is not None
        or (kind not in PLAIN_TYPES and kind not in _FLOATS_8 and _grouped(kind) is not None)
    )


def low_rank(kind: str) -> tuple[str, float] | None:
    """The type of the factors, and how many values they have for one of the matrix; None: there are
    none."""
    name, found, share = kind.partition("-L")
    num, _, whole = share.partition("/")
    return (name, int(num) / int(whole)) if found else None


def _grouped(kind: str) -> float | None:
    """Bytes a value; None if the kernels have no groups of this size."""
    name, _, size = kind.partition("-")
    if name not in _GROUPED:
        return None
    code, scale = _GROUPED[name]
    if size in ("", "C"):
        return code  # and a scale a row
    group = int(size[1:])
    return code + scale / group if group % _GROUP == 0 else None


def _dense(kind: str, compiled: bool) -> float:
    """Factors are multiplied out."""
    return PLAIN_TYPES.get(kind, 4) if compiled else 4


def _quantized(kind: str, compiled: bool) -> float:
    factors = low_rank(kind)
    if factors is not None:
        return _dense(factors[0], compiled) * factors[1]
    if kind in PLAIN_TYPES:
        return _dense(kind, compiled)
    found = _GGUF.get(kind) or _FLOATS_8.get(kind) or _grouped(kind)
    return _ROUNDED if found is None else found


_BFLOAT16 = 2
_FOUR = frozenset(
    {"Q4_0", "Q4_1", "Q4_K", "MXFP4", "INT4", "UINT4", "NF4", "FP4", "E2M1", "CENTROIDS4"}
)
_TERNARY = {"TERNARY": 0, "TQ1_0": 256, "TQ2_0": 256}  # values to a scale; 0: all
_GPU_SCALE = 4  # bytes of a scale with its zero point or offset


def _gpu_packed(kind: str, compiled: bool) -> float:
    """On a GPU: codes of 2, 4 or 8 bits as they are stored."""
    factors = low_rank(kind)
    if factors is not None:
        return _BFLOAT16 * factors[1]
    if kind in PLAIN_TYPES:
        return _BFLOAT16
    name, _, group = kind.partition("-")
    size = int(group[1:]) if group[:1] == "G" and group[1:].isdecimal() else 0
    if not group and name.startswith(("Q", "IQ", "MX", "TQ")):
        size = _TERNARY.get(name, _GROUP)
    bits = 4 if name in _FOUR else 2 if name in _TERNARY else 8
    return bits / 8 + (_GPU_SCALE / size if size else 0)


@dataclass(frozen=True)
class Held:
    """The weights that a method of `quant.METHODS` makes of stored types: bytes a value, with or
    without the compiled kernels."""

    bytes_of: Callable[[str, bool], float]


def _each(num_bytes: float) -> Held:
    return Held(lambda kind, compiled: num_bytes)


HELD = {
    ("dense", "cpu"): Held(_dense), ("quantized", "cpu"): Held(_quantized), ("dense", "cuda"): _each(_BFLOAT16),
    ("quantized", "cuda"): Held(_gpu_packed), ("fp8", "cuda"): _each(1.0), ("int8", "cuda"): _each(1.0),
    # if they should not be sparse
    ("int4", "cuda"): _each(0.5 + _GPU_SCALE / 128), ("sparse24", "cuda"): _each(_BFLOAT16),
}  # fmt: skip
