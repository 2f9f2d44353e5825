"""Physical memory of a GPU, mapped at addresses by the driver's virtual memory calls, a page in
each piece.

Creating a piece, mapping it and taking it away cost tens of microseconds each. So pieces that are
free are kept for the next page, some are created ahead, a page that a row will probably need next
is mapped before it does, and addresses that a step on the device may still read are taken away when
that step is done: all by a thread beside the engine's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from tidemill.errors import ConfigError

_MOST_SPARE = 64  # free pieces that are kept; more go back to the driver
_READY = 16  # free pieces that are created ahead
# CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Driver:
    """The calls of libcuda that are needed here, on one device."""

    def __init__(self, device: int = 0) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        where = _Location(_ON_DEVICE, device)
        self._properties, self._access = (
            _Properties(type=_PINNED, location=where),
            _Access(where, _READ_AND_WRITE),
        )
        self._context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ctypes.c_int(device))
        self.enter()

    def enter(self) -> None:
        """Each thread that makes calls, before its first."""
        self._call("cuCtxSetCurrent", self._context)

    def granule(self) -> int:
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        return size.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            none,
            none,
        )
        return address.value

    def wait(self) -> None:
        self._call("cuCtxSynchronize")

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def create(self, size: int) -> int:
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            properties,
            ctypes.c_uint64(0),
        )
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Not to be read or written before `allow`."""
        none = ctypes.c_uint64(0)
        self._call(
            "cuMemMap",
            ctypes.c_uint64(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(handle),
            none,
        )

    def allow(self, address: int, size: int) -> None:
        access = ctypes.byref(self._access)
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(size),
            access,
            ctypes.c_size_t(1),
        )

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def allocate_shared(self, size: int) -> tuple[int, bytes]:
        """Memory of zeros that other processes can open, and what they open it with."""
        address, handle = ctypes.c_uint64(), _IpcHandle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self.wait()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value, bytes(handle.reserved)

    def fill_words(self, address: int, value: int, num: int, stream: int) -> None:
        """From any thread, beside what other streams do."""
        self.enter()
        how = ctypes.c_uint(value), ctypes.c_size_t(num), ctypes.c_void_p(stream)
        self._call("cuMemsetD32Async", ctypes.c_uint64(address), *how)

    def call_host(self, function: int, argument: int, stream: int) -> None:
        """The stream calls a function of the host, by its address, which may not call CUDA. Also of
        a graph that is captured."""
        self._call(
            "cuLaunchHostFunc",
            ctypes.c_void_p(stream),
            ctypes.c_void_p(function),
            ctypes.c_void_p(argument),
        )

    def open_shared(self, handle: bytes) -> int:
        """Memory that another process allocated, on this GPU or one that this one can read."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _IpcHandle((ctypes.c_ubyte * 64)(*handle)),
            ctypes.c_uint(1),
        )
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})")


class Fence(Protocol):
    """Something on the device that is done some time, as torch.cuda.Event."""

    def synchronize(self) -> object: ...


class CudaMemory:
    """`fence`: of the latest step that was launched. What is taken away is taken away when it is
    done."""

    def __init__(self, page_bytes: int, driver: Driver | None = None) -> None:
        self.driver = driver or Driver()
        granule = self.driver.granule()
        if page_bytes % granule:
            raise ConfigError(
                f"A page of {page_bytes:,} bytes is not a multiple of this GPU's granule, {granule:,} bytes.",
                fix="Use --kv-layout paged.",
                param="kv_layout",
            )
        self.page_bytes, self.granule = page_bytes, granule
        self.fence: Fence | None = None
        # pages mapped ahead, and of those used; waits for an address
        self.num_ahead = self.num_in_time = self.num_waited = 0
        self._num_created = 0
        self._mapped: set[int] = set()
        self._reserved: list[tuple[int, int]] = []
        self._handles: dict[int, int] = {}  # of pages
        self._spare: list[int] = []
        # handles by the address where they are mapped for a page that has no number yet
        self._ahead: dict[int, int] = {}
        self._busy: dict[int, threading.Event] = {}  # addresses that the thread works on
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        held = (self._handles, self._spare, self._ahead, self._mapped, self._reserved)
        weakref.finalize(self, _close, self.driver, page_bytes, self._jobs, *held).atexit = False
        threading.Thread(
            target=_work,
            args=(self.driver, self._jobs, weakref.ref(self)),
            daemon=True,
            name="kv memory",
        ).start()
        self._jobs.put(partial(_with, weakref.ref(self), CudaMemory._prepare))

    @property
    def physical_bytes(self) -> int:
        return self._num_created * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Without the pieces that are kept for the next pages."""
        return (len(self._handles) + len(self._ahead)) * self.page_bytes

    def reserve(self, num_pages: int) -> int:
        size = num_pages * self.page_bytes
        try:
            self._reserved.append((self.driver.reserve(size), size))
            return self._reserved[-1][0]
        except RuntimeError as error:
            raise ConfigError(
                f"{size:,} bytes of addresses could not be reserved on the GPU: {error}.",
                fix="Lower --max-context or --max-requests, or use --kv-layout paged.",
                param="kv_layout",
            ) from error

    def map(self, address: int, pages: Sequence[int]) -> None:
        first = None  # of a run that is not accessible yet
        for i, page in enumerate(pages):
            at = address + i * self.page_bytes
            if self._take_ahead(at, page):
                self._allow(first, at)
                first = None
                continue
            self._map(at, self._handle_of(page))
            first = at if first is None else first
        self._allow(first, address + len(pages) * self.page_bytes)

    def _map(self, address: int, handle: int) -> None:
        self.driver.map(address, self.page_bytes, handle)
        self._mapped.add(address)

    def _take_away(self, address: int) -> None:
        self.driver.unmap(address, self.page_bytes)
        self._mapped.discard(address)

    def _allow(self, first: int | None, end: int) -> None:
        if first is not None:
            self.driver.allow(first, end - first)

    def _take_ahead(self, address: int, page: int) -> bool:
        """Tells if memory is there already, which is the page's then."""
        self._wait_for(address)
        with self._lock:
            handle = self._ahead.pop(address, None)
            if handle is None:
                return False
            if page not in self._handles:
                self._handles[page] = handle
                self.num_in_time += 1
                return True
        self._take_away(address)  # the page has memory, and something in it
        self._keep(handle)
        return False

    def _handle_of(self, page: int) -> int:
        if page not in self._handles:
            self._handles[page] = self._new_handle()
        return self._handles[page]

    def _new_handle(self) -> int:
        with self._lock:
            if self._spare:
                return self._spare.pop()
            self._num_created += 1
        return self.driver.create(self.page_bytes)

    def unmap(self, address: int) -> None:
        """When the latest step is done."""
        self._later(address, self._unmap, self.fence)

    def _unmap(self, address: int, fence: Fence | None) -> None:
        if fence is not None:
            fence.synchronize()
        self._take_away(address)

    def map_ahead(self, address: int) -> None:
        """Memory for a page that will probably be mapped there next."""
        self._later(address, self._map_ahead)

    def _map_ahead(self, address: int) -> None:
        if address in self._ahead:
            return
        handle = self._new_handle()
        self._map(address, handle)
        self.driver.allow(address, self.page_bytes)
        with self._lock:
            self._ahead[address] = handle
        self.num_ahead += 1
        self._prepare()

    def take_back(self, first: int, end: int) -> None:
        """Memory that was mapped ahead at these addresses, and is not anybody's yet, is not needed."""
        self._later(None, self._take_back, first, end)

    def _take_back(self, _: None, first: int, end: int) -> None:
        with self._lock:
            unused = {at: self._ahead.pop(at) for at in list(self._ahead) if first <= at < end}
            for at in unused:
                self._take_away(at)
        for handle in unused.values():
            self._keep(handle)

    def drop(self, page: int) -> None:
        handle = self._handles.pop(page, None)
        if handle is not None:
            self._later(None, lambda _: self._keep(handle))  # after its addresses were taken away

    def _keep(self, handle: int) -> None:
        with self._lock:
            if len(self._spare) < _MOST_SPARE:
                self._spare.append(handle)
                return
            self._num_created -= 1
        self.driver.release(handle)

    def _prepare(self) -> None:
        """Some free pieces, so that a page need not wait for one."""
        while len(self._spare) < _READY:
            handle = self.driver.create(self.page_bytes)
            with self._lock:
                self._num_created += 1
                self._spare.append(handle)

    # ---- the thread

    def _later(self, address: int | None, do: Callable[..., None], *arguments: Any) -> None:
        """By the thread, after what it was given before. `address`: not to be used before it is
        done."""
        done = threading.Event()
        if address is not None:
            self._busy[address] = done

        def job() -> None:
            try:
                do(address, *arguments)
            finally:
                done.set()
                if address is not None and self._busy.get(address) is done:
                    with suppress(KeyError):
                        del self._busy[address]

        self._jobs.put(job)

    def _wait_for(self, address: int) -> None:
        busy = self._busy.get(address)
        if busy is not None and not busy.is_set():
            self.num_waited += 1
            busy.wait()
        if self._failed is not None:
            raise RuntimeError("the thread that maps memory has failed") from self._failed

    def settle(self) -> None:
        """Wait until the thread has done what it was given."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first page is mapped."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        tensor = torch.as_tensor(_Bytes(address, num_bytes, self), device="cuda")
        assert tensor.data_ptr() == address, "the memory was copied"
        return tensor.view(dtype).view(shape)


class _Bytes:
    """The interface of which torch makes a tensor."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _with(memory: weakref.ref[CudaMemory], do: Callable[[CudaMemory], None]) -> None:
    if (found := memory()) is not None:
        do(found)


def _close(
    driver: Driver, page_bytes: int, jobs: queue.SimpleQueue[Callable[[], None] | None], handles: dict[int, int],
    spare: list[int], ahead: dict[int, int], mapped: set[int], reserved: list[tuple[int, int]],
) -> None:  # fmt: skip
    """Nobody has the memory any more."""
    jobs.put(None)
    with suppress(RuntimeError):  # of a device that has failed
        driver.enter()
        driver.wait()
        for address in mapped:
            driver.unmap(address, page_bytes)
        for handle in (*handles.values(), *spare, *ahead.values()):
            driver.release(handle)
        for address, size in reserved:
            driver.free(address, size)


def _work(
    driver: Driver,
    jobs: queue.SimpleQueue[Callable[[], None] | None],
    memory: weakref.ref[CudaMemory],
) -> None:
    driver.enter()
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:
            traceback.print_exc()
            if (found := memory()) is not None:
                found._failed = error
        del job
