"""TCP between hosts: a reader asks for a slot and gets its bytes. Plain, and everywhere."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np

from tidemill.distributed.channel import Channel
from tidemill.distributed.transfer import checksum
from tidemill.distributed.transfer.base import TransferError

_ANSWER_S = 10.0  # for a page: an engine that does not answer is given up
_ASK_BYTES = 4


class TcpSource:
    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.slots = np.empty((num_slots, page_bytes), np.uint8)  # mapped as it is used

    def offer(self) -> bytes:
        return b""

    def serve(self, channel: Channel) -> None:
        with _bare(channel) as own:
            while len(request := own.recv(_ASK_BYTES, socket.MSG_WAITALL)) == _ASK_BYTES:
                slot = int.from_bytes(request, "little")
                if slot >= len(self.slots):
                    return
                # waits until the reader takes it: nothing piles up
                own.sendall(self.slots[slot].data)

    def close(self) -> None:
        return


class TcpReader:
    def __init__(self, channel: Channel, page_bytes: int) -> None:
        self._channel, self._own = channel, _bare(channel)
        channel.limit(_ANSWER_S)
        self._arrived = np.empty(page_bytes, np.uint8)
        self._lock = threading.RLock()  # while it is read, the socket is not closed

    def read(self, slot: int, key: bytes, page: np.ndarray) -> bytes:
        with self._lock:
            try:
                self._own.sendall(slot.to_bytes(_ASK_BYTES, "little"))
                num = self._own.recv_into(self._arrived.data, flags=socket.MSG_WAITALL)
            except OSError:
                num = 0
            if num != self._arrived.nbytes:
                self.close()  # a late answer would be taken for the next one's
                raise TransferError(f"{self._channel.peer} does not answer")
            return checksum.copy(page, self._arrived, key)

    def close(self) -> None:
        self._channel.abort()  # whoever reads stops
        with self._lock:
            self._channel.close()
            self._own.close()


def _bare(channel: Channel) -> socket.socket:
    """From now on, only this is used: what is sent has a size that both ends know."""
    return socket.socket(fileno=os.dup(channel.fileno()))
