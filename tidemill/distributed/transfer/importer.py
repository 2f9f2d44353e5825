"""Importer: what other engines have announced, and their pages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from tidemill.distributed.channel import Address, Channel, connect
from tidemill.distributed.transfer import checksum
from tidemill.distributed.transfer.base import (
    MAX_KEY,
    MAX_MESSAGE,
    MAX_NEWS,
    MAX_SLOTS,
    NEWS,
    PAGES,
    Ask,
    Hello,
    Identity,
    News,
    Reader,
    Refusal,
    TransferError,
    Welcome,
    check_same,
)
from tidemill.errors import ConfigError, PeerMismatch, TidemillError, WorkerLost

_LOOK_S = 0.001  # between two looks whether something was announced
_AGAIN_S = 0.2  # between two tries to reach an engine
_SLOW_S = 5.0  # if it has other pages
_SILENT_S = 30.0  # without a message, an engine is given up
# after these it is tried again
_LEFT_ALONE = (TidemillError, TransferError, OSError, msgspec.MsgspecError)


class Learned(NamedTuple):
    """The changes since they were taken last."""

    slots: list[tuple[int, bytes]]  # places, and the contents they hold now; empty: nothing
    erased: list[bytes]  # contents that are worthless
    problems: list[str]  # why an engine is not used


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine, as it is given in the options."""

    name: str
    address: Address
    key: bytes
    make_reader: Callable[[Channel, Welcome], Reader]


@dataclass(slots=True)
class _Link:
    """The known state of a peer. Places of its slots begin with `first`."""

    peer: Peer
    first: int
    num_slots: int = 0
    slots: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # key and checksum
    reader: Reader | None = None
    news: Channel | None = None
    problem: str = ""
    # a page that others know was not announced in time, and nothing has been since
    is_late: bool = False
    pause_s: float = _AGAIN_S  # before the next try


