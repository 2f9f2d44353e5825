"""compressed-tensors (llm-compressor, vLLM): codes packed into words or a byte each, 8-bit floats,
4-bit floats."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.kernels.quantized_linear import E2M1, Activations, Codes
from tidemill.weights.packed.base import (
    PackedTensor,
    Scheme,
    Stored,
    group_name,
    lacks,
    num_words,
    unpack,
    unpack_words,
    unsigned_codes,
)
from tidemill.weights.packed.fp8 import FP8Tensor
from tidemill.weights.packed.sparse import Sparse24Tensor

_FLOATS = ("F32", "F16", "BF16")
_CODES = ("I8", "F8_E4M3", "F8_E5M2")  # which mean nothing without scales
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mixed-precision", "dense",
)  # fmt: skip
_MAX_PATTERN = 200  # characters of a target


class _Integers(PackedTensor):
    """Signed codes with a scale for the matrix, a row or a group of columns, and maybe zero points."""

    def __init__(
        self,
        module: str,
        parts: dict[str, Stored],
        shape: tuple[int, int],
        kind: str,
        bits: int,
        activations: Activations | None,
    ) -> None:
        self._parts, self.bits, self._activations = parts, bits, activations
        num_out, width = shape
        scale = parts["weight_scale"].check(_FLOATS)
        self._num_groups = scale.shape[-1] if len(scale.shape) == 2 else 1
        rows = scale.shape[0] if scale.shape else 1
        if len(scale.shape) > 2 or rows not in (1, num_out) or width % self._num_groups:
            raise scale.broken(
                f"has shape {list(scale.shape)}, which does not fit a matrix of {list(shape)}"
            )
        self._group = width // self._num_groups
        if "weight_g_idx" in parts:
            parts["weight_g_idx"].check(("I32", "I64"), (width,))
        super().__init__(module, parts, shape, group_name(kind, self._group, width))

    def _scales(self) -> torch.Tensor:
        scales = self._parts["weight_scale"].scales()
        return scales.reshape(-1, self._num_groups).expand(self.shape[0], -1).contiguous()

    def _order(self) -> torch.Tensor | None:
        if "weight_g_idx" not in self._parts:
            return None
        groups = self._parts["weight_g_idx"].read().long()
        expected = torch.arange(groups.numel()) // self._group
        if torch.equal(groups, expected) or bool((groups < 0).all()):  # -1: not set
            return None
        if not torch.equal(groups.sort().values, expected):
            raise self._parts["weight_g_idx"].broken(
                f"does not share the columns out among groups of {self._group}"
            )
        return groups.argsort(stable=True)

    def _made(self, values_NK: np.ndarray, zeros_NG: np.ndarray) -> Codes:
        """The codes, from 0 on."""
        codes, zeros, bits = unsigned_codes(values_NK, np.ascontiguousarray(zeros_NG), self.bits)
        order = self._order()
        if order is not None:
            codes = codes[:, order].contiguous()
        return Codes(
            bits,
            codes,
            self._scales(),
            None,
            group=self._group,
            zeros_NG=zeros,
            order_K=order,
            activations=self._activations,
        )


def _check_words(
    stored: Stored, bits: int, num: int, shape: tuple[int | None, int | None], dim: int = 1
) -> None:
    """That `num` codes lie along that dimension."""
    lengths = num_words(bits, num)
    if stored.check(("I32",), shape).shape[dim] not in lengths:
        raise stored.broken(
            f"has {stored.shape[dim]} words for {num} codes of {bits} bits, not {lengths[0]}"
        )


class PackedIntegers(_Integers):
    """`weight_packed` [out, words], zero points packed along rows."""

    def __init__(
        self, module: str, parts: dict[str, Stored], bits: int, activations: Activations | None
    ) -> None:
        lacks(module, parts, ("weight_packed", "weight_scale", "weight_shape"))
        stored = parts["weight_shape"].check(("I64", "I32"), (2,)).read().tolist()
        num_out, width = int(stored[0]), int(stored[1])
        if not 0 < width < 2**31 or not 0 < num_out < 2**31:
            raise parts["weight_shape"].broken(f"says {stored}")
        _check_words(parts["weight_packed"], bits, width, (num_out, None))
        if "weight_zero_point" in parts:
            _check_words(parts["weight_zero_point"], bits, num_out, (None, None), dim=0)
        kind = "UINT" if "weight_zero_point" in parts else "INT"
        super().__init__(
            module, parts, (num_out, width), f"{kind}{4 if bits <= 4 else 8}", bits, activations
        )
        if "weight_zero_point" in parts:
            parts["weight_zero_point"].check(("I32",), (None, self._num_groups))

    def codes(self) -> Codes:
        num_out, width = self.shape
        values = unpack_words(self._parts["weight_packed"].read(), self.bits, width)
        zeros = np.full((num_out, self._num_groups), 2 ** (self.bits - 1), np.int16)
        stored = self._parts.get("weight_zero_point")
        if stored is not None:
            zeros = unpack_words(stored.read().t().contiguous(), self.bits, num_out).T
        return self._made(values, zeros)


class ByteIntegers(_Integers):
    """`weight` int8 [out, in], and zero points of the same type."""

    def __init__(
        self, module: str, parts: dict[str, Stored], bits: int, activations: Activations | None
    ) -> None:
        num_out, width = parts["weight"].shape
        kind = "UINT8" if "weight_zero_point" in parts else "W8A8" if activations else "INT8"
        super().__init__(module, parts, (num_out, width), kind, bits, activations)
        zeros = parts.get("weight_zero_point")
        num_zeros = 0 if zeros is None else math.prod(zeros.check(("I8",)).shape)
        if zeros is not None and num_zeros not in (self._num_groups, num_out * self._num_groups):
            raise zeros.broken(
                f"has {num_zeros} zero points for {num_out} rows of {self._num_groups} groups"
            )

    def codes(self) -> Codes:
        codes, stored, zeros = (
            self._parts["weight"].read(),
            self._parts.get("weight_zero_point"),
            None,
        )
        if stored is not None:
            zeros = (
                stored.read()
                .reshape(-1, self._num_groups)
                .float()
                .expand(self.shape[0], -1)
                .contiguous()
            )
        return Codes(
            8, codes, self._scales(), None, group=self._group, zeros_NG=zeros,
            activations=None if zeros is not None else self._activations,
        )  # fmt: skip


class FourBitFloats(PackedTensor):
    """nvfp4: E2M1 with an 8-bit float for 16 of them, and one for all; mxfp4: with a power of two
    for 32."""

    def __init__(self, module: str, parts: dict[str, Stored]) -> None:
        lacks(module, parts, ("weight_packed", "weight_scale"))
        num_out, num_bytes = parts["weight_packed"].check(("U8",), (None, None)).shape
        self._parts, width = parts, num_bytes * 2
        num_groups = (
            parts["weight_scale"].check(("U8", "F8_E4M3", *_FLOATS), (num_out, None)).shape[1]
        )
        if width % num_groups:
            raise parts["weight_scale"].broken(
                f"has {num_groups} groups, but the matrix has {width} columns"
            )
        self._group = width // num_groups
        if "weight_global_scale" in parts:
            parts["weight_global_scale"].single()
        super().__init__(module, parts, (num_out, width), group_name("E2M1", self._group, width))

    def codes(self) -> Codes:
        values = unpack(self._parts["weight_packed"].read(), 4, self.shape[1])
        stored = self._parts["weight_scale"]
        scales = (
            torch.ldexp(torch.tensor(1.0), stored.read().int() - 127)
            if stored.dtype == "U8"
            else stored.scales()
        )
        if "weight_global_scale" in self._parts:
            of_all = self._parts["weight_global_scale"].scales()
            if not of_all.item() > 0:
                raise self._parts["weight_global_scale"].broken("must be above 0")
            scales = scales / of_all.item()
        if not scales.isfinite().all():
            raise stored.broken("holds scales that are not finite")
        codes = torch.from_numpy(np.ascontiguousarray(values)).view(torch.int8)
        return Codes(
            4, codes, scales.contiguous(), None, group=self._group, table=torch.from_numpy(E2M1)
        )


class CompressedTensors(Scheme):
    parts = (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight",
        "compressed", "bitmask", "shape", "input_scale",
    )  # fmt: skip
    dropped = (
        "input_zero_point",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
        "q_scale",
        "input_global_scale",
    )

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        layout = settings.get("format") or "dense"
        if layout not in _FORMATS:
            raise self.refuse(
                f"compressed-tensors of format {str(layout)[:50]!r} cannot be read",
                f"{', '.join(_FORMATS)} can.",
            )
        if settings.get("transform_config"):
            raise self.refuse(
                "compressed-tensors with transforms (transform_config) cannot be read",
                "Quantize without them.",
            )
        sparsity = settings.get("sparsity_config") or {}
        self._sparse = isinstance(sparsity, dict) and sparsity.get("format") == "sparse-24-bitmask"
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(
            isinstance(group, dict) for group in groups.values()
        ):
            raise self.refuse(
                "config_groups of quantization_config is not a table", "Quantize the model again."
            )
        self._groups = [_Group(self, group) for group in groups.values()]

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor | None:
        if "compressed" in parts or "bitmask" in parts:
            return Sparse24Tensor(module, parts)
        if "weight_packed" in parts:
            if parts["weight_packed"].dtype == "U8":
                return FourBitFloats(module, parts)
            group = self._group(module)
            return PackedIntegers(module, parts, group.bits, None)
        if "weight" not in parts or (
            parts["weight"].dtype not in _CODES and "weight_scale" not in parts
        ):
            return None
        lacks(module, parts, ("weight_scale",))
        if parts["weight"].dtype == "I8":
            parts["weight"].check(("I8",), (None, None))
            group = self._group(module)
            return ByteIntegers(
                module, parts, group.bits, group.activations(parts.get("input_scale"))
            )
        block = self._group(module).block if parts["weight"].dtype.startswith("F8") else None
        return FP8Tensor(module, parts, "weight_scale", block)

    def _group(self, module: str) -> _Group:
        for group in self._groups:
            if group.matches(module):
                return group
        raise self.refuse(
            f"no group of config_groups has {module[:200]} among its targets",
            "Quantize the model again.",
        )


class _Group:
    """The quantization of the matrices of some modules."""

    def __init__(self, scheme: Scheme, settings: dict[str, Any]) -> None:
        weights, inputs = settings.get("weights"), settings.get("input_activations")
        if not isinstance(weights, dict) or not isinstance(inputs, (dict, type(None))):
            raise scheme.refuse(
                "a group of config_groups does not say how weights are quantized",
                "Quantize the model again.",
            )
        self.bits = scheme.number(weights, "num_bits")
        if not 1 <= self.bits <= 8:
            raise scheme.refuse(f"weights of {self.bits} bits cannot be read", "1 to 8 bits can.")
        self._inputs = inputs
        block = weights.get("block_structure")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise scheme.refuse(
                f"block_structure is {str(block)[:50]!r}", "It must be two whole numbers above 0."
            )
        self.block = None if block is None else (block[0], block[1])
        targets = settings.get("targets") or []
        if not isinstance(targets, list) or not all(
            isinstance(target, str) and len(target) <= _MAX_PATTERN for target in targets
        ):
            raise scheme.refuse(
                "targets of a group of config_groups must be short names",
                "Quantize the model again.",
            )
        self._targets: list[str | re.Pattern[str]] = [
            _pattern(scheme, target) for target in targets
        ]

    def matches(self, module: str) -> bool:
        return any(
            target.match(module) is not None
            if isinstance(target, re.Pattern)
            else target in ("Linear", module) or module.endswith(f".{target}")
            for target in self._targets
        )

    def activations(self, scale: Stored | None) -> Activations | None:
        """The conversion of activations to bytes for 8-bit weights; None if they stay floats."""
        if (
            self._inputs is None
            or self._inputs.get("num_bits") != 8
            or self._inputs.get("type", "int") != "int"
        ):
            return None
        if not self._inputs.get("symmetric", True):
            return None
        if self._inputs.get("dynamic"):
            return Activations()
        values = None if scale is None else scale.scales()
        if scale is None or values is None or values.numel() != 1:
            return None
        if not values.item() > 0:
            raise scale.broken("must be above 0")
        return Activations(float(values.item()))


def _pattern(scheme: Scheme, target: str) -> str | re.Pattern[str]:
    if not target.startswith("re:"):
        return target
    text = target.removeprefix("re:")
    # could take for ever on a long name
    if re.search(r"[*+})][*+{?]", text) or text.count("*") + text.count("+") > 6:
        raise scheme.refuse(f"the target {target!r} is too complex", "Name the modules.")
    try:
        return re.compile(text)
    except re.error as error:
        raise scheme.refuse(
            f"the target {target!r} is no regular expression ({error})", "Name the modules."
        ) from error
