"""y = x Wᵀ + b with W in 4 or 8 bits a value, multiplied as it is stored.

A weight is codes, and a scale and an offset for every 32 of them along a row: w = scale · code +
offset. Activations are rounded to signed bytes, 32 to a scale, so that products and their sums over
32 are exact integers; the rest is float32, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.linear import Held, Weight, to_panels
from tidemill.types.weight_types import SIGNED_4_BITS

GROUP = 32
# twice the values of E2M1
MX4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
E2M1 = MX4_CODES.astype(np.float32) / 2
# of codes from -12 on
_MX4_NUMBERS = np.array([int(np.argmax(code == MX4_CODES)) for code in range(-12, 13)], np.int8)
_LANES, _FOUR = 8, 4
_SPAN = 4  # panels of ternary codes that share bytes
_MAX_WHOLE = 2**16  # columns whose products of bytes add up to 32 bits
_S4_FACTORS = torch.tensor([1.0] * 4 + [16.0] * 4)  # by which the codes of each lane are multiplied
# on x86 products of signed bytes take three instructions, of unsigned ones one
_HAS_S4 = SIGNED_4_BITS


@dataclass(frozen=True, slots=True)
class Activations:
    """The way that the activations that meet 8-bit (or ternary) weights become bytes: with one
    scale a token, or always the same. `threshold`: those of this size and more stay as they are
    (LLM.int8()); of 8-bit weights with a scale a row."""

    scale: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Outliers:
    """Single values of a matrix [N, K] that its codes do not hold: what is to be added at row * K +
    column, in this order."""

    places: torch.Tensor  # int64, ascending
    differences: torch.Tensor  # float32

    def take(self, rows: torch.Tensor, num_rows: int, width: int) -> Outliers:
        """Takes the outliers of these rows, of which each may stand there once."""
        numbers = torch.full((num_rows,), -1)
        numbers[rows] = torch.arange(rows.numel())
        row = numbers[self.places // width]
        places, order = (row[row >= 0] * width + self.places[row >= 0] % width).sort()
        return Outliers(places, self.differences[row >= 0][order])


@dataclass(slots=True)
class Codes:
    """A quantized matrix [N, K], not yet in any kernel's layout: w = scale · (code - zero) +
    offset, for every `group` values of a row, of which the last may be fewer."""

    # 4: codes 0 .. 15, numbers of a table, or without zeros, offsets and table those of mxfp4,
    # MX4_CODES; 8: signed;
    bits: int
    # 2: -1, 0 and 1
    codes_NK: torch.Tensor  # int8
    scales_NG: torch.Tensor  # float16 (groups of 32, as GGUF has them) or float32
    offsets_NG: torch.Tensor | None  # of the same type
    group: int = GROUP
    zeros_NG: torch.Tensor | None = None  # float32, whole numbers
    table: torch.Tensor | None = None  # float32 [16]: what the numbers of a 4-bit matrix mean
    order_K: torch.Tensor | None = None  # column k multiplies input order_K[k]; None: input k
    activations: Activations | None = None  # None: with a scale for 32 of them, the finest
    outliers: Outliers | None = None

    def take(self, rows: torch.Tensor) -> Codes:
        offsets, zeros = (
            None if values is None else values[rows] for values in (self.offsets_NG, self.zeros_NG)
        )
        outliers = None if self.outliers is None else self.outliers.take(rows, *self.codes_NK.shape)
        return replace(
            self,
            codes_NK=self.codes_NK[rows],
            scales_NG=self.scales_NG[rows],
            offsets_NG=offsets,
            zeros_NG=zeros,
            outliers=outliers,
        )

    def columns(self, begin: int, end: int) -> Codes | None:
        """Neighbouring ones. None where they are not whole groups, or columns are not in the order
        of the inputs."""
        width, one_group = self.codes_NK.shape[1], self.scales_NG.shape[1] == 1
        is_whole = begin % self.group == 0 and (end % self.group == 0 or end == width)
        if (
            self.order_K is not None
            or self.outliers is not None
            or begin % GROUP
            or not (is_whole or one_group)
        ):
            return None
        groups = slice(0, 1) if one_group else slice(begin // self.group, -(-end // self.group))
        scales, offsets, zeros = (
            None if values is None else values[:, groups]
            for values in (self.scales_NG, self.offsets_NG, self.zeros_NG)
        )
        assert scales is not None
        codes_NK = self.codes_NK[:, begin:end].contiguous()
        return replace(
            self, codes_NK=codes_NK, scales_NG=scales, offsets_NG=offsets, zeros_NG=zeros
        )

    def dequantize(self) -> torch.Tensor:
        values = self.codes_NK.float() if self.table is None else self.table[self.codes_NK.int()]
        for each, op in (
            (self.zeros_NG, torch.Tensor.sub_),
            (self.scales_NG, torch.Tensor.mul_),
            (self.offsets_NG, torch.Tensor.add_),
        ):
            if each is not None:
                op(values, each.float().repeat_interleave(self.group, 1)[:, : values.shape[1]])
        if self.outliers is not None:
            values.view(-1)[self.outliers.places] += self.outliers.differences
        if self.order_K is None:
            return values
        stored = torch.empty_like(values)
        stored[:, self.order_K] = values
        return stored


def concat(parts: list[Codes]) -> Codes:
    """Rows of several matrices as one. Unlike parts meet in 8 bits: with offsets, which hold those
    with 32 values to a scale unchanged; all others are rounded anew."""
    if len({likeness(part) for part in parts}) == 1:
        return _below(parts)
    if any(part.scales_NG.dtype != torch.float16 for part in parts):
        return _below([quantize(part.dequantize()) for part in parts])
    plain = all(part.offsets_NG is None for part in parts)
    offsets = [
        None if plain else torch.zeros_like(p.scales_NG) if p.offsets_NG is None else p.offsets_NG
        for p in parts
    ]
    return _below(
        [
            replace(part, bits=8, offsets_NG=offset)
            for part, offset in zip(parts, offsets, strict=True)
        ]
    )


def likeness(part: Codes) -> tuple[object, ...]:
    """Equal for matrices that can be joined as they are."""
    table = None if part.table is None else tuple(part.table.tolist())
    order = None if part.order_K is None else part.order_K.numpy().tobytes()
    has = (
        part.offsets_NG is None,
        part.zeros_NG is None,
        part.activations is None,
        part.outliers is None,
    )
    threshold = None if part.activations is None else part.activations.threshold
    return part.bits, part.group, part.scales_NG.dtype, table, order, has, threshold


def _below(parts: list[Codes]) -> Codes:
    """One below the other; of static scales of activations, the largest."""
    first = parts[0]
    return replace(
        first,
        codes_NK=torch.cat([part.codes_NK for part in parts]),
        scales_NG=torch.cat([part.scales_NG for part in parts]),
        offsets_NG=None
        if first.offsets_NG is None
        else torch.cat([part.offsets_NG for part in parts if part.offsets_NG is not None]),
        zeros_NG=None
        if first.zeros_NG is None
        else torch.cat([part.zeros_NG for part in parts if part.zeros_NG is not None]),
        activations=joined_activations(parts),
        outliers=None if first.outliers is None else _outliers_below(parts),
    )


def joined_activations(parts: list[Codes]) -> Activations | None:
    """The activations of matrices that are alike. Of static scales, the largest."""
    given = [part.activations for part in parts if part.activations is not None]
    if len(given) < len(parts):
        return None
    static = [one.scale for one in given if one.scale is not None]
    return Activations(max(static) if len(static) == len(parts) else None, given[0].threshold)


def _outliers_below(parts: list[Codes]) -> Outliers:
    places, differences, first = list[torch.Tensor](), list[torch.Tensor](), 0
    for part in parts:
        assert part.outliers is not None
        places.append(part.outliers.places + first)
        differences.append(part.outliers.differences)
        first += part.codes_NK.numel()
    return Outliers(torch.cat(places), torch.cat(differences))


def quantize(values_NK: torch.Tensor) -> Codes:
    """To 8 bits: what formats that no kernel here multiplies are turned into."""
    groups = values_NK.unflatten(1, (-1, GROUP))
    highest = groups.abs().amax(-1)
    scales = (highest / 127).to(torch.float16)
    # rounded down, it would cut the largest codes
    up = torch.nextafter(scales, torch.full_like(scales, float("inf")))
    scales = torch.where(scales.float() * 127 < highest, up, scales)
    codes = (groups / scales.float().clamp_min(1e-12).unsqueeze(-1)).round_().clamp_(-127, 127)
    return Codes(8, codes.to(torch.int8).flatten(1), scales, None)


def quantized_linear_reference(
    x_TK: torch.Tensor, weight: Codes, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """The same rounding of activations; sums in float64."""
    how = weight.activations
    if how is not None and how.threshold is not None:
        is_outlier = x_TK.abs() >= how.threshold
        outlying = torch.where(is_outlier, x_TK, 0.0).double() @ weight.dequantize().double().t()
        plain = replace(weight, activations=Activations(how.scale))
        return (
            quantized_linear_reference(x_TK.masked_fill(is_outlier, 0.0), plain, bias_N).double()
            + outlying
        ).float()
    groups = x_TK.unflatten(1, (-1, GROUP)) if how is None else x_TK.unsqueeze(1)
    if weight.order_K is not None:
        groups = x_TK[:, weight.order_K].unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = (
        largest / 127 if how is None or how.scale is None else torch.full_like(largest, how.scale)
    )
    inverse = 127 / largest if how is None or how.scale is None else 1 / scales
    rounded = (groups * torch.where(scales > 0, inverse, 0.0)).round().clamp(
        -127, 127
    ).double() * scales
    columns = rounded.flatten(1)
    matrix = (
        replace(weight, order_K=None).dequantize()
        if weight.order_K is not None
        else weight.dequantize()
    )
    if weight.outliers is not None:  # the activations that meet them are not rounded
        matrix = replace(weight, outliers=None).dequantize()
        sparse = torch.zeros_like(matrix).view(-1)
        sparse[weight.outliers.places] = weight.outliers.differences
        bias_N = (0 if bias_N is None else bias_N) + x_TK.double() @ sparse.view_as(
            matrix
        ).double().t()
    out = columns @ matrix.double().t()
    return (out if bias_N is None else out + bias_N).float()


# ---- the compiled kernel's layouts (linear.c)


def fit(weight: Codes) -> Codes | None:
    """A matrix that the compiled kernel multiplies: this one, or its values rounded to 8 bits; None
    if there is none."""
    width = weight.codes_NK.shape[1]
    if width % GROUP:
        return None
    is_whole = weight.group >= width
    in_groups = is_whole or weight.group % GROUP == 0
    if weight.bits == 2 and not (in_groups and weight.activations is not None):
        weight = widened(weight)
    if weight.activations is not None and (
        (not is_whole and weight.bits == 8) or weight.zeros_NG is not None or width > _MAX_WHOLE
    ):
        weight = replace(weight, activations=None)
    both = weight.order_K is not None and weight.outliers is not None
    return weight if in_groups and not both else quantize(weight.dequantize())


def widened(weight: Codes) -> Codes:
    """The ternary codes as 4-bit ones."""
    return replace(
        weight,
        bits=4,
        codes_NK=weight.codes_NK + 8,
        zeros_NG=torch.full_like(weight.scales_NG, 8).float(),
        activations=None,
    )


def kind_of(weights: list[Codes]) -> str:
    """The kind in which the compiled kernel holds matrices that are alike."""
    first = weights[0]
    if first.scales_NG.dtype == torch.float32:
        return _group_kind(weights)
    if first.bits == 8:
        return "Q8" if first.offsets_NG is None else "Q8M"
    if first.offsets_NG is None:
        return "MX4"
    return "S4" if _HAS_S4 and all(_is_centred(weight) for weight in weights) else "Q4"


def _group_kind(weights: list[Codes]) -> str:
    first = weights[0]
    if first.bits == 2:
        return "T2"
    if first.bits == 8:
        return "W8" if first.activations is not None else "G8" if first.zeros_NG is None else "G8M"
    if first.table is not None:
        return "GT4"
    return (
        "GS4"
        if _HAS_S4
        and all(w.zeros_NG is not None and bool((w.zeros_NG == 8).all()) for w in weights)
        else "G4"
    )


def kind_number(weights: list[Codes]) -> int:
    """The kind's number in linear.c: with the size of groups, and whether columns have an order."""
    first, kind = weights[0], kind_of(weights)
    if first.scales_NG.dtype != torch.float32:
        return native.KINDS[kind]
    size = 0 if first.group >= first.codes_NK.shape[1] else first.group // GROUP
    flags = (0 if first.order_K is None else native.ORDERED) | (
        0 if first.outliers is None else native.SPARSE
    )
    return native.KINDS[kind] | size << 8 | flags


