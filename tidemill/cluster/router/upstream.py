"""A server behind the router: its connections, its load, and whether it may be sent requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tidemill.errors import ConfigError

CONNECT_WITHIN_S = 5.0
MAX_IDLE = 512  # connections that are kept to one upstream
IDLE_S = 60.0  # for which one is kept; servers keep them longer
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 30.0
MAX_RESPONSE_HEAD = 256 * 1024
_JOINED_BYTES = 2**16
# a host that is gone is noticed in a minute
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
# Between two hosts, not for whoever is behind them.
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip

Headers = list[tuple[bytes, bytes]]  # names in lower case


class Sink(Protocol):
    """Who gets a response. After `ended` or `broken` nothing more comes."""

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        """`headers`: those that are passed on, without a length; `length`: of the body, None if
        only its end will tell."""

    def body(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """All that has arrived was handed over, and more will come."""

    def ended(self) -> None: ...

    def broken(self, why: str) -> None:
        """The connection was lost, or what came is not HTTP."""


class Upstream:
    """`url`: http://HOST:PORT, https://HOST:PORT or unix:PATH."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._unix, self._tls = "", None
        if url.startswith("unix:"):
            self._unix, self.host = url.removeprefix("unix:").removeprefix("//"), b"localhost"
            if not self._unix:
                raise _not_an_address(url)
        else:
            try:
                parts = urlsplit(self.url)
                port = parts.port
            except ValueError:
                raise _not_an_address(url) from None
            is_plain = not (
                parts.path or parts.query or parts.fragment or parts.username or parts.password
            )
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or not is_plain
                or re.search(r"[\x00-\x20\x7f]", url)
            ):
                raise _not_an_address(url)
            self._address = parts.hostname, port or (443 if parts.scheme == "https" else 80)
            self._tls = ssl.create_default_context() if parts.scheme == "https" else None
            self.host = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self.load = 0  # requests under way
        self.num_requests = self.num_failures = 0  # in all
        self.is_healthy = False  # by the checks; one that was not checked yet is not
        self.is_leaving = False  # gets nothing new
        self.why = "it was not checked yet"  # if it is not healthy
        self.models: frozenset[str] | None = None  # their names; None: not known
        self.retry_s = 0.0  # it is sent nothing before
        self._back_off_s = 0.0
        self._idle: list[Connection] = []
        self.under_way: set[Connection] = set()

    @property
    def is_usable(self) -> bool:
        return (
            self.is_healthy
            and not self.is_leaving
            and (not self.retry_s or time.monotonic() >= self.retry_s)
        )

    def failed(self, why: str, for_s: float | None = None) -> None:
        """A request failed: it is sent nothing for a while, which doubles each time until one
        succeeds. `for_s`: it said so."""
        self.num_failures += 1
        if for_s is None:
            self._back_off_s = for_s = min(
                max(2 * self._back_off_s, FIRST_BACK_OFF_S), MAX_BACK_OFF_S
            )
            self.why = why
        self.retry_s = time.monotonic() + for_s

    def succeeded(self) -> None:
        self._back_off_s = self.retry_s = 0.0

    # ---- connections

    def idle_connection(self) -> Connection | None:
        oldest_s = time.monotonic() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.used_s >= oldest_s:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                if self._unix:
                    _, connection = await loop.create_unix_connection(
                        lambda: Connection(self), self._unix
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: Connection(self), *self._address, ssl=self._tls
                    )
        except TimeoutError as error:
            raise OSError(f"no connection in {CONNECT_WITHIN_S:g} s") from error
        return connection

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) < MAX_IDLE and not self.is_leaving:
            connection.used_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    def lost(self, connection: Connection) -> None:
        self.under_way.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in (*self._idle, *self.under_way):
            connection.close()
        self._idle.clear()


def _not_an_address(url: str) -> ConfigError:
    return ConfigError(
        f"The upstream is {url!r}.",
        fix="Write it like http://HOST:PORT, or unix:PATH for a socket.",
        param="url",
    )


def _keep_alive(connected: socket.socket) -> None:
    """Sets TCP keepalive, so that the loss of a host is noticed though nothing is to be sent to it."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection(asyncio.Protocol):
    """To an upstream: one request at a time. The response goes to the request's sink as it comes,
    piece by piece."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.is_open = False
        self.used_s = 0.0
        self.is_reused = False  # had a request before this one
        self.may_be_kept = True
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._is_head = False  # the request's method, whose response has no body
        self._expect_response()

    def _expect_response(self) -> None:
        self._headers: Headers = []
        self._head_bytes = 0
        self._is_chunked = self._is_over = self._keeps_alive = False
        self._length: int | None = None
        self._in_body = False

    # ---- requests

    def send(self, request: bytes, body: bytes, sink: Sink, is_head: bool = False) -> None:
        self._sink, self._is_head = sink, is_head
        self._expect_response()
        self.upstream.under_way.add(self)
        if len(body) < _JOINED_BYTES:  # one system call
            self._transport.write(request + body)
        else:
            self._transport.write(request)
            self._transport.write(body)

    def close(self) -> None:
        """Whatever is under way; its sink hears nothing more."""
        self._sink = None
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def pause(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    # ---- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has classes of its own
        self._transport, self.is_open = cast(asyncio.Transport, transport), True
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            _keep_alive(connected)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.upstream.lost(self)
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if self._in_body and self._length is None and not self._is_chunked and exc is None:
            sink.ended()  # the end of the connection is that of the body
        else:
            sink.broken(f"the connection ended: {exc}" if exc else "the connection ended")

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # nobody asked
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"its response is not valid HTTP: {error.__context__ or error}")
            return
        except httptools.HttpParserUpgrade:
            self._break("it switches protocols")
            return
        sink = self._sink
        if sink is None:
            return
        if self._is_over:
            self._end(sink)
        else:
            sink.flush()

    def _end(self, sink: Sink) -> None:
        self._sink = None
        self.upstream.under_way.discard(self)
        if (
            self.may_be_kept
            and self._keeps_alive
            and not self._is_head
            and not self._transport.is_closing()
        ):
            self.is_reused = True
            self.upstream.give_back(self)
        else:
            self.close()
        sink.ended()

    def _break(self, why: str) -> None:
        sink, self._sink = self._sink, None
        self.close()
        if sink is not None:
            sink.broken(why)

    # ---- the parser

    def on_message_begin(self) -> None:
        if self._is_over:
            raise ValueError("there is more than one")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # trailers are not passed on
            return
        name = name.lower()
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_RESPONSE_HEAD:
            raise ValueError("its headers are too long")
        if name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._is_chunked = True
        elif name not in HOP_BY_HOP:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._in_body = True
        if self._sink is not None:
            length = None if self._is_chunked else self._length
            self._sink.head(status, self._headers, 0 if status in (204, 304) else length)
        if self._is_head:
            self._is_over = True

    def on_body(self, body: bytes) -> None:
        if self._sink is not None and not self._is_head:
            self._sink.body(body)

    def on_message_complete(self) -> None:
        if self._in_body:
            self._is_over, self._keeps_alive = True, self._parser.should_keep_alive()
        else:  # 1xx
            self._expect_response()
