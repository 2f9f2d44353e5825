"""TCP between hosts: a reader asks for a slot and gets its bytes. Plain, and everywhere."""

from __future__ import annotations

import numpy as np

from tidemill.errors import WorkerLost
from tidemill.parallel.channel import Channel
from tidemill.transfer import checksum
from tidemill.transfer.base import TransferError

_ANSWER_S = 10.0  # for a page: an engine that does not answer is given up


class TcpSource:
    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.slots = np.empty((num_slots, page_bytes), np.uint8)  # mapped as it is used

    def offer(self) -> bytes:
        return b""

    def serve(self, channel: Channel) -> None:
        while True:
            slot = int.from_bytes(channel.receive(4), "little")
            if slot >= len(self.slots):
                return
            channel.send_now(self.slots[slot].data)  # waits until the reader takes it: nothing piles up

    def close(self) -> None:
        return


class TcpReader:
    def __init__(self, channel: Channel, page_bytes: int) -> None:
        self._channel, self._page_bytes = channel, page_bytes
        channel.limit(_ANSWER_S)

    def read(self, slot: int, key: bytes, page: np.ndarray) -> bytes:
        try:
            self._channel.send_now(slot.to_bytes(4, "little"))
            arrived = self._channel.receive(self._page_bytes)
        except WorkerLost as error:
            self._channel.abort()  # a late answer would be taken for the next one's
            raise TransferError(f"{self._channel.peer} does not answer") from error
        if len(arrived) != self._page_bytes:
            raise TransferError(f"{self._channel.peer} has sent {len(arrived)} bytes for a page")
        return checksum.copy(page, np.frombuffer(arrived, np.uint8), key)

    def close(self) -> None:
        self._channel.abort()