def _is_centred(weight: Codes) -> bool:
    """Tells if its offsets are those that codes of -8 to 7 make needless, as those of Q4_0."""
    return weight.offsets_NG is not None and torch.equal(weight.offsets_NG, weight.scales_NG * -8)


def table_bytes(table: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A table of 16 numbers as signed bytes, and what they are multiplied by: the factor that
    rounds them least."""
    largest = float(table.abs().max())
    factors = torch.arange(64, 128).double() / largest if largest > 0 else torch.ones(1).double()
    errors = [
        float(((table.double() * factor).round() / factor - table.double()).square().sum())
        for factor in factors
    ]
    factor = float(factors[int(np.argmin(errors))])
    return (table.double() * factor).round().to(torch.int8), 1 / factor


def code_panels(weight: Codes, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's codes and scales in the compiled kernel's layout (linear.c): eight rows side by
    side, four codes of each at a time."""
    codes_NK = np.ascontiguousarray(weight.codes_NK.numpy())
    if kind == "MX4":
        codes_NK = _MX4_NUMBERS[codes_NK.astype(np.int64) + 12]
    if kind == "GS4":
        codes_NK = codes_NK ^ np.int8(8)  # the low half of code - 8
    if kind == "T2":
        codes_NK = codes_NK + np.int8(1)
    # Four neighbouring codes travel as one 32-bit value.
    fours = torch.from_numpy(codes_NK.view(np.int32))
    # [panel, group, four, 8 * 4]
    panels = to_panels(fours).unflatten(1, (-1, GROUP // _FOUR)).view(torch.uint8)
    if kind == "S4":
        panels = panels[..., :16] | ((panels[..., 16:] ^ 8) << 4)  # rows 4 to 7 above rows 0 to 3
    elif weight.bits == 4:
        panels = panels[:, :, :_FOUR] | (panels[:, :, _FOUR:] << 4)
    if kind == "T2":
        panels = _sharing_bytes(panels)
    if weight.scales_NG.dtype == torch.float32:
        return panels.contiguous(), _group_scales(weight, kind)
    scales = to_panels(weight.scales_NG)
    if kind == "S4":
        scales = (scales.float() / _S4_FACTORS).view(torch.float16)
    elif weight.offsets_NG is not None:
        scales = torch.stack([scales, to_panels(weight.offsets_NG)], dim=2)
    # scales: [panel, group, (2,) 8], S4's [panel, group, 16]
    return panels.contiguous(), scales.contiguous()


def _sharing_bytes(panels: torch.Tensor) -> torch.Tensor:
    """The codes of four panels, each in two bits of a byte; the top bit is flipped."""
    padded = torch.nn.functional.pad(panels, (0,) * 7 + (-panels.shape[0] % _SPAN,)).unflatten(
        0, (-1, _SPAN)
    )
    first, second, third, last = padded.unbind(1)
    return (first | second << 2 | third << 4 | last << 6) ^ 128


def _group_scales(weight: Codes, kind: str) -> torch.Tensor:
    """float32 [panel, group, (2,) 8], with what lies before them, as float16."""
    scales, before = weight.scales_NG, list[torch.Tensor]()
    if kind == "GT4":
        assert weight.table is not None
        table, factor = table_bytes(weight.table)
        scales, before = scales * factor, [table]
    if kind in ("W8", "T2"):
        how = weight.activations or Activations()
        before = [torch.tensor([how.scale or 0.0, how.threshold or 0.0] + [0.0] * 6)]
    if weight.order_K is not None:
        before.append(weight.order_K.to(torch.int32))
    if weight.outliers is not None:
        before += _sparse_panels(weight.outliers, *weight.codes_NK.shape)
    panels = to_panels(scales / 16 if kind == "GS4" else scales)
    if kind in ("G4", "G8M"):
        assert weight.zeros_NG is not None
        panels = torch.stack([panels, to_panels(-weight.scales_NG * weight.zeros_NG)], dim=2)
    return torch.cat(
        [part.contiguous().view(torch.uint8).flatten() for part in (*before, panels)]
    ).view(torch.float16)


def _sparse_panels(outliers: Outliers, num_out: int, width: int) -> list[torch.Tensor]:
    """The beginning of each panel's values; places and values in turn."""
    row, column = outliers.places // width, outliers.places % width
    num_panels = -(-num_out // _LANES)
    first = torch.searchsorted(row // _LANES, torch.arange(num_panels + 1))
    places = (column * _LANES + row % _LANES).to(torch.int32)
    return [
        first.to(torch.int32),
        torch.stack([places, outliers.differences.view(torch.int32)], dim=1),
    ]


class QuantizedPanels(Weight):
    """The compiled kernel's layout."""

    def __init__(self, weight: Codes, bias_N: torch.Tensor | None) -> None:
        assert native.lib is not None
        self._lib = native.lib
        (self._num_out, self._width), self._bits, self._bias = (
            weight.codes_NK.shape,
            weight.bits,
            bias_N,
        )
        self._kind, self._number = kind_of([weight]), kind_number([weight])
        self._group, self._order, self._outliers = weight.group, weight.order_K, weight.outliers
        self._table = (
            None if weight.table is None else torch.from_numpy(table_bytes(weight.table)[0].numpy())
        )
        self._panels, self._scales = code_panels(weight, self._kind)
        bias = None if bias_N is None else bias_N.data_ptr()
        self._addresses = (self._panels.data_ptr(), self._scales.data_ptr(), bias)

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes + self._scales.nbytes

    @property
    def has_head(self) -> bool:
        """Something of the whole matrix stands before the scales of its rows."""
        return self._kind == "S4" or self._kind[0] in "GWT" or self._outliers is not None

    @property
    def held(self) -> Held:
        return Held(self._number, self._width, self._num_out, self._panels, self._scales)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.logits(x_TK)

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._lib.linear(self._number, x_TK, *self._addresses, self._num_out, out)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self._kind[0] not in "GWT":
            return self._lib.take_rows(
                self._number, *self._addresses[:2], self._num_out, ids_T, self._width
            )
        panel, lane = ids_T // _LANES, ids_T % _LANES
        stored = panel // _SPAN if self._bits == 2 else panel
        # [T, group, four, 4]
        codes = self._panels.unflatten(-1, (_LANES, _FOUR))[stored, :, :, lane]
        if self._bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        if self._bits == 2:
            codes = (
                (codes ^ 128) >> (2 * (panel % _SPAN)).to(torch.uint8)[:, None, None, None] & 3
            ) - 1
        if self._kind == "GS4":
            codes = (codes ^ 8) - 8
        if self._table is not None:
            codes = self._table[codes.to(torch.int64)].view(torch.uint8)
        values = codes.view(torch.int8).flatten(2).float()  # [T, group, 32]
        scales, offsets = self._scales_of(panel, lane)
        values = values.flatten(1) * scales
        if offsets is not None:
            values += offsets
        if self._outliers is not None:
            kept = (
                self._outliers.take(ids_T, self._num_out, self._width)
                if ids_T.unique().numel() == ids_T.numel()
                else None
            )
            for i, number in enumerate([] if kept is not None else ids_T.tolist()):
                one = self._outliers.take(torch.tensor([number]), self._num_out, self._width)
                values[i, one.places] += one.differences
            if kept is not None:
                values.view(-1)[kept.places] += kept.differences
        if self._order is None:
            return values
        stored = torch.empty_like(values)
        stored[:, self._order] = values
        return stored

    def _scales_of(
        self, panel: torch.Tensor, lane: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scales and offsets of each value of these rows."""
        has_offsets, group = self._kind in ("G4", "G8M"), self._group
        num_panels = -(-self._num_out // _LANES)
        num_groups = -(-self._width // group) * (2 if has_offsets else 1)
        values = self._scales.view(torch.float32)
        values = values[values.numel() - num_panels * num_groups * _LANES :].view(
            num_panels, -1, 2 if has_offsets else 1, _LANES
        )
        each = values[panel, :, :, lane] * (16 if self._kind == "GS4" else 1)  # [T, group, 1 or 2]
        wide = each.repeat_interleave(group, 1)[:, : self._width]
        return wide[..., 0], wide[..., 1] if has_offsets else None
