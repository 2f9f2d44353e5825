"""y = x Wᵀ + b with W in 4 or 8 bits a value, multiplied as it is stored.

A weight is codes, and a scale and an offset for every 32 of them along a row: w = scale · code + offset. Activations are rounded
to signed bytes, 32 to a scale, so that products and their sums over 32 are exact integers; the rest is float32, in one order.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.linear import Weight, to_panels

GROUP = 32
MX4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values of E2M1
E2M1 = MX4_CODES.astype(np.float32) / 2
_MX4_NUMBERS = np.array([int(np.argmax(code == MX4_CODES)) for code in range(-12, 13)], np.int8)  # of codes from -12 on
_LANES, _FOUR = 8, 4
_HAS_S4 = platform.machine() in (
    "aarch64",
    "arm64",
)  # on x86 products of signed bytes take three instructions, of unsigned ones one


@dataclass(frozen=True, slots=True)
class Activations:
    """How the activations that meet 8-bit (or ternary) weights become bytes: with one scale a token, or always the same."""

    scale: float | None = None


@dataclass(slots=True)
class Codes:
    """A quantized matrix [N, K], not yet in any kernel's layout: w = scale · (code - zero) + offset, for every `group` values of a
    row, of which the last may be fewer."""

    bits: int  # 4: codes 0 .. 15, numbers of a table, or without zeros, offsets and table those of mxfp4, MX4_CODES; 8: signed;
    # 2: -1, 0 and 1
    codes_NK: torch.Tensor  # int8
    scales_NG: torch.Tensor  # float16 (groups of 32, as GGUF has them) or float32
    offsets_NG: torch.Tensor | None  # of the same type
    group: int = GROUP
    zeros_NG: torch.Tensor | None = None  # float32, whole numbers
    table: torch.Tensor | None = None  # float32 [16]: what the numbers of a 4-bit matrix mean
    order_K: torch.Tensor | None = None  # column k multiplies input order_K[k]; None: input k
    activations: Activations | None = None  # None: with a scale for 32 of them, the finest

    def take(self, rows: torch.Tensor) -> Codes:
        offsets, zeros = (None if values is None else values[rows] for values in (self.offsets_NG, self.zeros_NG))
        return replace(
            self, codes_NK=self.codes_NK[rows], scales_NG=self.scales_NG[rows], offsets_NG=offsets, zeros_NG=zeros
        )

    def dequantize(self) -> torch.Tensor:
        values = self.codes_NK.float() if self.table is None else self.table[self.codes_NK.int()]
        for each, op in ((self.zeros_NG, torch.Tensor.sub_), (self.scales_NG, torch.Tensor.mul_), (self.offsets_NG, torch.Tensor.add_)):
            if each is not None:
                op(values, each.float().repeat_interleave(self.group, 1)[:, : values.shape[1]])
        if self.order_K is None:
            return values
        stored = torch.empty_like(values)
        stored[:, self.order_K] = values
        return stored


def concat(parts: list[Codes]) -> Codes:
    """Rows of several matrices as one. Unlike parts meet in 8 bits with offsets, which can hold them all unchanged."""
    if len({(part.bits, part.offsets_NG is None) for part in parts}) == 1:
        bits, plain = parts[0].bits, parts[0].offsets_NG is None
    else:
        bits, plain = 8, all(part.offsets_NG is None for part in parts)
    offsets = [torch.zeros_like(part.scales_NG) if part.offsets_NG is None else part.offsets_NG for part in parts]
    return Codes(
        bits,
        torch.cat([part.codes_NK for part in parts]),
        torch.cat([part.scales_NG for part in parts]),
        None if plain else torch.cat(offsets),
    )


def quantize(values_NK: torch.Tensor) -> Codes:
    """To 8 bits: what formats that no kernel here multiplies are turned into."""
    groups = values_NK.unflatten(1, (-1, GROUP))
    highest = groups.abs().amax(-1)
    scales = (highest / 127).to(torch.float16)
    up = torch.nextafter(scales, torch.full_like(scales, float("inf")))  # rounded down, it would cut the largest codes
    scales = torch.where(scales.float() * 127 < highest, up, scales)
    codes = (groups / scales.float().clamp_min(1e-12).unsqueeze(-1)).round_().clamp_(-127, 127)
    return Codes(8, codes.to(torch.int8).flatten(1), scales, None)


def quantized_linear_reference(x_TK: torch.Tensor, weight: Codes, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The same rounding of activations; sums in float64."""
    groups = x_TK.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups * torch.where(scales > 0, 127 / (scales * 127), 0.0)).round().double() * scales
    out = rounded.flatten(1) @ weight.dequantize().double().t()
    return (out if bias_N is None else out + bias_N).float()