class Importer:
    def __init__(
        self, peers: Sequence[Peer], identity: Identity, page_bytes: int, patience_s: float = 0.0
    ) -> None:
        """Raises PeerMismatch if a peer can be reached now and has other pages. Those that cannot
        are tried again, for ever. `patience_s`: for which a fetch waits for the announcement of its
        page, which others may have had before."""
        self._identity, self._page_bytes, self._patience_s = dict(identity), page_bytes, patience_s
        self._links = [_Link(peer, number * MAX_SLOTS) for number, peer in enumerate(peers)]
        self._lock = threading.Lock()
        self._changed: dict[int, bytes] = {}  # by place; not taken yet
        self._erased: dict[bytes, None] = {}
        self._problems: list[str] = []
        self._closing = threading.Event()
        # a file descriptor, readable when there is something to take
        self.alarm, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        os.set_blocking(self.alarm, False)
        try:
            for link in self._links:
                self._try(link)
        except PeerMismatch:
            self.close()
            raise
        self._threads = [
            threading.Thread(target=self._follow, args=(link,), name="kv-import", daemon=True)
            for link in self._links
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> Learned | None:
        """None: nothing has changed."""
        try:
            os.read(self.alarm, 4096)
        except BlockingIOError:
            return None
        with self._lock:
            learned = Learned(list(self._changed.items()), list(self._erased), self._problems)
            self._changed, self._erased, self._problems = {}, {}, []
        return learned

    def fetch(self, place: int, key: bytes, page: np.ndarray) -> None:
        """Into `page`, which holds nothing of use if this raises TransferError."""
        link, slot = self._links[place // MAX_SLOTS], place % MAX_SLOTS
        until = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                reader, entry = link.reader, link.slots.get(slot)
                found = entry is not None and entry[0] == key
            if found or reader is None or link.is_late or self._closing.wait(_LOOK_S):
                break
            link.is_late = time.monotonic() >= until
        if reader is None:
            raise TransferError(f"{link.peer.name} is gone")
        if entry is None or entry[0] != key:
            raise TransferError(f"{link.peer.name} does not have the page any more")
        if reader.read(slot, key, page) != entry[1]:
            raise TransferError(f"a page of {link.peer.name} was overwritten or damaged")

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            open_ = [link.news for link in self._links if link.news is not None]
        for channel in open_:
            channel.abort()
        for thread in getattr(self, "_threads", ()):
            thread.join(_SILENT_S)
        for link in self._links:
            self._lose(link)
        os.close(self.alarm)
        os.close(self._alarm)

    # ---- a thread for each peer

    def _follow(self, link: _Link) -> None:
        while not self._closing.is_set():
            try:
                if link.news is None:
                    self._try(link)
                if link.news is not None:
                    self._listen(link, link.news)
            except PeerMismatch as error:
                self._note_problem(link, str(error))
                self._closing.wait(_SLOW_S)
            except WorkerLost:
                self._note_problem(link, f"{link.peer.name} is gone")
            except (TransferError, OSError, msgspec.MsgspecError) as error:
                self._note_failure(link, error)
            self._lose(link)
            self._closing.wait(link.pause_s)

    def _try(self, link: _Link) -> None:
        """Connect, if the peer is there."""
        try:
            news, _ = self._greet(link.peer, NEWS)
        except PeerMismatch:
            raise
        except _LEFT_ALONE as error:  # it is not there yet, or has another key
            if "another key" in str(error):
                self._note_problem(link, str(error))
            return
        try:
            link.reader, num_slots = self._make_reader(link.peer)
        except BaseException as error:
            _end(news)
            if isinstance(error, PeerMismatch) or not isinstance(error, _LEFT_ALONE):
                raise
            self._note_failure(link, error)
            return
        link.news, link.num_slots, link.problem = news, num_slots, ""

    def _make_reader(self, peer: Peer) -> tuple[Reader, int]:
        """Makes a reader; returns it and how many slots it can read."""
        channel, welcome = self._greet(peer, PAGES)
        try:
            return peer.make_reader(channel, welcome), welcome.num_slots
        except BaseException:
            _end(channel)
            raise

    def _greet(self, peer: Peer, purpose: str) -> tuple[Channel, Welcome]:
        channel = connect(peer.address, peer.key, peer.name, 0.0)
        try:
            channel.limit(_SILENT_S)
            channel.send_now(msgspec.msgpack.encode(Hello(self._identity, purpose)))
            answer = msgspec.msgpack.decode(channel.receive(MAX_MESSAGE), type=Welcome | Refusal)
            if isinstance(answer, Refusal):
                check_same(self._identity, answer.identity, peer.name)
                raise PeerMismatch(f"{peer.name} refuses this engine.", param="kv_import")
            if not 0 < answer.num_slots <= MAX_SLOTS or answer.page_bytes != self._page_bytes:
                raise PeerMismatch(
                    f"{peer.name} has {answer.num_slots} slots of {answer.page_bytes} bytes; pages here have {self._page_bytes}.",
                    param="kv_import",
                )
        except BaseException:
            _end(channel)
            raise
        return channel, answer

    def _listen(self, link: _Link, channel: Channel) -> None:
        since = 0
        while not self._closing.is_set():
            channel.send_now(msgspec.msgpack.encode(Ask(since)))
            news = msgspec.msgpack.decode(channel.receive(MAX_MESSAGE), type=News)
            self._check(link, news)
            link.pause_s, link.is_late = _AGAIN_S, False
            since = news.until
            self._learn(link, news)

    def _check(self, link: _Link, news: News) -> None:
        """Checks what a peer says: it takes a bounded amount of memory, and names slots that can
        be."""
        if (
            len(news.slots) > MAX_NEWS
            or len(news.erased) > MAX_NEWS
            or len(self._erased) > MAX_SLOTS
        ):
            raise TransferError("it announces too much at once")
        for change in news.slots:
            has_sum = len(change.checksum) in (0, checksum.BYTES)
            if not 0 <= change.slot < link.num_slots or len(change.key) > MAX_KEY or not has_sum:
                raise TransferError("it announces what cannot be")
        if any(not 0 < len(key) <= MAX_KEY for key in news.erased):
            raise TransferError("it erases what cannot be")

    def _learn(self, link: _Link, news: News) -> None:
        if not news.slots and not news.erased:
            return
        with self._lock:
            for change in news.slots:
                if change.key:
                    link.slots[change.slot] = change.key, change.checksum
                else:
                    link.slots.pop(change.slot, None)
                self._changed[link.first + change.slot] = change.key
            self._erased.update(dict.fromkeys(news.erased))
        self._ring()

    def _lose(self, link: _Link) -> None:
        """The peer is gone, and so is what it announced."""
        with self._lock:
            self._changed.update((link.first + slot, b"") for slot in link.slots)
            link.slots.clear()
            news, reader, link.news, link.reader = link.news, link.reader, None, None
        if news is not None:
            _end(news)
        if reader is not None:
            reader.close()
            self._ring()

    def _note_failure(self, link: _Link, error: BaseException) -> None:
        """The peer is there, but cannot be used; the next try comes later than the one before."""
        if not isinstance(error, WorkerLost | ConfigError):
            self._note_problem(link, f"{link.peer.name}: {error}")
        link.pause_s = min(2 * link.pause_s, _SLOW_S)

    def _note_problem(self, link: _Link, why: str) -> None:
        """Once, until it is another one."""
        if why != link.problem and not self._closing.is_set():
            link.problem = why
            with self._lock:
                self._problems.append(why)
            self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it is readable already
            os.write(self._alarm, b"!")


def _end(channel: Channel) -> None:
    """Now, also for whoever waits for it."""
    channel.abort()
    channel.close()
