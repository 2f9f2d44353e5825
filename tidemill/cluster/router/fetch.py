"""Requests of the router itself to an upstream: health checks, lists of models, who has what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.cluster.router.upstream import Headers, Upstream

MAX_BYTES = 16 * 2**20


@dataclass(slots=True)
class Fetched:
    """A whole response."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""


class _Fetch:
    """A `Sink` that collects the response."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._fetched = Fetched()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        self._fetched.status, self._fetched.headers = status, headers

    def body(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_BYTES:
            self._parts.append(data)

    def flush(self) -> None:
        if self._num_bytes > MAX_BYTES and not self.done.done():
            self.done.set_exception(OSError("its response is too large"))

    def ended(self) -> None:
        self._fetched.body = b"".join(self._parts)
        if not self.done.done():
            self.done.set_result(self._fetched)

    def broken(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(why))


async def fetch(
    upstream: Upstream,
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes = b"",
) -> Fetched:
    """Raises OSError. On a connection of its own, so that nothing depends on what others have left."""
    connection = await upstream.connect()
    connection.may_be_kept = False
    try:
        lines = [
            b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n" % (method, target, upstream.host)
        ]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method != b"GET":
            lines.append(b"content-length: %d\r\n" % len(body))
        sink = _Fetch()
        connection.send(b"".join([*lines, b"\r\n"]), body, sink, method == b"HEAD")
        return await sink.done
    finally:
        connection.close()
