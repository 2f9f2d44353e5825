"""The layouts of GPTQ and AWQ: an input feature a row, eight 4-bit codes a word, zero points and
scales of groups."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.layouts.base import Layout, pack, unsigned
from tidemill.compress.stored import IntWeight, Stored

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word, from its lowest bits on


class _Grouped(Layout):
    bits: tuple[int, ...]  # that it can hold

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()  # bits and groups
        self._bits: set[int] = set()
        self._widest = 0  # of the matrices whose rows have one scale

    def check(self, name: str, stored: IntWeight) -> None:
        if stored.bits not in self.bits:
            raise self.refuse(
                name,
                f"it has {stored.bits} bits",
                f"Choose --bits {' or '.join(map(str, self.bits))}.",
            )
        if stored.act_scale is not None or stored.threshold is not None:
            raise self.refuse(
                name, "its activations are quantized", "Choose --format compressed-tensors."
            )
        num_out, width = stored.codes_NK.shape
        for what, size in (("rows", num_out), ("columns", width)):
            if size * stored.bits % 32:
                raise self.refuse(
                    name,
                    f"its {size} {what} are no whole words of 32 bits",
                    "Choose --format compressed-tensors.",
                )
        if stored.group < width:
            self._seen.add((stored.bits, stored.group))
        else:
            self._widest = max(self._widest, width)
        self._bits.add(stored.bits)
        self._size()

    def _size(self) -> tuple[int, int]:
        """Bits and group size of all matrices. Rows that fit one group have one scale in either
        case."""
        group = max((size for _, size in self._seen), default=-1)
        if len(self._bits) > 1 or len(self._seen) > 1 or (self._seen and self._widest > group):
            raise self.refuse(
                "A model",
                "bits or groups of its matrices differ",
                "Choose --format compressed-tensors.",
            )
        return min(self._bits), group


class GPTQLayout(_Grouped):
    name = "gptq"
    bits = (2, 3, 4, 8)

    def __init__(self) -> None:
        super().__init__()
        self._is_symmetric, self._is_ordered = True, False

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        weight = self.integers(name, stored)
        self.check(name, weight)
        codes, zeros = unsigned(weight)
        self._is_symmetric &= weight.zeros_NG is None
        self._is_ordered |= weight.groups_K is not None
        # The first version of the layout holds zero points less 1, so that it has none of 0.
        kept = zeros - 1 if weight.zeros_NG is None else zeros
        return {
            f"{name}.qweight": pack(codes, weight.bits).t().contiguous(),
            f"{name}.qzeros": pack(kept.t().contiguous(), weight.bits),
            f"{name}.scales": weight.scales_NG.t().to(torch.float16).contiguous(),
            f"{name}.g_idx": weight.column_groups().to(torch.int32),
        }

    def config(self) -> dict[str, Any]:
        bits, group = self._size()
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": self._is_symmetric,
            "desc_act": self._is_ordered,
            "checkpoint_format": "gptq" if self._is_symmetric else "gptq_v2",
            "lm_head": False,
        }


class AWQLayout(_Grouped):
    name = "awq"
    bits = (4,)

    def check(self, name: str, stored: IntWeight) -> None:
        super().check(name, stored)
        if stored.groups_K is not None:
            raise self.refuse(name, "its columns are not in order", "Choose --format gptq.")
        width = stored.codes_NK.shape[1]
        if width % min(stored.group, width):
            fix = f"Choose a --group that divides {width}, or --format gptq."
            raise self.refuse(
                name, f"its {width} columns are no whole groups of {stored.group}", fix
            )

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        weight = self.integers(name, stored)
        self.check(name, weight)
        codes, zeros = unsigned(weight)
        return {
            f"{name}.qweight": _interleaved(codes.t()),
            f"{name}.qzeros": _interleaved(zeros.t()),
            f"{name}.scales": weight.scales_NG.t().to(torch.float16).contiguous(),
        }

    def config(self) -> dict[str, Any]:
        bits, group = self._size()
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }


def _interleaved(values_KN: torch.Tensor) -> torch.Tensor:
    words = values_KN.reshape(values_KN.shape[0], -1, 8)[:, :, _AWQ_ORDER]
    return pack(words.reshape(values_KN.shape), 4)
