"""bitsandbytes: rows of bytes (LLM.int8()), and 4-bit numbers of a table (NF4, FP4) whose scales
may be quantized, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.kernels.quantized_linear import Activations, Codes
from tidemill.weights.packed.base import PackedTensor, Scheme, Stored, group_name, lacks

_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_LARGEST_OFFSET = 1e30
_THRESHOLD, _LARGEST_THRESHOLD = 6.0, 1e30  # of LLM.int8(), where none is given


class Int8Tensor(PackedTensor):
    """`weight` int8 [out, in]; `SCB`: the largest absolute value of each row. `threshold`:
    activations of this size and more are multiplied as they are."""

    def __init__(self, module: str, parts: dict[str, Stored], threshold: float) -> None:
        lacks(module, parts, ("weight", "SCB"))
        num_out, width = parts["weight"].check(("I8",), (None, None)).shape
        parts["SCB"].check(("F32", "F16", "BF16"), (num_out,))
        self._parts, self._activations = parts, Activations(threshold=threshold or None)
        super().__init__(module, parts, (num_out, width), "W8A8-C")

    def codes(self) -> Codes:
        scales = self._parts["SCB"].scales().reshape(-1, 1) / 127
        codes = self._parts["weight"].read()
        return Codes(8, codes, scales, None, group=self.shape[1], activations=self._activations)


class FourBitTensor(PackedTensor):
    """`weight` uint8, two numbers a byte, the high half first; blocks of values share a largest
    absolute value, `absmax`."""

    def __init__(self, module: str, parts: dict[str, Stored], kind: str) -> None:
        lacks(module, parts, ("weight", "weight.absmax", "weight.quant_map", f"{_STATE}{kind}"))
        self._parts = parts
        self._state = _read_state(parts[f"{_STATE}{kind}"])
        self._block = self._number("blocksize")
        shape = self._state.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(n) is int and 0 < n < 2**31 for n in shape)
        ):
            raise parts[f"{_STATE}{kind}"].broken(f"says the shape {str(shape)[:50]}")
        num_out, width = shape
        num = num_out * width
        if parts["weight"].check(("U8",)).num_bytes != -(-num // 2):
            raise parts["weight"].broken(
                f"has {parts['weight'].num_bytes} bytes, but the matrix has {num} values of 4 bits"
            )
        parts["weight.quant_map"].check(("F32",), (16,))
        parts["weight.absmax"].check(("F32", "U8"), (-(-num // self._block),))
        self._group = math.gcd(width, self._block)  # a block may begin within a row
        if parts["weight.absmax"].dtype == "U8":
            lacks(f"{module}.weight", parts, ("weight.nested_absmax", "weight.nested_quant_map"))
            num_nested = -(-parts["weight.absmax"].shape[0] // self._number("nested_blocksize"))
            parts["weight.nested_absmax"].check(("F32", "F16", "BF16"), (num_nested,))
            parts["weight.nested_quant_map"].check(("F32", "F16", "BF16"), (256,))
        super().__init__(
            module, parts, (num_out, width), group_name(kind.upper(), self._group, width)
        )

    def _number(self, key: str) -> int:
        value = self._state.get(key)
        if type(value) is not int or not 0 < value < 2**20:
            raise self._parts["weight"].broken(f"has the {key} {str(value)[:50]!r}")
        return value

    def _largest(self) -> torch.Tensor:
        """The largest value of each block, in float32."""
        stored = self._parts["weight.absmax"]
        if stored.dtype == "F32":
            return stored.scales()
        block, offset = self._number("nested_blocksize"), self._state.get("nested_offset")
        if not isinstance(offset, (int, float)) or not abs(offset) < _LARGEST_OFFSET:
            raise stored.broken(f"has the nested_offset {str(offset)[:50]!r}")
        codes = stored.read().int()
        nested = self._parts["weight.nested_absmax"].scales()
        numbers = self._parts["weight.nested_quant_map"].scales()
        largest = numbers[codes] * nested.repeat_interleave(block)[: codes.numel()] + offset
        if not largest.isfinite().all():
            raise stored.broken("has scales that are not finite")
        return largest

    def codes(self) -> Codes:
        num_out, width = self.shape
        raw = self._parts["weight"].read().numpy().reshape(-1)
        numbers = (
            np.stack([raw >> 4, raw & 15], axis=-1)
            .reshape(-1)[: num_out * width]
            .reshape(num_out, width)
        )
        firsts = torch.arange(0, num_out * width, self._group)  # of each group of a row: its block
        scales = self._largest()[firsts // self._block].reshape(num_out, -1)
        table = self._parts["weight.quant_map"].scales()
        return Codes(
            4,
            torch.from_numpy(numbers).view(torch.int8),
            scales,
            None,
            group=self._group,
            table=table,
        )


def _read_state(stored: Stored) -> dict[str, Any]:
    if stored.check(("U8",), (None,)).num_bytes > _MAX_STATE_BYTES:
        raise stored.broken(f"is longer than {_MAX_STATE_BYTES} bytes")
    try:
        state = json.loads(bytes(stored.read().tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise stored.broken("is no JSON") from error
    if not isinstance(state, dict):
        raise stored.broken("is no JSON object")
    return state


class BitsAndBytes(Scheme):
    parts = (
        f"{_STATE}nf4", f"{_STATE}fp4", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        "SCB", "weight",
    )  # fmt: skip
    dropped = ("weight_format",)

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        if not settings.get("load_in_8bit") and not settings.get("load_in_4bit"):
            raise self.refuse(
                "bitsandbytes says neither load_in_8bit nor load_in_4bit",
                "Quantize the model again.",
            )
        threshold = settings.get("llm_int8_threshold", _THRESHOLD)
        if (
            not isinstance(threshold, (int, float))
            or isinstance(threshold, bool)
            or not 0 <= threshold < _LARGEST_THRESHOLD
        ):
            raise self.refuse(
                f"llm_int8_threshold is {str(threshold)[:50]!r}",
                "It must be a number from 0 (no outliers) on.",
            )
        self._threshold = float(threshold)

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor | None:
        for kind in ("nf4", "fp4"):
            if f"{_STATE}{kind}" in parts:
                return FourBitTensor(module, parts, kind)
        if "SCB" in parts or ("weight" in parts and parts["weight"].dtype == "I8"):
            return Int8Tensor(module, parts, self._threshold)
        return None
