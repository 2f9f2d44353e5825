"""NIXL (the package `nixl`): pages are read out of the exporter's memory by UCX, over RDMA, TCP or
shared memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from itertools import count
from typing import Any

import numpy as np

from tidemill.distributed.channel import Channel
from tidemill.distributed.transfer import checksum
from tidemill.distributed.transfer.base import TransferError, unavailable

_ANSWER_S = 10.0
_LOOK_S = 0.0001
_QUICK_LOOKS = 100  # without a pause


def check() -> None:
    """Raises unless NIXL can be used here."""
    _agent("check")


def _agent(name: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    logging.getLogger("nixl").setLevel(logging.ERROR)
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except Exception as error:  # a part of it, such as a library of CUDA, may be missing
        why = (
            "the package is not installed (pip install nixl)"
            if isinstance(error, ModuleNotFoundError)
            else str(error)
        )
        raise unavailable("nixl", why) from error
    try:
        return nixl_agent(
            f"tidemill-{name}-{os.getpid()}-{time.monotonic_ns()}",
            nixl_agent_config(backends=["UCX"]),
        )
    except Exception as error:
        raise unavailable("nixl", f"UCX cannot be started: {error}") from error


class NixlSource:
    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.slots = np.zeros((num_slots, page_bytes), np.uint8)
        self._agent = _agent("exporter")
        self._registered = self._agent.register_memory(
            [(self.slots.ctypes.data, self.slots.nbytes, 0, "")], "DRAM"
        )

    def offer(self) -> bytes:
        return self.slots.ctypes.data.to_bytes(8, "little") + self._agent.get_agent_metadata()

    def serve(self, channel: Channel) -> None:
        channel.receive(1)  # readers need nobody here; until it is gone

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlReader:
    """Bytes arrive in a buffer of its own, which is registered once."""

    def __init__(self, channel: Channel, page_bytes: int, offer: bytes) -> None:
        self._channel, self._page_bytes = channel, page_bytes
        self._first = int.from_bytes(offer[:8], "little")
        self._arrived = np.zeros(page_bytes, np.uint8)
        self._agent = _agent("importer")
        self._registered = self._agent.register_memory(
            [(self._arrived.ctypes.data, page_bytes, 0, "")], "DRAM"
        )
        try:
            self._peer = self._agent.add_remote_agent(offer[8:])
        except Exception as error:
            self._agent.deregister_memory(self._registered)
            raise TransferError(f"{channel.peer} has sent what NIXL does not understand") from error
        self._here = self._agent.get_xfer_descs(
            [(self._arrived.ctypes.data, page_bytes, 0)], "DRAM"
        )
        self._lock = threading.Lock()
        self._is_closed = False

    def read(self, slot: int, key: bytes, page: np.ndarray) -> bytes:
        with self._lock:
            if self._is_closed:
                raise TransferError(f"{self._channel.peer} is gone")
            try:
                place = self._first + slot * self._page_bytes
                self._transfer(self._agent.get_xfer_descs([(place, self._page_bytes, 0)], "DRAM"))
            except TransferError:
                raise
            except Exception as error:  # of NIXL: the engine is gone, or its memory
                raise TransferError(
                    f"{self._channel.peer} cannot be read: {type(error).__name__}"
                ) from error
            return checksum.copy(page, self._arrived, key)

    def _transfer(self, there: Any) -> None:
        handle = self._agent.initialize_xfer("READ", self._here, there, self._peer, b"")
        try:
            until, state = time.monotonic() + _ANSWER_S, self._agent.transfer(handle)
            for looks in count():
                if state in ("DONE", "ERR") or time.monotonic() > until:
                    break
                time.sleep(_LOOK_S if looks > _QUICK_LOOKS else 0)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"{self._channel.peer} does not answer")

    def close(self) -> None:
        self._channel.abort()
        self._channel.close()
        with self._lock:  # nobody reads into what is registered
            if not self._is_closed:
                self._is_closed = True
                self._agent.deregister_memory(self._registered)
