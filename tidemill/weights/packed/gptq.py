"""GPTQ and AWQ: codes in 32-bit words with zero points, an input feature a row. GPTQ may have
features in the order of their importance (`g_idx`: the group of each)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.packed.base import (
    PackedTensor,
    Scheme,
    Stored,
    group_name,
    lacks,
    unpack,
    unsigned_codes,
)

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of a word's eight columns in its halves of bytes
_INTS, _HALVES = ("I32",), ("F16", "BF16", "F32")


class _Grouped(PackedTensor):
    """`qweight`, `qzeros`, `scales` [groups, out] and maybe `g_idx`."""

    bits: int

    def __init__(
        self,
        module: str,
        parts: dict[str, Stored],
        width: int,
        bits: int,
        group: int,
        symmetric: bool = False,
    ) -> None:
        self._parts, self.bits = parts, bits
        num_groups, num_out = parts["scales"].check(_HALVES, (None, None)).shape
        self._group = width if group == -1 else group
        if num_groups != -(-width // self._group):
            raise parts["scales"].broken(
                f"has {num_groups} groups of {self._group}, but the matrix has {width} columns"
            )
        parts["qzeros"].check(_INTS, (num_groups, num_out * bits // 32))
        kind = f"{'INT' if symmetric and bits in (4, 8) else 'UINT'}{4 if bits <= 4 else 8}"
        super().__init__(module, parts, (num_out, width), group_name(kind, self._group, width))

    def _codes(
        self, values_NK: np.ndarray, zeros_NG: np.ndarray, order: torch.Tensor | None
    ) -> Codes:
        scales = self._parts["scales"].scales().t().contiguous()
        codes, zeros, bits = unsigned_codes(values_NK, zeros_NG, self.bits)
        if order is not None:
            codes = codes[:, order]
        return Codes(
            bits, codes.contiguous(), scales, None, group=self._group, zeros_NG=zeros, order_K=order
        )


class GPTQTensor(_Grouped):
    """Codes [in / codes a word, out], zero points [groups, out / codes a word]. `zero_shift`: what
    stored zero points lack. `symmetric`: they are said to be in the middle."""

    def __init__(
        self,
        module: str,
        parts: dict[str, Stored],
        bits: int,
        group: int,
        zero_shift: int,
        symmetric: bool,
    ) -> None:
        num_words, num_out = parts["qweight"].check(_INTS, (None, None)).shape
        width = num_words * 32 // bits
        self._zero_shift = zero_shift
        super().__init__(module, parts, width, bits, group, symmetric)
        parts["scales"].check(_HALVES, (None, num_out))
        if "g_idx" in parts:
            parts["g_idx"].check(_INTS, (width,))

    def codes(self) -> Codes:
        num_out, width = self.shape
        values = unpack(self._parts["qweight"].read().t().contiguous(), self.bits, width)
        zeros = (
            unpack(self._parts["qzeros"].read(), self.bits, num_out).astype(np.int16)
            + self._zero_shift
        )
        return self._codes(values, zeros.T, self._order())

    def _order(self) -> torch.Tensor | None:
        """Columns, those of one group side by side; None if they are so already."""
        if "g_idx" not in self._parts:
            return None
        groups = self._parts["g_idx"].read().long()
        expected = torch.arange(groups.numel()) // self._group
        if torch.equal(groups, expected):
            return None
        if not torch.equal(groups.sort().values, expected):
            raise self._parts["g_idx"].broken(
                f"does not share the columns out among groups of {self._group}"
            )
        return groups.argsort(stable=True)


class AWQTensor(_Grouped):
    """Codes [in, out / 8], zero points [groups, out / 8]."""

    def __init__(self, module: str, parts: dict[str, Stored], group: int) -> None:
        width, num_words = parts["qweight"].check(_INTS, (None, None)).shape
        super().__init__(module, parts, width, 4, group)
        parts["scales"].check(_HALVES, (None, num_words * 8))

    def codes(self) -> Codes:
        return self._codes(self._unpacked("qweight"), self._unpacked("qzeros"), None)

    def _unpacked(self, part: str) -> np.ndarray:
        values = unpack(self._parts[part].read(), 4, self.shape[0])
        return np.ascontiguousarray(
            values.reshape(values.shape[0], -1, 8)[:, :, _AWQ_PLACES].reshape(values.shape).T
        )


class GPTQ(Scheme):
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        self._bits, self._group = (
            self.number(settings, "bits"),
            self.number(settings, "group_size", -1),
        )
        if self._bits not in (2, 3, 4, 8):
            raise self.refuse(
                f"GPTQ of {self._bits} bits cannot be read", "2, 3, 4 and 8 bits can."
            )
        layout = settings.get("checkpoint_format", settings.get("format", "gptq"))
        if layout not in ("gptq", "gptq_v2"):
            raise self.refuse(
                f"the layout {str(layout)[:50]!r} of GPTQ cannot be read", "gptq and gptq_v2 can."
            )
        if settings.get("dynamic"):
            raise self.refuse(
                "GPTQ with rules for single modules (dynamic) cannot be read",
                "Use the same bits everywhere.",
            )
        if self._group == 0:
            raise self.refuse("group_size is 0", "It must be -1 (one group a row) or more.")
        self._zero_shift, self._symmetric = (
            1 if layout == "gptq" else 0,
            settings.get("sym") is True,
        )

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor:
        lacks(module, parts, ("qweight", "qzeros", "scales"))
        return GPTQTensor(module, parts, self._bits, self._group, self._zero_shift, self._symmetric)


class AWQ(Scheme):
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        super().__init__(settings, path)
        self._group = self.number(settings, "group_size", self.number(settings, "q_group_size", -1))
        version = str(settings.get("version", settings.get("format", "gemm"))).lower()
        if (
            self.number(settings, "bits", self.number(settings, "w_bit", 4)) != 4
            or version != "gemm"
        ):
            raise self.refuse(
                f"AWQ of the layout {version[:50]!r} cannot be read",
                "4 bits in the layout gemm can.",
            )
        if self._group == 0:
            raise self.refuse("group_size is 0", "It must be -1 (one group a row) or more.")

    def tensor(self, module: str, parts: dict[str, Stored]) -> PackedTensor:
        lacks(module, parts, self.parts)
        return AWQTensor(module, parts, self._group)
