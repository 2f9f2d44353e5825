"""KVQuant: keys and values as codes of non-uniform levels that were fitted to the model (`tidemill
calibrate-kv`).

Keys are quantized before rotation, where each channel has its own range: scale and offset of
channels are constants of a layer. The first token of a sequence draws much of the attention with
keys unlike all others', so position 0 has constants of its own. Values have a scale and an offset
for each token and head. What fits a range worst is kept in bfloat16, with its place: two of a
token's key and head, one of its value.

A page is the codes [layers of a page, 2, G, S, D * bits / 8], then four 16-bit numbers [layers of a
page, 2, G, S, 4] of each row: of keys, two outliers and their places; of values, scale, offset, an
outlier and its place. C's twin is native/kvquant.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tidemill.kernels.rope import apply_rope

if TYPE_CHECKING:
    from tidemill.kernels.kv_cache import PagedKV

KEY_OUTLIERS, VALUE_OUTLIERS = 2, 1  # of a token and head
_TINY = 1e-30  # values that differ by less are equal


@dataclass(frozen=True, slots=True)
class KVQuant:
    """The constants of a model's keys and values. Levels are ascending, and exact in bfloat16."""

    name: str  # the format
    bits: int
    scales: torch.Tensor  # [layers, 2, G, D], of channels of keys: at position 0, and at all others
    offsets: torch.Tensor
    key_levels: torch.Tensor  # [layers, 2 ** bits]
    value_levels: torch.Tensor

    def layer(self, number: int) -> KVQuantLayer:
        return KVQuantLayer(
            self.bits,
            self.scales[number],
            self.offsets[number],
            self.key_levels[number],
            self.value_levels[number],
        )


@dataclass(frozen=True, slots=True)
class KVQuantLayer:
    bits: int
    scales: torch.Tensor  # [2, G, D]
    offsets: torch.Tensor
    key_levels: torch.Tensor  # [2 ** bits]
    value_levels: torch.Tensor


def bounds_of(levels: torch.Tensor) -> torch.Tensor:
    """A value is coded by the number of bounds that are less than it."""
    return (levels[..., 1:] + levels[..., :-1]) / 2


def _codes(z: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    codes = torch.zeros_like(z, dtype=torch.uint8)
    for bound in bounds_of(levels):
        codes += z > bound
    return codes


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., D] to [..., D * bits / 8]. 4 bits: a byte has codes i and D / 2 + i. 3 bits: the lower
    two of codes i + k * D / 4 (k = 0 .. 3) in the first D / 4 bytes, the upper one of codes i + k *
    D / 8 (k = 0 .. 7) in the others."""
    if bits == 4:
        low, high = codes.chunk(2, -1)
        return low | (high << 4)
    lower = sum((part & 3) << (2 * k) for k, part in enumerate(codes.chunk(4, -1)))
    upper = sum((part >> 2) << k for k, part in enumerate(codes.chunk(8, -1)))
    return torch.cat([torch.as_tensor(lower), torch.as_tensor(upper)], -1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        return torch.cat([packed & 15, packed >> 4], -1)
    dim = packed.shape[-1] * 8 // 3
    lower, upper = packed[..., : dim // 4], packed[..., dim // 4 :]
    codes = torch.cat([(lower >> (2 * k)) & 3 for k in range(4)], -1)
    return codes | torch.cat([((upper >> k) & 1) << 2 for k in range(8)], -1)


def _kind(positions_T: torch.Tensor) -> torch.Tensor:
    """The kind of constants that keys have."""
    return (positions_T > 0).long()


def _bits16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().view(torch.int16)


def quantize_keys(
    keys_TGD: torch.Tensor, positions_T: torch.Tensor, layer: KVQuantLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Before rotation. Codes [T, G, D * bits / 8], and int16 [T, G, 4]: two outliers, their places.
    If a value is not finite, the first outlier is not."""
    kind = _kind(positions_T)
    z = (keys_TGD - layer.offsets[kind]) * (1 / layer.scales)[kind]
    far = torch.where(z.isfinite(), z.abs(), float("inf"))
    places = list[torch.Tensor]()
    for _ in range(KEY_OUTLIERS):
        places.append(far.argmax(-1, keepdim=True))
        far = far.scatter(-1, places[-1], -1.0)
    place = torch.cat(places, -1)
    outliers = keys_TGD.gather(-1, place)
    return pack(_codes(z, layer.key_levels), layer.bits), torch.cat(
        [_bits16(outliers), place.short()], -1
    )


def dequantize_keys(
    codes: torch.Tensor, extra: torch.Tensor, positions_K: torch.Tensor, layer: KVQuantLayer
) -> torch.Tensor:
    """[..., G, K, D * bits / 8] to [..., G, K, D], before rotation."""
    kind = _kind(positions_K)
    scales, offsets = (each[kind].transpose(0, 1) for each in (layer.scales, layer.offsets))
    keys = layer.key_levels[unpack(codes, layer.bits).long()] * scales + offsets
    outliers, place = extra.split(KEY_OUTLIERS, -1)
    return keys.scatter(-1, place.long(), outliers.contiguous().view(torch.bfloat16).float())


