"""The KV cache: [P, layers of a page, 2, G, S, D]. Page by page, so that memory is used as pages are; a page of one head is one
run. In a format with scales a page is bytes: the values, then the scales (`kv_format.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.cache_layout import Place
from tidemill.kernels import masks
from tidemill.kernels.kvquant import KVQuant
from tidemill.kv_format import FORMATS, KVFormat
from tidemill.model_config import AttentionSpec, LayerSpec


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
    chosen: torch.Tensor | None = None  # [T, KV heads]: scores of a predictor; heads at 0 and below give zeros

    def only_chosen(self, out_TND: torch.Tensor) -> torch.Tensor:
        if self.chosen is None:
            return out_TND
        is_left_out = (self.chosen <= 0).repeat_interleave(out_TND.shape[1] // self.chosen.shape[1], 1)
        return out_TND.masked_fill(is_left_out[..., None], 0.0)


PLAIN = HeadWeights()


def attention_specs(layers: Iterable[LayerSpec]) -> tuple[AttentionSpec, ...]:
    """The specs of those layers that attend."""
    return tuple(spec for spec in layers if isinstance(spec, AttentionSpec))


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The memory that an attention backend works on."""

    cache: torch.Tensor  # [P, layers of a page, 2, G, S, D]; int4: D / 2 bytes, see `quantize`
    tables: list[torch.Tensor]  # of each group: [rows, pages] int32: which page holds a row's tokens S * i .. S * i + S - 1
    specs: tuple[AttentionSpec, ...]  # of each layer
    angles: list[Angles | None]  # of each layer
    places: tuple[Place, ...]  # of each layer
    biases: Sequence[torch.Tensor | None] = field(default_factory=list)  # of each layer, by distance: `Model.distance_biases`
    # [P, layers of a page, 2, G, S], of a format that has them; of int4 [.., S, 2]: scale and offset; of KVQuant [.., S, 4]
    scales: torch.Tensor | None = None
    quant: KVQuant | None = None  # of KVQuant: what was calibrated

    def __post_init__(self) -> None:
        if not self.biases:
            object.__setattr__(self, "biases", [None] * len(self.specs))

    @property
    def num_heads(self) -> int:
        return self.specs[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.cache.shape[3]

    @property
    def page_size(self) -> int:
        return self.cache.shape[4]

    @property
    def head_dim(self) -> int:
        return self.cache.shape[5] * 8 * self.cache.element_size() // self.format.bits

    @property
    def format(self) -> KVFormat:
        return FORMATS[_FORMAT_OF[self.cache.dtype] if self.quant is None else self.quant.name]

    def by_distance(self) -> list[torch.Tensor | None]:
        """The values that each layer adds to scores, as a table where the cache is; layers that add the same share one."""
        most = max((table.shape[1] * self.page_size for table in self.tables), default=0)
        kinds = [(spec.has_alibi, id(bias)) for spec, bias in zip(self.specs, self.biases, strict=True)]
        made = {kind: masks.by_distance(self.specs[kinds.index(kind)], self.biases[kinds.index(kind)], most) for kind in kinds}
        on_device = {kind: None if table is None else table.float().to(self.cache.device) for kind, table in made.items()}
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
    num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str = "float32"
) -> torch.Tensor:
    """[P, layers of a page, 2, G, S, D], or [P, bytes of a page] in a format with scales; `views` are what kernels take.
    numpy's zeros are mapped lazily (torch's are written): memory is used as pages are."""
    kind, shape = FORMATS[dtype], (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
    if kind.has_scales:
        num_bytes = num_layers * 2 * num_kv_heads * page_size * kind.head_bytes(head_dim)
        return torch.from_numpy(np.zeros((num_pages, num_bytes), np.uint8))
    if dtype == "bfloat16":  # which numpy does not know
        return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.zeros(shape, dtype))


