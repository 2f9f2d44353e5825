"""Host memory straight from the system, in huge pages where it has them: a page fault for 2 MiB,
not for 4 KiB."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

PAGE = 4096
_LARGE = 4 * 2**20  # bytes from which on huge pages are worth the rounding


def memory(num_bytes: int) -> np.ndarray:
    """Bytes from a multiple of a page on, in which nothing lies yet."""
    made = mmap.mmap(
        -1, max(PAGE, -(-num_bytes // PAGE) * PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, np.uint8)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU; a large one is in memory of its own, which goes back to the system with
    it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(memory(num_bytes))[:num_bytes].view(dtype).view(shape)
