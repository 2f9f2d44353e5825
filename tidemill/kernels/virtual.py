"""The rows of a KV cache in address ranges of their own: a row's tokens follow each other without
gaps, and physical memory is mapped where there are tokens. A page is one piece of physical memory;
it may be mapped in several rows, which share it then.

    addresses   row 0 [page 3][page 7][ reserved ...            ]   row 1 [page 3][page 5][page 2][ reserved ... ]
    physical    page 1   page 2   page 3 ...

On a CPU physical memory is a file without a name (memfd): it grows as pages are written, and what
is given back leaves a hole.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tidemill.errors import ConfigError

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
# numpy has no bfloat16
_DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.int16}


class Memory(Protocol):
    """Physical pages, by number, and addresses they can be mapped at."""

    page_bytes: int

    def reserve(self, num_pages: int) -> int:
        """An address range without memory; where it begins."""
        ...

    def map(self, address: int, pages: Sequence[int]) -> None:
        """One after the other, from this address on."""
        ...

    def unmap(self, address: int) -> None: ...

    def drop(self, page: int) -> None:
        """Drops a page that is not needed any more: its memory is free. It is mapped nowhere."""
        ...

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class VirtualRows:
    """The mapping of pages to rows. The ranges of all rows follow each other. With ranges to spare,
    a row that begins anew does so in another one, while a step on the device still reads the old
    one."""

    def __init__(
        self,
        memory: Memory,
        num_rows: int,
        pages_per_row: int,
        num_spare: int = 0,
        num_before: int = 0,
    ) -> None:
        """`num_before`: pages before the first range."""
        self.memory, self.pages_per_row, self._num_before = memory, pages_per_row, num_before
        self.num_ranges = num_rows + num_spare
        self.num_pages = num_before + self.num_ranges * pages_per_row  # that could be mapped
        self.base = memory.reserve(self.num_pages)
        self.address = self.base + num_before * memory.page_bytes  # of the first range
        self._mapped = np.zeros((self.num_ranges, pages_per_row), np.int32)
        self._addresses: dict[int, set[int]] = {}  # of each page that is mapped somewhere
        self._range = list(range(num_rows))
        self._spare = deque(range(num_rows, self.num_ranges))

    def first_page(self, row: int) -> int:
        """Pages from the base to where the row begins."""
        return self._num_before + self._range[row] * self.pages_per_row

    def address_of(self, row: int, index: int) -> int:
        return self.base + (self.first_page(row) + index) * self.memory.page_bytes

    def is_free(self, row: int, index: int) -> bool:
        """A page could be mapped there."""
        return index < self.pages_per_row and not self._mapped[self._range[row], index]

    def renew(self, row: int) -> None:
        """The row begins anew, in the range that was given back first."""
        if self._spare:
            self.set(row, np.zeros(self.pages_per_row, np.int32))
            self._spare.append(self._range[row])
            self._range[row] = self._spare.popleft()

    def set(self, row: int, pages: np.ndarray) -> None:
        """The row's range holds these pages, in this order; 0 for none."""
        mapped = self._mapped[self._range[row]]
        changed = np.flatnonzero(mapped != pages).tolist()
        for index in changed:
            if mapped[index]:
                address = self.address_of(row, index)
                self._addresses[int(mapped[index])].discard(address)
                self.memory.unmap(address)
        for run in _runs([index for index in changed if pages[index]]):
            address, new = self.address_of(row, run[0]), pages[run[0] : run[-1] + 1].tolist()
            self.memory.map(address, new)
            for i, page in enumerate(new):
                self._addresses.setdefault(page, set()).add(address + i * self.memory.page_bytes)
        mapped[:] = pages

    def drop(self, pages: Iterable[int]) -> None:
        """They hold nothing any more."""
        for page in pages:
            for address in self._addresses.pop(page, ()):
                self._mapped.reshape(-1)[(address - self.address) // self.memory.page_bytes] = 0
                self.memory.unmap(address)
            self.memory.drop(page)

    @property
    def num_mapped(self) -> int:
        return int(np.count_nonzero(self._mapped))


def _runs(indices: list[int]) -> list[list[int]]:
    """The runs of numbers that follow each other."""
    runs = itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    return [[index for _, index in run] for _, run in runs]


class HostMemory:
    """The memory of a CPU. Reserved addresses read as zeros and cannot be written."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        assert page_bytes % mmap.PAGESIZE == 0
        self.page_bytes = page_bytes
        self._file = os.memfd_create("tidemill-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_pages * page_bytes)
        # every page in order, for copies
        self._pool = mmap.mmap(self._file, num_pages * page_bytes)
        weakref.finalize(self, os.close, self._file)

    @property
    def physical_bytes(self) -> int:
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, num_pages: int) -> int:
        size = num_pages * self.page_bytes
        address = _mmap(
            0, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        weakref.finalize(self, _libc.munmap, address, size)
        return address

    def map(self, address: int, pages: Sequence[int]) -> None:
        size, protection = self.page_bytes, mmap.PROT_READ | mmap.PROT_WRITE
        for i, page in enumerate(pages):
            _mmap(
                address + i * size,
                size,
                protection,
                mmap.MAP_SHARED | _MAP_FIXED,
                self._file,
                page * size,
            )

    def unmap(self, address: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, self.page_bytes, mmap.PROT_READ, flags)

    def drop(self, page: int) -> None:
        self._pool.madvise(mmap.MADV_REMOVE, page * self.page_bytes, self.page_bytes)

    def pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All pages side by side, wherever else they are mapped."""
        return self.view(ctypes.addressof(ctypes.c_char.from_buffer(self._pool)), shape, dtype)

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return view_of(address, shape, dtype, self)


def view_of(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object
) -> torch.Tensor:
    """Memory of this process as a tensor; its owner lives as long."""
    buffer: Any = (
        ctypes.c_char * (int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    ).from_address(address)
    buffer.owner = owner
    return torch.from_numpy(np.frombuffer(buffer, _DTYPES[dtype]).reshape(shape)).view(dtype)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(
    address: int, size: int, protection: int, flags: int, file: int = -1, offset: int = 0
) -> int:
    made = _libc.mmap(address or None, size, protection, flags, file, offset)
    if made is None or made == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise ConfigError(
            f"{size:,} bytes of addresses could not be mapped for the KV cache: {os.strerror(code)}.",
            fix="Lower --max-context or --max-requests, raise vm.max_map_count, or use --kv-layout paged.",
            param="kv_layout",
        )
    return int(made)