def views(
    pool: torch.Tensor, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and scales of a pool that `new_cache` has made, as `PagedKV` has them."""
    if not FORMATS[dtype].has_scales:
        return pool, None
    shape = (pool.shape[0], num_layers, 2, num_kv_heads, page_size)
    row_bytes = FORMATS[dtype].row_bytes(head_dim)
    num_bytes = num_layers * 2 * num_kv_heads * page_size * row_bytes
    values = pool[:, :num_bytes].unflatten(1, (*shape[1:], row_bytes))
    if FORMATS[dtype].is_calibrated:
        return values, pool[:, num_bytes:].view(torch.int16).unflatten(1, (*shape[1:], -1))
    beside = (2,) if dtype == "int4" else ()
    return values.view(_DTYPES[dtype]), pool[:, num_bytes:].view(torch.bfloat16).unflatten(1, (*shape[1:], *beside))


def quantize(x: torch.Tensor, kind: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] to values and one scale a row, rounded up to bfloat16, of fp8 to a power of two; NaN if a value is not finite."""
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
    """Codes from -8 to 7, scale and offset [..., 2]. A byte has value i and, in its upper half, value D / 2 + i."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    offset = ((low * 0.5 + high * 0.5) + (high - low) * (0.5 / 15)).bfloat16().float()
    step = torch.maximum((high - offset) * (1 / 7), (offset - low) * 0.125)
    step = torch.where(step < _TINY, 0.0, step)
    scale = _rounded_up(step)
    is_finite = step.isfinite()
    factor = torch.where(is_finite & (step > 0), 1 / scale, 0.0)
    codes = torch.where(is_finite, (x - offset) * factor, 0.0).round().to(torch.int8)
    both = torch.cat([torch.where(is_finite, scale, float("nan")), torch.where(is_finite, offset, 0.0)], -1).bfloat16()
    first, second = codes.view(torch.uint8).chunk(2, dim=-1)
    return (first & 15) | (second << 4), both


def dequantize(values: torch.Tensor, scales: torch.Tensor, kind: KVFormat) -> torch.Tensor:
    if kind.name == "int4":
        signed = values.view(torch.int8)
        values = torch.cat([(signed << 4) >> 4, signed >> 4], dim=-1)
        return values.float() * scales[..., :1].float() + scales[..., 1:].float()
    return values.float() * scales.float().unsqueeze(-1)


def runs_of_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[..., n] pages to [..., G, n]: where each head's run lies in a cache flattened to [runs, S * D], for the first layer's
    keys. The values' are G further on, the next layer's keys 2 G."""
    _, num_layers, _, num_kv_heads, _, _ = cache.shape
    heads = torch.arange(num_kv_heads, device=cache.device).unsqueeze(1)
    return pages.to(torch.int64).unsqueeze(-2) * (num_layers * 2 * num_kv_heads) + heads


def write_kv(kv: PagedKV, layer: int, slots_T: torch.Tensor, keys_TGD: torch.Tensor, values_TGD: torch.Tensor) -> None:
    """`layer`: of a page; `slots_T`: page * page_size + offset."""
    pages, offsets = slots_T // kv.page_size, slots_T % kv.page_size
    for i, given in enumerate((keys_TGD, values_TGD)):
        if kv.scales is None:
            kv.cache[pages, layer, i, :, offsets] = given.to(kv.cache.dtype)
        else:
            kv.cache[pages, layer, i, :, offsets], kv.scales[pages, layer, i, :, offsets] = quantize(given, kv.format)


def read_slots(kv: PagedKV, slots: torch.Tensor, layer: int, is_value: bool) -> torch.Tensor:
    """Keys or values of single tokens in float32, [slots, G, D]."""
    at = (slots // kv.page_size, layer, int(is_value), slice(None), slots % kv.page_size)
    return kv.cache[at].float() if kv.scales is None else dequantize(kv.cache[at], kv.scales[at], kv.format)


def read_runs(kv: PagedKV, runs: torch.Tensor, layer: int, is_value: bool) -> torch.Tensor:
    """Keys or values of `runs_of_pages` in float32, [runs, S, D]. `layer`: of a page."""
    num_heads = kv.num_kv_heads
    if kv.scales is None:
        flat = kv.cache.view(-1, kv.page_size * kv.head_dim)
        return flat.index_select(0, runs + (2 * layer + is_value) * num_heads).view(-1, kv.page_size, kv.head_dim).float()
    at = runs // (kv.cache.shape[1] * 2 * num_heads), layer, int(is_value), runs % num_heads
    return dequantize(kv.cache[at], kv.scales[at], kv.format)


def copy_pages(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Whole pages, all layers; every source is read before any target is written. Indices are on the cache's device."""
    cache[targets] = cache[sources]
