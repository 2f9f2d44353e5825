"""NCCL, as far as it is used here: a communicator of ranks, and copies of bytes between them on a
stream. The library is torch's.

Its sums are not used: their order depends on sizes and topology.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import ConfigError, WorkerLost

ID_BYTES = 128
_UINT8 = 1  # ncclDataType_t
_MISUSES = (4, 5)  # ncclInvalidArgument, ncclInvalidUsage
_LOOK_S = 0.1
_WARM_UP_BYTES = 2**26


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Library:
    """libnccl, by its C interface. What returns an error raises."""

    def __init__(self, lib: Any = None) -> None:
        self._lib = lib or _found()
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, arguments in {
            "ncclGetVersion": [ctypes.POINTER(number)],
            "ncclGetUniqueId": [ctypes.POINTER(_Id)],
            "ncclCommInitRank": [ctypes.POINTER(pointer), number, _Id, number],
            "ncclAllGather": [pointer, pointer, ctypes.c_size_t, number, pointer, pointer],
            "ncclSend": [pointer, ctypes.c_size_t, number, number, pointer, pointer],
            "ncclRecv": [pointer, ctypes.c_size_t, number, number, pointer, pointer],
            "ncclGroupStart": [],
            "ncclGroupEnd": [],
            "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
            "ncclCommAbort": [pointer],
        }.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = arguments, number
        for name, argument in (("ncclGetErrorString", number), ("ncclGetLastError", pointer)):
            function = getattr(self._lib, name)
            function.argtypes, function.restype = [argument], ctypes.c_char_p

    @property
    def version(self) -> str:
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def new_id(self) -> bytes:
        """By which ranks find each other: whoever has it can join."""
        made = _Id()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init(self, shared_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """Returns when all ranks have called it."""
        made = ctypes.c_void_p()
        self.call(
            "ncclCommInitRank", ctypes.byref(made), size, _Id.from_buffer_copy(shared_id), rank
        )
        return made

    def all_gather(
        self, comm: ctypes.c_void_p, x: int, out: int, num_bytes: int, stream: int
    ) -> None:
        self.call("ncclAllGather", x, out, num_bytes, _UINT8, comm, stream)

    def all_to_all(
        self, comm: ctypes.c_void_p, x: int, out: int, num_bytes: int, size: int, stream: int
    ) -> None:
        """`num_bytes`: for each rank."""
        self.call("ncclGroupStart")
        try:
            for rank in range(size):
                self.call("ncclSend", x + rank * num_bytes, num_bytes, _UINT8, rank, comm, stream)
                self.call("ncclRecv", out + rank * num_bytes, num_bytes, _UINT8, rank, comm, stream)
        finally:
            self.call("ncclGroupEnd")

    def error_of(self, comm: ctypes.c_void_p) -> str:
        """The error of a communicator meanwhile; empty: none."""
        code = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(code))
        return self._words(code.value) if code.value else ""

    def abort(self, comm: ctypes.c_void_p) -> None:
        """Kernels that wait for other ranks end at once. Returns when no CUDA graph has the
        communicator any more."""
        self.call("ncclCommAbort", comm)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code in _MISUSES:
            fix = "Ranks of one host need a GPU each. NCCL_DEBUG=INFO shows more."
            raise ConfigError(
                f"NCCL refuses {name}: {self._words(code)}.", fix=fix, param="collectives"
            )
        if code:
            raise WorkerLost(f"{name} failed: {self._words(code)}.")

    def _words(self, code: int) -> str:
        last = (self._lib.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return self._lib.ncclGetErrorString(code).decode() + (f" ({last})" if last else "")


def _found() -> ctypes.CDLL:
    bundled = Path(torch.__file__).parents[1] / "nvidia/nccl/lib/libnccl.so.2"
    # the first: torch has loaded it, or it is the system's
    for path in ("libnccl.so.2", str(bundled)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    what = "These ranks exchange by NCCL, and libnccl.so.2 was not found."
    raise ConfigError(
        what, fix="Install a torch with CUDA, or nvidia-nccl-cu12.", param="collectives"
    )


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _wait(done: threading.Event, check: Callable[[], None], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not done.wait(_LOOK_S):
        check()
        if time.monotonic() > until:
            raise ConfigError(
                f"NCCL did not connect the ranks in {within_s:.0f} s.",
                fix="Set NCCL_SOCKET_IFNAME to the network interface between the hosts; NCCL_DEBUG=INFO shows more.",
                param="collectives",
            )


class Communicator:
    """A rank's end. Calls are on the current stream, and may be captured."""

    def __init__(
        self,
        shared_id: bytes,
        rank: int,
        size: int,
        check: Callable[[], None],
        within_s: float,
        library: Library | None = None,
    ) -> None:
        """`check`: called again and again until all ranks are there; raises if there is no point in
        waiting."""
        self._library = library or Library()
        self._size, self._lock, self._ending, self._is_ended = (
            size,
            threading.Lock(),
            threading.Lock(),
            False,
        )
        made, failed, done = list[ctypes.c_void_p](), list[Exception](), threading.Event()
        device = torch.cuda.current_device()

        def start() -> None:  # it waits for the other ranks, and cannot be interrupted
            try:
                torch.cuda.set_device(device)
                made.append(self._library.init(shared_id, rank, size))
                self._warm_up(made[0], size)
            except Exception as error:  # is raised where it is awaited
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=start, name="NCCL starts", daemon=True).start()
        try:
            _wait(done, check, within_s)
        except BaseException:
            if made:
                threading.Thread(target=self._library.abort, args=(made[0],), daemon=True).start()
            raise
        if failed:
            check()
            raise failed[0]
        self._comm = made[0]

    @property
    def error(self) -> str:
        """The error of the network, or of a peer; empty: none."""
        with self._lock:
            return "" if self._is_ended else self._library.error_of(self._comm)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out`: what all ranks have, one after the other."""
        with self._lock:
            self._check(x, out)
            self._library.all_gather(self._comm, x.data_ptr(), out.data_ptr(), x.nbytes, _stream())

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sends and receives as many parts as there are ranks: part r of x goes to rank r, part r
        of `out` came from there."""
        with self._lock:
            self._check(x, out)
            assert x.nbytes == out.nbytes
            each = x.nbytes // self._size
            self._library.all_to_all(
                self._comm, x.data_ptr(), out.data_ptr(), each, self._size, _stream()
            )

    def _check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._is_ended:
            raise WorkerLost("The engine cannot go on: a worker of the group is gone.")
        assert x.is_contiguous()
        assert out.is_contiguous()

    def _warm_up(self, comm: ctypes.c_void_p, size: int) -> None:
        """Connections are made when a kind of message first needs them, which must not be while a
        graph is captured."""
        num = _WARM_UP_BYTES // size
        x, out = (torch.zeros(num * size, dtype=torch.uint8, device="cuda") for _ in range(2))
        while num:
            self._library.all_gather(comm, x.data_ptr(), out.data_ptr(), num, _stream())
            self._library.all_to_all(comm, x.data_ptr(), out.data_ptr(), num, size, _stream())
            num //= 4
        torch.cuda.current_stream().synchronize()

    def end(self) -> None:
        """From any thread, also amid a call that waits. The rest of it goes once no graph has it
        any more."""
        if self._ending.acquire(blocking=False):  # by the first who calls
            self._is_ended = True
            threading.Thread(target=self._abort, name="NCCL ends", daemon=True).start()

    def _abort(self) -> None:
        if self._lock.acquire(timeout=1.0):  # else a call waits for a peer, which only this ends
            self._lock.release()
        self._library.abort(self._comm)
