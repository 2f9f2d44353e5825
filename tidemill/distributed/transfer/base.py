"""The messages between engines that move pages, and the interface of transports.

exporter                                     importer
slots of one page each                       asks what slots hold, again and again; fetches what it lacks
slot 7: key, checksum   --- announced --->   content key -> slot 7 of this engine
bytes of slot 7         <---- read ------    into a page; its sum must be the announced one

A slot is used anew when another page needs it. Nobody locks it: who reads it meanwhile gets another
sum, and computes the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from tidemill.distributed.channel import Channel
from tidemill.errors import PeerMismatch, TidemillError

PROTOCOL = "1"
NEWS, PAGES = "news", "pages"  # what a connection is for
MAX_SLOTS = 2**20  # of an engine
MAX_NEWS = 4096  # slots in a message
MAX_MESSAGE = 2**20  # bytes of a message, without pages
MAX_KEY = 34  # bytes
Identity = Mapping[str, str]  # all that the bytes of a page depend on besides its tokens, by name


class TransferError(Exception):
    """A page could not be fetched. The message says why."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the importer, when it is connected."""

    identity: dict[str, str]
    purpose: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    num_slots: int
    page_bytes: int
    offer: bytes  # of the transport


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The engine has other pages."""

    identity: dict[str, str]


class Ask(msgspec.Struct, frozen=True):
    """A request for the changes after this number."""

    since: int


class SlotNews(msgspec.Struct, frozen=True, gc=False):
    slot: int
    key: bytes  # empty: it holds nothing
    checksum: bytes


class News(msgspec.Struct, frozen=True):
    """Empty if nothing changed for a while."""

    until: int  # its number
    slots: list[SlotNews]
    erased: list[bytes]  # contents that turned out to be worthless


class Source(Protocol):
    """The exporter's end of a transport: where the slots are, and how others get at them."""

    slots: np.ndarray  # uint8 [slots, bytes of a page]

    def offer(self) -> bytes:
        """The offer that a reader must know."""
        ...

    def serve(self, channel: Channel) -> None:
        """One reader, in a thread of its own, until it is gone."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The importer's end."""

    def read(self, slot: int, key: bytes, page: np.ndarray) -> bytes:
        """Into a page. Returns the checksum of what arrived there."""
        ...

    def close(self) -> None: ...


def check_same(own: Identity, theirs: Identity, peer: str) -> None:
    """Raises PeerMismatch if pages of the two are not the same."""
    differs = [
        f"{name} ({theirs.get(name, 'none')[:40]}, here {own.get(name, 'none')[:40]})"
        for name in sorted({*own, *list(theirs)[:32]})
        if own.get(name) != theirs.get(name)
    ]
    if differs:
        raise PeerMismatch(
            f"KV pages cannot be exchanged with {peer}: it has another {', another '.join(differs)}.",
            fix="Start both engines on machines of one kind, with the same version, model and options of the KV cache.",
            param="kv_import",
        )


def unavailable(kind: str, why: str) -> TidemillError:
    return PeerMismatch(
        f"{kind} is not available: {why}.",
        fix="Use shm: on one host or tcp: between hosts.",
        param="kv_export",
    )