def kind_of(weights: list[Codes]) -> str:
    """How the compiled kernel holds matrices that have the same bits, and all offsets or none."""
    first = weights[0]
    if first.bits == 8:
        return "Q8" if first.offsets_NG is None else "Q8M"
    if first.offsets_NG is None:
        return "MX4"
    return "S4" if _HAS_S4 and all(_is_centred(weight) for weight in weights) else "Q4"


def _is_centred(weight: Codes) -> bool:
    """Whether offsets are what codes of -8 to 7 make needless, as those of Q4_0."""
    return weight.offsets_NG is not None and torch.equal(weight.offsets_NG, weight.scales_NG * -8)


def code_panels(weight: Codes, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's codes and scales in the compiled kernel's layout (linear.c): eight rows side by side, four codes of each at a
    time."""
    codes_NK = np.ascontiguousarray(weight.codes_NK.numpy())
    if kind == "MX4":
        codes_NK = _MX4_NUMBERS[codes_NK.astype(np.int64) + 12]
    if kind == "S4":
        codes_NK = codes_NK ^ np.int8(8)  # the low half of code - 8
    # Four neighbouring codes travel as one 32-bit value.
    fours = torch.from_numpy(codes_NK.view(np.int32))
    panels = to_panels(fours).unflatten(1, (-1, GROUP // _FOUR)).view(torch.uint8)  # [panel, group, four, 8 * 4]
    if weight.bits == 4:
        panels = panels[:, :, :_FOUR] | (panels[:, :, _FOUR:] << 4)
    scales = to_panels(weight.scales_NG)
    if kind == "S4":
        scales = (scales.float() / 16).view(torch.float16)
    elif weight.offsets_NG is not None:
        scales = torch.stack([scales, to_panels(weight.offsets_NG)], dim=2)
    return panels.contiguous(), scales.contiguous()  # scales: [panel, group, (2,) 8], S4's [panel, group, 16]


class QuantizedPanels(Weight):
    """The compiled kernel's layout."""

    def __init__(self, weight: Codes, bias_N: torch.Tensor | None) -> None:
        assert native.lib is not None
        self._lib = native.lib
        self._num_out, self._bits, self._bias = weight.codes_NK.shape[0], weight.bits, bias_N
        kind = kind_of([weight])
        self._kind = native.KINDS[kind]
        self._panels, self._scales = code_panels(weight, kind)
        bias = None if bias_N is None else bias_N.data_ptr()
        self._addresses = (self._panels.data_ptr(), self._scales.data_ptr(), bias)

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes + self._scales.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._lib.linear(self._kind, x_TK, *self._addresses, self._num_out)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        panel, lane = ids_T // _LANES, ids_T % _LANES
        codes = self._panels.unflatten(-1, (_LANES, _FOUR))[panel, :, :, lane]  # [T, group, four, 4]
        if self._bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        if self._kind == native.KINDS["MX4"]:
            codes = torch.from_numpy(MX4_CODES)[codes.to(torch.int64)].view(torch.uint8)
        if self._kind == native.KINDS["S4"]:
            scales = self._scales.view(torch.float32)[panel, ..., lane] * 16
            return (((codes ^ 8).flatten(2).float() - 8) * scales.unsqueeze(-1)).flatten(1)
        scales = self._scales[panel, ..., lane].float()
        values = codes.view(torch.int8).flatten(2).float()
        if scales.dim() == 3:
            return (values * scales[:, :, :1] + scales[:, :, 1:]).flatten(1)
        return (values * scales.unsqueeze(-1)).flatten(1)
