"""SharedGroup: ranks on one host exchange through shared memory, by the compiled kernels
(kernels/native/group.c)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.native import structs

SLOT_BYTES = 4 * 2**20  # what a rank shows at once; larger messages go in pieces
DEADLINE_S = 300.0  # to wait for a rank that lives and does not come
WEIGHTS_SUFFIX = "-weights"  # of the file beside it that weights are gathered from
_LINE = 64


def shared_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    return mmap.ALLOCATIONGRANULARITY * -(
        -(_LINE * (1 + size) + 2 * size * slot_bytes) // mmap.ALLOCATIONGRANULARITY
    )


def make_shared(path: Path, *sizes: int, slot_bytes: int = SLOT_BYTES) -> None:
    """The memory of groups of so many ranks, as a file of mode 0600 that ranks map. It is mapped as
    it is used."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(handle, sum(shared_bytes(size, slot_bytes) for size in sizes))
    finally:
        os.close(handle)


class SharedGroup:
    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        slot_bytes: int = SLOT_BYTES,
        deadline_s: float = DEADLINE_S,
        first: int = 0,
    ) -> None:
        """`path`: of a file that `make_shared` made. `first`: where the group's memory begins
        there."""
        assert native.lib is not None
        assert slot_bytes % _LINE == 0
        self.rank, self.size, self._lib = rank, size, native.lib
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), shared_bytes(size, slot_bytes), offset=first)
        self._view = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        shared = ctypes.addressof(self._view)
        self._spec = structs.GroupSpec(
            rank, size, slot_bytes, int(deadline_s * 1e9), shared, structs.COLLECTIVE()
        )
        self.address = ctypes.addressof(self._spec)

    def begin(self) -> None:
        return

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        self._lib.all_reduce(self.address, x_TN)
        return x_TN

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        dim %= 2
        total = sum(sizes) if sizes else self.size * x.shape[dim]
        if dim == 1:
            return self._lib.all_gather(self.address, x, total)
        return self._lib.all_gather(self.address, x.reshape(1, -1), total * x.shape[1]).view(
            total, x.shape[1]
        )

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        width = parts[0].shape[1]
        sent = np.frombuffer(
            self._exchange(np.array([len(part) for part in parts], np.int64).tobytes()), np.int64
        )
        sent = sent.reshape(self.size, self.size)  # by source and target, in rows
        row_bytes = 4 * width
        ranges = [
            (int(of[: self.rank].sum()) * row_bytes, int(of[self.rank]) * row_bytes) for of in sent
        ]
        shown = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        most = int(sent.sum(1).max()) * row_bytes
        taken = torch.frombuffer(
            self._lib.take_ranges(self.address, shown, most, ranges) or bytearray(4),
            dtype=torch.float32,
        )
        ends = np.cumsum([num // 4 for _, num in ranges])
        assert counts is None or list(counts) == sent[:, self.rank].tolist()
        return [
            taken[end - num // 4 : end].view(-1, width)
            for end, (_, num) in zip(ends, ranges, strict=True)
        ]

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        shown = data if self.rank == source else b""
        lens = np.frombuffer(self._exchange(np.int64(len(shown)).tobytes()), np.int64).tolist()
        ranges = [(0, num if rank == source else 0) for rank, num in enumerate(lens)]
        return bytes(self._lib.take_ranges(self.address, shown, max(lens), ranges))

    def _exchange(self, shown: bytes) -> bytes:
        """Exchanges the bytes that all ranks show, who show as many bytes."""
        return bytes(
            self._lib.take_ranges(self.address, shown, len(shown), [(0, len(shown))] * self.size)
        )

    def barrier(self) -> None:
        self._exchange(b"")

    def fail(self) -> None:
        self._lib.fail_group(self.address)

    def close(self) -> None:
        """The memory stays mapped while a recorded forward pass may name it: it goes with the
        process."""
        self.fail()
