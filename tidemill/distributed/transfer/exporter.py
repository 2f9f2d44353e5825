"""Exporter: slots with pages that other engines may fetch, and what is in them, told to whoever
asks."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile

import msgspec
import numpy as np

from tidemill.distributed.channel import Channel, Door
from tidemill.distributed.transfer import checksum
from tidemill.distributed.transfer.base import (
    MAX_MESSAGE,
    MAX_NEWS,
    NEWS,
    Ask,
    Hello,
    Identity,
    News,
    Refusal,
    SlotNews,
    Source,
    Welcome,
    check_same,
)
from tidemill.errors import TidemillError, WorkerLost

# connections, two of each engine; also those that have not shown yet that they know the key
_MOST_READERS = 64
_MOST_UNPROVEN = 8  # of those, from one other host
_PROVE_S = 2.0  # for a handshake
_MOST_ERASED = 1024  # contents that are remembered as worthless
_QUIET_S = 5.0  # then there is a message without news: who is gone is noticed
_GATHER_S = 0.0005  # after a change, for others that come with it
_PATIENCE_S = 0.25  # with readers that are slow
_LOOK_S = 0.2


class Journal:
    """The contents of slots, each with the number of its latest change. Whoever asks gets what
    changed after a number, so that nothing piles up for a reader that is slow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        # the latest change last
        self._slots: OrderedDict[int, tuple[int, SlotNews]] = OrderedDict()
        self._erased: deque[tuple[int, bytes]] = deque(maxlen=_MOST_ERASED)
        # by reader: up to which number it knows all, and since when not more
        self._known: dict[Channel, tuple[int, float]] = {}
        self.is_closed = False

    def put(self, slot: int, key: bytes, sum_: bytes, erased: bytes = b"") -> int:
        """Returns the number of this change."""
        with self._changed:
            for reader in [
                reader for reader, (known, _) in self._known.items() if known == self._number
            ]:
                self._known[reader] = self._number, time.monotonic()
            self._number += 1
            self._slots[slot] = self._number, SlotNews(slot, key, sum_)
            self._slots.move_to_end(slot)
            if erased:
                self._erased.append((self._number, erased))
            self._changed.notify_all()
            return self._number

    def is_known(self, number: int) -> bool:
        """All readers know what changed up to this number, but those that have not asked for a
        while."""
        long_ago = time.monotonic() - _PATIENCE_S
        with self._changed:
            return all(known >= number or since < long_ago for known, since in self._known.values())

    def knows(self, reader: Channel, number: int | None) -> None:
        """None: it is gone."""
        with self._changed:
            if number is None:
                self._known.pop(reader, None)
            else:
                self._known[reader] = number, time.monotonic()

    def after(self, number: int, wait_s: float) -> News:
        """The earliest changes first, not too many at once."""
        with self._changed:
            has_changed = self._changed.wait_for(
                lambda: self._number > number or self.is_closed, wait_s
            )
        if has_changed and wait_s:
            time.sleep(_GATHER_S)
        with self._changed:
            news = list(
                takewhile(lambda change: change[0] > number, reversed(self._slots.values()))
            )[::-1]
            until = self._number if len(news) <= MAX_NEWS else news[MAX_NEWS - 1][0]
            erased = [key for at, key in self._erased if number < at <= until]
            return News(until, [slot for _, slot in news[:MAX_NEWS]], erased)

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class Exporter:
    def __init__(
        self,
        source: Source,
        door: Door,
        identity: Identity,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`door`: where importers come. `on_close`: called last."""
        self._source, self._door, self._identity, self._on_close = (
            source,
            door,
            dict(identity),
            on_close,
        )
        self.journal = Journal()
        self._readers: set[socket.socket] = set()
        # by host: connections that have not shown yet that they know the key
        self._unproven: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name="kv-door", daemon=True)
        self._acceptor.start()

    @property
    def num_slots(self) -> int:
        return len(self._source.slots)

    def write(self, slot: int, key: bytes, page: np.ndarray) -> int:
        """The page's content goes into the slot, and is announced. Until then, the sum of what was
        there before is wrong. Returns a number for `is_known`."""
        return self.journal.put(slot, key, checksum.copy(self._source.slots[slot], page, key))

    def erase(self, slot: int, key: bytes) -> None:
        """Erases a slot: its content is worthless, also to those who have fetched it."""
        self.journal.put(slot, b"", b"", erased=key)

    def is_known(self, number: int) -> bool:
        """Importers know of what `write` gave this number, unless they are slow."""
        return self.journal.is_known(number)

    def close(self) -> None:
        self.journal.close()
        self._door.close()
        self._acceptor.join()
        with self._lock:
            for reader in self._readers:
                with suppress(OSError):  # it is gone
                    reader.shutdown(socket.SHUT_RDWR)
        self._source.close()
        self._on_close()

    # ---- threads

    def _accept(self) -> None:
        while not self.journal.is_closed:
            reader = self._door.answer(_LOOK_S)
            if reader is None:
                continue
            host = _host(reader)
            with self._lock:
                if len(self._readers) >= _MOST_READERS or (
                    host and self._unproven[host] >= _MOST_UNPROVEN
                ):
                    reader.close()
                    continue
                self._readers.add(reader)
                self._unproven[host] += 1
            threading.Thread(
                target=self._let_in, args=(reader, host), name="kv-export", daemon=True
            ).start()

    def _let_in(self, reader: socket.socket, host: str) -> None:
        try:
            try:
                channel = self._door.prove(reader, "an engine that imports", _PROVE_S)
            finally:
                with self._lock:
                    self._unproven[host] -= 1
                    self._unproven += Counter()  # without those that are 0
            if channel is not None:
                self._serve(channel)
        finally:
            with self._lock:
                self._readers.discard(reader)
                reader.close()

    def _serve(self, channel: Channel) -> None:
        try:
            channel.limit(10.0)
            hello = msgspec.msgpack.decode(channel.receive(MAX_MESSAGE), type=Hello)
            try:
                check_same(self._identity, hello.identity, channel.peer)
            except TidemillError:
                channel.send_now(msgspec.msgpack.encode(Refusal(self._identity)))
                return
            num, size = self._source.slots.shape
            channel.send_now(msgspec.msgpack.encode(Welcome(num, size, self._source.offer())))
            channel.limit(0.0)
            if hello.purpose == NEWS:
                self._tell(channel)
            else:
                self._source.serve(channel)
        except (WorkerLost, OSError, msgspec.MsgspecError):
            pass  # it is gone, or is not one of ours
        finally:
            channel.abort()
            channel.close()
            self.journal.knows(channel, None)

    def _tell(self, channel: Channel) -> None:
        while not self.journal.is_closed:
            ask = msgspec.msgpack.decode(channel.receive(64), type=Ask)
            self.journal.knows(channel, ask.since)
            channel.send_now(msgspec.msgpack.encode(self.journal.after(ask.since, _QUIET_S)))


def _host(reader: socket.socket) -> str:
    """Empty: this one, through a socket that only its user can open; or nobody is there any more."""
    with suppress(OSError):
        return reader.getpeername()[0] if reader.family == socket.AF_INET else ""
    return ""
