"""Vectors as bytes: the number formats and byte orders in which an embedding can be asked for.
Loads neither torch nor numpy."""

from __future__ import annotations

import math
import struct
import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Literal

EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

_MAX_HALF = 65504.0
_FP8 = {
    "fp8_e4m3": (3, 7, 448.0),
    "fp8_e5m2": (2, 15, 57344.0),
}  # bits of the mantissa, bias, largest


def packed(vector: Sequence[float], dtype: EmbedDType, endianness: Endianness) -> bytes:
    """Rounded to the nearest, a tie to the even one; what is too large becomes the largest."""
    order = {"little": "<", "big": ">"}[sys.byteorder if endianness == "native" else endianness]
    match dtype:
        case "float32":
            return struct.pack(f"{order}{len(vector)}f", *vector)
        case "float16":
            return struct.pack(
                f"{order}{len(vector)}e",
                *(max(-_MAX_HALF, min(value, _MAX_HALF)) for value in vector),
            )
        case "bfloat16":
            bits = struct.unpack(f"<{len(vector)}I", struct.pack(f"<{len(vector)}f", *vector))
            return struct.pack(
                f"{order}{len(vector)}H",
                *((each + 0x7FFF + (each >> 16 & 1)) >> 16 for each in bits),
            )
        case _:
            return bytes(_fp8(value, dtype) for value in vector)


def _fp8(value: float, dtype: str) -> int:
    values = _fp8_values(dtype)
    size = min(abs(value), values[-1])
    above = min(bisect_left(values, size), len(values) - 1)
    below = max(above - 1, 0)
    to_below, to_above = size - values[below], values[above] - size
    code = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


@cache
def _fp8_values(dtype: str) -> list[float]:
    """The values of the codes that are not negative, in order."""
    mantissa, bias, largest = _FP8[dtype]
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa)
        values.append((fraction + (1 << mantissa if exponent else 0)) * scale)
    return [value for value in values if value <= largest]
