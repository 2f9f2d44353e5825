"""The KV cache of a layer: two tensors [G, P, S, D]. Head-major, so that a page of one head is one contiguous run of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class PagedKV:
    """What an attention backend works on."""

    cache: torch.Tensor  # [layers, 2, G, P, S, D]
    table: torch.Tensor  # [rows, pages] int32: which page holds a row's tokens S * i .. S * i + S - 1
    cos: torch.Tensor  # [positions, D / 2]
    sin: torch.Tensor
    num_heads: int

    @property
    def num_kv_heads(self) -> int:
        return self.cache.shape[2]


def new_cache(
    num_layers: int, num_kv_heads: int, num_pages: int, page_size: int, head_dim: int, dtype: str = "float32"
) -> torch.Tensor:
    """[layers, 2, G, P, S, D]. numpy's zeros are mapped lazily (torch's are written): memory is used as pages are."""
    return torch.from_numpy(np.zeros((num_layers, 2, num_kv_heads, num_pages, page_size, head_dim), dtype))


def slot_index(slots_T: torch.Tensor, num_kv_heads: int, num_slots: int) -> torch.Tensor:
    """Where each (token, KV head) goes in a cache flattened to [G * P * S, D]. The same for all layers of a step."""
    heads = torch.arange(num_kv_heads, device=slots_T.device) * num_slots
    return (slots_T.unsqueeze(1) + heads).flatten()


def write_kv(cache_GPSD: torch.Tensor, index: torch.Tensor, values_TGD: torch.Tensor) -> None:
    head_dim = cache_GPSD.shape[-1]
    cache_GPSD.view(-1, head_dim).index_copy_(0, index, values_TGD.reshape(-1, head_dim).to(cache_GPSD.dtype))


def copy_pages(cache: torch.Tensor, sources: list[int], targets: list[int]) -> None:
    """All layers' pages at once; every source is read before any target is written."""
    device = cache.device
    cache[:, :, :, torch.tensor(targets, device=device)] = cache[:, :, :, torch.tensor(sources, device=device)]