def value_ranges(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ranges of values [..., D]: lowest and highest without the outlier [..., 1], and its
    place. It is the highest or the lowest value, whichever leaves the smaller range."""
    dim = values.shape[-1]
    highest, lowest = values.argmax(-1, keepdim=True), values.argmin(-1, keepdim=True)
    top, low = values.gather(-1, highest), values.gather(-1, lowest)
    next_top = values.scatter(-1, highest, -float("inf")).amax(-1, keepdim=True) if dim > 1 else top
    next_low = values.scatter(-1, lowest, float("inf")).amin(-1, keepdim=True) if dim > 1 else low
    is_top = next_top - low <= top - next_low
    place = torch.where(is_top, highest, lowest)
    return torch.where(is_top, low, next_low), torch.where(is_top, next_top, top), place


def quantize_values(
    values_TGD: torch.Tensor, layer: KVQuantLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, G, D * bits / 8], and int16 [T, G, 4]: scale, offset, the outlier, its place. The
    scale is NaN if a value is not finite."""
    low, high, place = value_ranges(values_TGD)
    is_finite = values_TGD.isfinite().all(-1, keepdim=True)
    scale, offset = ((high - low) * 0.5).bfloat16().float(), ((high + low) * 0.5).bfloat16().float()
    scale = torch.where(scale < _TINY, 0.0, scale)
    factor = torch.where(scale > 0, 1 / scale, 0.0)
    codes = pack(_codes((values_TGD - offset) * factor, layer.value_levels), layer.bits)
    scale = torch.where(is_finite, scale, float("nan"))
    extra = torch.cat([scale, offset, values_TGD.gather(-1, place)], -1)
    return codes, torch.cat([_bits16(extra), place.short()], -1)


def dequantize_values(
    codes: torch.Tensor, extra: torch.Tensor, layer: KVQuantLayer
) -> torch.Tensor:
    """[..., D]"""
    scale, offset, outlier = extra[..., :3].contiguous().view(torch.bfloat16).float().split(1, -1)
    values = layer.value_levels[unpack(codes, layer.bits).long()] * scale + offset
    return values.scatter(-1, extra[..., 3:].long(), outlier)


def enter(
    kv: PagedKV,
    layer: int,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
) -> None:
    """Into the pages of the cache; keys are not rotated. `slots_T`: page * page_size + offset."""
    assert kv.quant is not None
    pages, offsets, own = slots_T // kv.page_size, slots_T % kv.page_size, kv.quant.layer(layer)
    made = quantize_keys(keys_TGD, positions_T, own), quantize_values(values_TGD, own)
    for part, (codes, extra) in zip(kv.parts[layer], made, strict=True):
        assert part.scales is not None
        part.values[pages, :, offsets], part.scales[pages, :, offsets] = codes, extra


def read_block(
    kv: PagedKV, layer: int, pages: torch.Tensor, first_key: int, num_keys: int, is_value: bool
) -> torch.Tensor:
    """Keys, rotated, or values of pages [tiles, pages] in float32: [tiles, G, num_keys, D]. Their
    first is at position `first_key`."""
    assert kv.quant is not None
    own, part = kv.quant.layer(layer), kv.parts[layer][is_value]
    assert part.scales is not None
    at = pages.long()[:, None], torch.arange(kv.num_kv_heads)[:, None]
    codes, extra = part.values[at].flatten(2, 3), part.scales[at].flatten(2, 3)
    if is_value:
        return dequantize_values(codes, extra, own)
    positions, angles = torch.arange(first_key, first_key + num_keys), kv.angles[layer]
    keys = dequantize_keys(codes, extra, positions, own)
    if angles is None:
        return keys
    places = positions.clamp(max=angles.cos.shape[0] - 1)  # a block may go past the last token
    return apply_rope(keys, angles.cos[places][None], angles.sin[places][None])


def read_slots(
    kv: PagedKV, layer: int, slots: torch.Tensor, positions: torch.Tensor, is_value: bool
) -> torch.Tensor:
    """Keys, rotated, or values of single tokens in float32, [slots, G, D]."""
    assert kv.quant is not None
    part, own, angles = kv.parts[layer][is_value], kv.quant.layer(layer), kv.angles[layer]
    assert part.scales is not None
    at = slots // kv.page_size, slice(None), slots % kv.page_size
    codes, extra = part.values[at], part.scales[at]
    if is_value:
        return dequantize_values(codes, extra, own)
    keys = dequantize_keys(codes.transpose(0, 1), extra.transpose(0, 1), positions, own).transpose(
        0, 1
    )
    return (
        keys if angles is None else apply_rope(keys, angles.cos[positions], angles.sin[positions])
    )
