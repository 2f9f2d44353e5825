"""Drafts that are a tree: several may stand in the place of one token, and each sees only its
ancestors and what is before.

The drafts of a step are computed side by side, so their keys and values lie one after the other in
a row's pages, past its known tokens. A query of the tree takes the keys of its ancestors in the
order of their positions, as if they were the row's only tokens: not a mask over all drafts, whose
sums would have another order. So its bits are those of the sequence without the tree. When it is
known which drafts are right, their keys and values move to where the tokens will be looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.kv_cache import PagedKV

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of each entry of a step: from which position on its tokens lie elsewhere, and where
    (as positions of the row's table)."""

    bases: np.ndarray  # int64 [entries]
    places: np.ndarray  # int64 [entries, depth of the deepest]

    @staticmethod
    def of(paths: Sequence[tuple[int, Sequence[int]] | None]) -> Paths:
        """`paths`: base and places, or None: all lie where they should."""
        width = max(len(one[1]) for one in paths if one is not None)
        places = np.zeros((len(paths), width), np.int64)
        bases = np.full(len(paths), _NEVER)
        for i, one in enumerate(paths):
            if one is not None:
                bases[i] = one[0]
                places[i, : len(one[1])] = one[1]
        return Paths(bases, places)


def move_tokens(
    kv: PagedKV,
    rows: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    tables: Sequence[np.ndarray] | None = None,
) -> None:
    """Keys and values of all layers, from one position of a row's table to another. All are read
    before any is written. `tables`: the page tables, if those of the cache are on a device."""
    size, device = kv.page_size, kv.cache.device
    for pages in [table.numpy() for table in kv.tables] if tables is None else tables:
        from_, to = (pages[rows, at // size].astype(np.int64) for at in (sources, targets))
        places = torch.from_numpy(np.stack([from_, sources % size, to, targets % size]))
        if device.type == "cuda":
            places = places.pin_memory().to(device, non_blocking=True)
        from_page, from_offset, to_page, to_offset = places
        for values in (kv.cache, kv.scales) if kv.is_uniform else ():
            if values is not None:
                values[to_page, :, :, :, to_offset] = values[from_page, :, :, :, from_offset]
        for part in [] if kv.is_uniform else kv.stored_parts:
            part.values[to_page, :, to_offset] = part.values[from_page, :, from_offset]
