"""Shared memory of one host: the slots are anonymous memory, whose file descriptor goes to readers
over the socket. When the last process that has it ends, killed or not, it is gone: there is nothing
to clean up."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import sys
import tempfile
import threading

import numpy as np

from tidemill.distributed.channel import Channel
from tidemill.distributed.transfer import checksum
from tidemill.distributed.transfer.base import TransferError
from tidemill.errors import WorkerLost

_READY = b"ready"


class SharedSource:
    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self._fd = _anonymous(num_slots * page_bytes)
        self._lock = threading.Lock()
        self._memory = mmap.mmap(self._fd, num_slots * page_bytes)
        self.slots = np.frombuffer(self._memory, np.uint8).reshape(num_slots, page_bytes)

    def offer(self) -> bytes:
        return b""

    def serve(self, channel: Channel) -> None:
        channel.receive(len(_READY))  # it has read the welcome: nothing else is being sent
        with self._lock:
            if self._fd < 0:
                return
            fd = os.dup(self._fd)
        try:
            with socket.socket(fileno=os.dup(channel.fileno())) as own:
                socket.send_fds(own, [b"!"], [fd])
        finally:
            os.close(fd)
        channel.receive(1)  # until it is gone

    def close(self) -> None:
        with self._lock:  # its number may be another file's from then on
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SharedReader:
    def __init__(self, channel: Channel, num_slots: int, page_bytes: int) -> None:
        self._channel = channel
        channel.send_now(_READY)
        with socket.socket(fileno=os.dup(channel.fileno())) as own:
            _, fds, _, _ = socket.recv_fds(own, 1, 1)
        if not fds:
            raise WorkerLost(f"{channel.peer} has sent no memory.")
        try:
            _check(fds[0], num_slots * page_bytes)
            self._memory = mmap.mmap(fds[0], num_slots * page_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fds[0])
        self._slots = np.frombuffer(self._memory, np.uint8).reshape(num_slots, page_bytes)

    def read(self, slot: int, key: bytes, page: np.ndarray) -> bytes:
        return checksum.copy(page, self._slots[slot], key)

    def close(self) -> None:
        self._channel.abort()
        self._channel.close()


def _anonymous(num_bytes: int) -> int:
    """Memory without a name. It is mapped as it is used, and cannot be made smaller under those who
    have mapped it."""
    if sys.platform == "linux":
        fd = os.memfd_create("tidemill-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        return fd
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), num_bytes)
        return os.dup(file.fileno())


def _check(fd: int, num_bytes: int) -> None:
    if os.fstat(fd).st_size < num_bytes:
        raise TransferError("the shared memory is smaller than it should be")
    if sys.platform == "linux" and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransferError("the shared memory could be made smaller while it is read")
