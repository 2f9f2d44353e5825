"""The rows of a KV cache in address ranges of their own: a row's tokens follow each other without gaps, and physical memory is
mapped where there are tokens. A page is one piece of physical memory; it may be mapped in several rows, which share it then.

    addresses   row 0 [page 3][page 7][ reserved ...            ]   row 1 [page 3][page 5][page 2][ reserved ... ]
    physical    page 1   page 2   page 3 ...

On a CPU physical memory is a file without a name (memfd): it grows as pages are written, and what is given back leaves a hole.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from tidemill.errors import ConfigError

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.int16}  # numpy has no bfloat16


class Memory(Protocol):
    """Physical pages, by number, and addresses they can be mapped at."""

    page_bytes: int

    def reserve(self, num_pages: int) -> int:
        """An address range without memory; where it begins."""
        ...

    def map(self, address: int, page: int) -> None: ...
    def unmap(self, address: int) -> None: ...

    def drop(self, page: int) -> None:
        """What the page holds is not needed any more: its memory is free."""
        ...


class VirtualRows:
    """Which page is mapped where. The ranges of all rows follow each other."""

    def __init__(self, memory: Memory, num_rows: int, pages_per_row: int) -> None:
        self._memory, self._pages_per_row = memory, pages_per_row
        self.address = memory.reserve(num_rows * pages_per_row)
        self._mapped = np.zeros((num_rows, pages_per_row), np.int32)

    def set(self, row: int, pages: np.ndarray) -> None:
        """The row's range holds these pages, in this order; 0 for none."""
        mapped = self._mapped[row]
        for index in np.flatnonzero(mapped != pages).tolist():
            address = self.address + (row * self._pages_per_row + index) * self._memory.page_bytes
            if mapped[index]:
                self._memory.unmap(address)
            if pages[index]:
                self._memory.map(address, int(pages[index]))
            mapped[index] = pages[index]

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._memory.drop(page)

    @property
    def num_mapped(self) -> int:
        return int(np.count_nonzero(self._mapped))


class HostMemory:
    """Of a CPU. Reserved addresses read as zeros and cannot be written."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        assert page_bytes % mmap.PAGESIZE == 0
        self.page_bytes = page_bytes
        self._file = os.memfd_create("tidemill-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_pages * page_bytes)
        self._pool = mmap.mmap(self._file, num_pages * page_bytes)  # every page in order, for copies
        weakref.finalize(self, os.close, self._file)

    @property
    def physical_bytes(self) -> int:
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, num_pages: int) -> int:
        size = num_pages * self.page_bytes
        address = _mmap(0, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        weakref.finalize(self, _libc.munmap, address, size)
        return address

    def map(self, address: int, page: int) -> None:
        _mmap(
            address, self.page_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._file,
            page * self.page_bytes,
        )  # fmt: skip

    def unmap(self, address: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, self.page_bytes, mmap.PROT_READ, flags)

    def drop(self, page: int) -> None:
        self._pool.madvise(mmap.MADV_REMOVE, page * self.page_bytes, self.page_bytes)

    def pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All pages side by side, wherever else they are mapped."""
        return self._tensor(ctypes.addressof(ctypes.c_char.from_buffer(self._pool)), shape, dtype)

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._tensor(address, shape, dtype)

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kind = np.dtype(_DTYPES[dtype])
        buffer = (ctypes.c_char * (int(np.prod(shape, dtype=np.int64)) * kind.itemsize)).from_address(address)
        buffer.memory = self  # type: ignore[attr-defined]  # which lives as long as the tensor
        return torch.from_numpy(np.frombuffer(buffer, kind).reshape(shape)).view(dtype)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int, size: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> int:
    made = _libc.mmap(address or None, size, protection, flags, file, offset)
    if made is None or made == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise ConfigError(
            f"{size:,} bytes of addresses could not be mapped for the KV cache: {os.strerror(code)}.",
            fix="Lower --max-context or --max-requests, raise vm.max_map_count, or use --kv-layout paged.",
            param="kv_layout",
        )
    return int(made)
