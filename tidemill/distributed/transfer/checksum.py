"""Copying a page and summing what arrived, in one pass. Whoever fetches a page compares the sum
with the announced one: a page that was overwritten meanwhile, or of which a part is missing, has
another."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from tidemill.kernels import native

BYTES = 16
_COLUMNS = 8


def copy(target: np.ndarray, source: np.ndarray, key: bytes) -> bytes:
    """uint8, contiguous. Returns the checksum of the bytes that were written to `target`, and of
    the key."""
    assert target.nbytes == source.nbytes
    if native.lib is not None:
        sums = native.lib.copy_sum(target.ctypes.data, source.ctypes.data, source.nbytes)
    else:
        np.copyto(target, source)
        sums = _sums(target)
    return _digest(sums, key, target.nbytes)


def of(page: np.ndarray, key: bytes) -> bytes:
    return _digest(_sums(page), key, page.nbytes)


def _digest(sums: bytes, key: bytes, num_bytes: int) -> bytes:
    return blake2b(sums + num_bytes.to_bytes(8, "little") + key, digest_size=BYTES).digest()


def _sums(page: np.ndarray) -> bytes:
    """The checksums that transfer.c computes."""
    padded = np.zeros(-(-page.nbytes // (8 * _COLUMNS)) * 8 * _COLUMNS, np.uint8)
    padded[: page.nbytes] = page
    rows = padded.view("<u8").reshape(-1, _COLUMNS)
    weights = np.arange(len(rows), 0, -1, dtype=np.uint64)[:, None]
    return (
        rows.sum(0, dtype=np.uint64).tobytes() + (rows * weights).sum(0, dtype=np.uint64).tobytes()
    )
