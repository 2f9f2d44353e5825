"""The KV cache: [P, layers of a page, 2, G, S, D]. Page by page, so that memory is used as pages
are; a page of one head is one run. In a format with scales a page is bytes: the values, then the
scales (`kv_format.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.kernels import masks
from tidemill.kernels.kvquant import KVQuant
from tidemill.types.cache_layout import Place
from tidemill.types.kv_format import FORMATS, KVFormat
from tidemill.types.model_config import AttentionSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class Angles:
    """The angles of a rotary position embedding: [positions, rotated dimensions / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The learned parameters of a layer's attention besides its projections."""

    q_norm: torch.Tensor | None = None  # [D], of each head before rotation
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    sinks: torch.Tensor | None = None  # [N]
    # [T, KV heads]: scores of a predictor; heads at 0 and below give zeros
    chosen: torch.Tensor | None = None

    def only_chosen(self, out_TND: torch.Tensor) -> torch.Tensor:
        if self.chosen is None:
            return out_TND
        is_left_out = (self.chosen <= 0).repeat_interleave(
            out_TND.shape[1] // self.chosen.shape[1], 1
        )
        return out_TND.masked_fill(is_left_out[..., None], 0.0)


PLAIN = HeadWeights()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of what a layer stores, in all pages."""

    values: torch.Tensor  # [P, heads, S, dim]; formats of four bits and KVQuant: bytes
    scales: torch.Tensor | None = None  # [P, heads, S], in int4 [.., 2], in KVQuant [.., 4]


def attention_specs(layers: Iterable[LayerSpec]) -> tuple[AttentionSpec, ...]:
    """The specs of those layers that attend."""
    return tuple(spec for spec in layers if isinstance(spec, AttentionSpec))


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The memory that an attention backend works on."""

    # [P, layers of a page, 2, G, S, D]; int4: D / 2 bytes, see `quantize`. Where layers differ in
    # size: [P, values of a page].
    cache: torch.Tensor
    # of each group: [rows, pages] int32: which page holds a row's tokens S * i .. S * i + S - 1
    tables: list[torch.Tensor]
    specs: tuple[AttentionSpec, ...]  # of each layer
    angles: list[Angles | None]  # of each layer
    places: tuple[Place, ...]  # of each layer
    # of each layer, by distance: `Model.distance_biases`
    biases: Sequence[torch.Tensor | None] = field(default_factory=list)
    # [P, layers of a page, 2, G, S], of a format that has them; of int4 [.., S, 2]: scale and
    # offset; of KVQuant [.., S, 4]
    scales: torch.Tensor | None = None
    quant: KVQuant | None = None  # of KVQuant: what was calibrated
    page_size: int = 0  # tokens of a page, where layers differ in size
    parts: tuple[tuple[StoredPart, ...], ...] = ()  # of each layer: its keys and values

    def __post_init__(self) -> None:
        if not self.biases:
            object.__setattr__(self, "biases", [None] * len(self.specs))
        if self.is_uniform:
            object.__setattr__(self, "page_size", self.cache.shape[4])
        parts = tuple(
            self._parts(spec, place) for spec, place in zip(self.specs, self.places, strict=True)
        )
        object.__setattr__(self, "parts", parts)

    @property
    def is_uniform(self) -> bool:
        """Tells if keys and values of all layers have one size, so that pages have the dimensions
        of `cache`."""
        return self.cache.dim() == 6

    @property
    def stored_parts(self) -> list[StoredPart]:
        """The parts of all layers that have a cache of their own."""
        layers = zip(self.specs, self.parts, strict=True)
        return [part for spec, parts in layers for part in parts[: len(spec.stored)]]

    def _parts(self, spec: AttentionSpec, place: Place) -> tuple[StoredPart, ...]:
        if self.is_uniform:
            views = self.cache[:, place.index].unbind(1)
            scales = (None, None) if self.scales is None else self.scales[:, place.index].unbind(1)
            return tuple(map(StoredPart, views, scales))
        made, at = list[StoredPart](), place.start * self.page_size // self.cache.element_size()
        for part in spec.parts:
            shape = (self.cache.shape[0], part.num_heads, self.page_size, part.dim)
            strides = (self.cache.stride(0), self.page_size * part.dim, part.dim, 1)
            made.append(StoredPart(self.cache.as_strided(shape, strides, at)))
            at += part.num_heads * self.page_size * part.dim
        if spec.values_in_keys:
            made.append(StoredPart(made[0].values[..., -spec.value_dim :]))
        return tuple(made)

    @property
    def num_heads(self) -> int:
        return self.specs[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.cache.shape[3]

    @property
    def head_dim(self) -> int:
        return self.cache.shape[5] * 8 * self.cache.element_size() // self.format.bits

    @property
    def format(self) -> KVFormat:
        return FORMATS[_FORMAT_OF[self.cache.dtype] if self.quant is None else self.quant.name]

    def by_distance(self) -> list[torch.Tensor | None]:
        """The values that each layer adds to scores, as a table where the cache is; layers that add
        the same share one."""
        most = max((table.shape[1] * self.page_size for table in self.tables), default=0)
        kinds = [
            (spec.has_alibi, id(bias)) for spec, bias in zip(self.specs, self.biases, strict=True)
        ]
        made = {
            kind: masks.by_distance(
                self.specs[kinds.index(kind)], self.biases[kinds.index(kind)], most
            )
            for kind in kinds
        }
        on_device = {
            kind: None if table is None else table.float().to(self.cache.device)
            for kind, table in made.items()
        }
        return [on_device[kind] for kind in kinds]


# int4: two values of a byte.
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_FORMAT_OF = {dtype: name for name, dtype in _DTYPES.items()}
LARGEST = {"fp8": 448, "int8": 127}
_TINY = 1e-30  # a row without a larger value is zero


def new_cache(
    num_pages: int,
    num_layers: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: str = "float32",
) -> torch.Tensor:
    """[P, layers of a page, 2, G, S, D], or [P, bytes of a page] in a format with scales; `views`
    are what kernels take. numpy's zeros are mapped lazily (torch's are written): memory is used as
    pages are."""
    kind, shape = FORMATS[dtype], (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
    if kind.has_scales:
        num_bytes = num_layers * 2 * num_kv_heads * page_size * kind.head_bytes(head_dim)
        return torch.from_numpy(np.zeros((num_pages, num_bytes), np.uint8))
    if dtype == "bfloat16":  # which numpy does not know
        return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.zeros(shape, dtype))


def views(
    pool: torch.Tensor,
    num_layers: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and scales of a pool that `new_cache` has made, as `PagedKV` has them."""
    if not FORMATS[dtype].has_scales:
        return pool.view(_DTYPES[dtype]) if pool.dtype == torch.uint8 else pool, None
    shape = (pool.shape[0], num_layers, 2, num_kv_heads, page_size)
    row_bytes = FORMATS[dtype].row_bytes(head_dim)
    num_bytes = num_layers * 2 * num_kv_heads * page_size * row_bytes
    values = pool[:, :num_bytes].unflatten(1, (*shape[1:], row_bytes))
    if FORMATS[dtype].is_calibrated:
        return values, pool[:, num_bytes:].view(torch.int16).unflatten(1, (*shape[1:], -1))
    beside = (2,) if dtype == "int4" else ()
    return values.view(_DTYPES[dtype]), pool[:, num_bytes:].view(torch.bfloat16).unflatten(
        1, (*shape[1:], *beside)
    )


def quantize(x: torch.Tensor, kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] to values and one scale a row, rounded up to bfloat16, of fp8 to a power of two; NaN
    if a value is not finite."""
    if kind.name == "int4":
        return _quantize_int4(x.float())
    x, largest = x.float(), LARGEST[kind.name]
    top = x.abs().amax(-1, keepdim=True)
    top = torch.where(top < _TINY, 0.0, top)
    scale = _rounded_up(top / largest, 0x7FFFFF if kind.name == "fp8" else 0xFFFF)
    factor = torch.where(top > 0, 1 / scale, 0.0)
    is_finite = top.isfinite()
    codes = torch.where(is_finite, x * factor, 0.0)
    scale = torch.where(is_finite, scale, float("nan")).squeeze(-1).bfloat16()
    if kind.name == "fp8":
        return codes.to(torch.float8_e4m3fn), scale
    return codes.round().to(torch.int8), scale


def _rounded_up(x: torch.Tensor, without: int = 0xFFFF) -> torch.Tensor:
    """To a number without these bits: to a bfloat16."""
    return ((x.view(torch.int32) + without) & ~without).view(torch.float32)


def _quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from -8 to 7, scale and offset [..., 2]. A byte has value i and, in its upper half,
    value D / 2 + i."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    offset = ((low * 0.5 + high * 0.5) + (high - low) * (0.5 / 15)).bfloat16().float()
    step = torch.maximum((high - offset) * (1 / 7), (offset - low) * 0.125)
    step = torch.where(step < _TINY, 0.0, step)
    scale = _rounded_up(step)
    is_finite = step.isfinite()
    factor = torch.where(is_finite & (step > 0), 1 / scale, 0.0)
    codes = torch.where(is_finite, (x - offset) * factor, 0.0).round().to(torch.int8)
    both = torch.cat(
        [torch.where(is_finite, scale, float("nan")), torch.where(is_finite, offset, 0.0)], -1
    ).bfloat16()
    first, second = codes.view(torch.uint8).chunk(2, dim=-1)
    return (first & 15) | (second << 4), both


def dequantize(values: torch.Tensor, scales: torch.Tensor, kind: KVFormat) -> torch.Tensor:
    if kind.name == "int4":
        signed = values.view(torch.int8)
        values = torch.cat([(signed << 4) >> 4, signed >> 4], dim=-1)
        return values.float() * scales[..., :1].float() + scales[..., 1:].float()
    return values.float() * scales.float().unsqueeze(-1)


def write_kv(kv: PagedKV, layer: int, slots_T: torch.Tensor, *stored: torch.Tensor) -> None:
    """Writes the parts [T, heads, dim] that a layer has made of tokens. `slots_T`: page * page_size
    + offset."""
    pages, offsets = slots_T // kv.page_size, slots_T % kv.page_size
    for part, given in zip(kv.parts[layer], stored, strict=False):
        if part.scales is None:
            part.values[pages, :, offsets] = given.to(kv.cache.dtype)
        else:
            part.values[pages, :, offsets], part.scales[pages, :, offsets] = quantize(
                given, kv.format
            )


def read_slots(kv: PagedKV, slots: torch.Tensor, layer: int, part: int) -> torch.Tensor:
    """A part of single tokens in float32, [slots, heads, dim]."""
    return _read(
        kv, kv.parts[layer][part], (slots // kv.page_size, slice(None), slots % kv.page_size)
    )


def read_pages(kv: PagedKV, pages: torch.Tensor, layer: int, part: int) -> torch.Tensor:
    """A part of the tokens of pages [n, pages] in float32, [n, heads, tokens, dim]."""
    stored = kv.parts[layer][part]
    heads = torch.arange(stored.values.shape[1], device=pages.device)[:, None]
    return _read(kv, stored, (pages.long()[:, None], heads)).flatten(2, 3)


def _read(kv: PagedKV, part: StoredPart, at: tuple[torch.Tensor | slice, ...]) -> torch.Tensor:
    return (
        part.values[at].float()
        if part.scales is None
        else dequantize(part.values[at], part.scales[at], kv.format)
    )


def copy_pages(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Whole pages, all layers; every source is read before any target is written. Indices are on
    the cache's device."""
    cache[targets] = cache[sources]
