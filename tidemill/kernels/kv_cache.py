"""The KV cache: [P, layers of a page, 2, G, S, D]. Page by page, so that memory is used as pages are; a page of one head is one
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.cache_layout import Place
from tidemill.kernels import masks
from tidemill.model_config import AttentionSpec


@dataclass(frozen=True, slots=True)
class Angles:
    """Of a rotary position embedding: [positions, rotated dimensions / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a layer's attention has learned besides its projections."""

    q_norm: torch.Tensor | None = None  # [D], of each head before rotation
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    sinks: torch.Tensor | None = None  # [N]


PLAIN = HeadWeights()


@dataclass(frozen=True, slots=True)
class PagedKV:
    """What an attention backend works on."""

    cache: torch.Tensor  # [P, layers of a page, 2, G, S, D]
    tables: list[torch.Tensor]  # of each group: [rows, pages] int32: which page holds a row's tokens S * i .. S * i + S - 1
    specs: tuple[AttentionSpec, ...]  # of each layer
    angles: list[Angles | None]  # of each layer
    places: tuple[Place, ...]  # of each layer
    biases: Sequence[torch.Tensor | None] = field(default_factory=list)  # of each layer, by distance: `Model.distance_biases`

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
        return self.cache.shape[5]

    def by_distance(self) -> list[torch.Tensor | None]:
        """What each layer adds to scores, as a table where the cache is; layers that add the same share one."""
        most = max((table.shape[1] * self.page_size for table in self.tables), default=0)
        kinds = [(spec.has_alibi, id(bias)) for spec, bias in zip(self.specs, self.biases, strict=True)]
        made = {kind: masks.by_distance(self.specs[kinds.index(kind)], self.biases[kinds.index(kind)], most) for kind in kinds}
        on_device = {kind: None if table is None else table.float().to(self.cache.device) for kind, table in made.items()}
        return [on_device[kind] for kind in kinds]


def new_cache(
    num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str = "float32"
) -> torch.Tensor:
    """numpy's zeros are mapped lazily (torch's are written): memory is used as pages are."""
    shape = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
    if dtype == "bfloat16":  # which numpy does not know
        return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.zeros(shape, dtype))


def runs_of_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[..., n] pages to [..., G, n]: where each head's run lies in a cache flattened to [runs, S * D], for the first layer's
    keys. The values' are G further on, the next layer's keys 2 G."""
    _, num_layers, _, num_kv_heads, _, _ = cache.shape
    heads = torch.arange(num_kv_heads, device=cache.device).unsqueeze(1)
    return pages.to(torch.int64).unsqueeze(-2) * (num_layers * 2 * num_kv_heads) + heads


def write_kv(cache: torch.Tensor, layer: int, slots_T: torch.Tensor, keys_TGD: torch.Tensor, values_TGD: torch.Tensor) -> None:
    """`slots_T`: page * page_size + offset."""
    page_size = cache.shape[4]
    pages, offsets = slots_T // page_size, slots_T % page_size
    cache[pages, layer, 0, :, offsets] = keys_TGD.to(cache.dtype)
    cache[pages, layer, 1, :, offsets] = values_TGD.to(cache.dtype)


def copy_pages(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Whole pages, all layers; every source is read before any target is written. Indices are on the cache's device."""
    cache[targets] = cache[sources]
