"""HTTP connections with bounds: how many there may be, how long headers, the rest of a body and an
idle connection may take, how many bytes they may have, and how long a response may wait for a
client that does not read it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import sys
import time
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.server.http.limits import (
    HEADERS_WITHIN_S,
    KEEP_ALIVE_S,
    KEEP_ALIVE_SPARE_S,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_IDLE_PER_ADDRESS,
    READ_WITHIN_S,
    REST_WITHIN_S,
)
from tidemill.server.http.stopwatch import LOOP, READING, Stopwatch

_MAX_FILES = 2**16  # that this process asks for
_RESERVED_FILES = 256  # which connections leave to engine restarts, workers and storage
_LAST_DATA_MS = struct.Struct("=52xI")  # of Linux' tcp_info
_FEW_MS = 8  # which its clock, of up to 4 ms, cannot tell from none
_CLOSE = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSE
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n" + _CLOSE
_TOO_MANY_OF_YOURS = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\n" + _CLOSE


class Connections:
    """The open connections: a limit of all, and of the idle ones of each address. One address can
    fill half of them at most with idle ones."""

    def __init__(self, max_total: int = MAX_CONNECTIONS) -> None:
        self.max_total = max_total
        self.max_idle = max(min(MAX_IDLE_PER_ADDRESS, max_total // 2), 1)
        self.num_idle: Counter[str] = Counter()  # by address


class BoundedProtocol(HttpToolsProtocol):
    limits = Connections()
    _num_bytes = 0  # besides a body that is being read, since the last of its bytes
    _is_idle = False  # no request is under way
    _in_headers = False
    _in_body = False
    _read_s = 0.0  # when data was read
    _stopwatch: Stopwatch  # of the request that is being read
    _alarm: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if len(self.connections) > self.limits.max_total:
            self._refuse(_TOO_MANY)
        elif self.limits.num_idle[address] >= self.limits.max_idle:
            self._refuse(_TOO_MANY_OF_YOURS)
        else:
            self._set_idle(True)
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_idle(False)
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._read_s = time.monotonic()
        if self._is_idle and not self._in_headers and not self._in_body:
            self._expect_headers()
        self._num_bytes += len(data)
        if (
            self._in_headers
            and self._num_bytes > MAX_HEADER_BYTES
            and b"\r\n\r\n" not in data[:MAX_HEADER_BYTES]
        ):
            self._refuse(_TOO_LARGE)
            return
        super().data_received(data)
        if (
            self._in_headers and self._num_bytes > MAX_HEADER_BYTES
        ):  # empty lines, which the parser takes for nothing
            self._refuse(_TOO_LARGE)
        is_complete = self.cycle is not None and self.cycle.response_complete
        if self._in_body and self._num_bytes > (
            MAX_BODY_BYTES if is_complete else MAX_HEADER_BYTES
        ):
            self.transport.close()  # trailers without end, or a body that nobody wants

    def _refuse(self, response: bytes) -> None:
        self._disarm()
        self.transport.write(response)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stopwatch = Stopwatch(self._read_s, _waited_s(self.transport), self)
        self._stopwatch.enter(READING)
        if not self._in_headers:
            self._expect_headers()

    def on_headers_complete(self) -> Any:
        self._disarm()
        self._set_idle(False)
        self._in_headers, self._in_body, self._num_bytes = False, True, 0
        self.scope["state"]["target"] = self.url  # as it was sent: parsing leaves out parts of it
        self._stopwatch.enter(LOOP)
        self.scope["state"]["stopwatch"] = self._stopwatch
        return super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._num_bytes = False, 0
        self._disarm()
        if self.cycle.response_complete:
            self._arm(KEEP_ALIVE_S + KEEP_ALIVE_SPARE_S)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_idle(self.cycle.response_complete)  # unless another was sent behind it
        if self._in_body and not self.transport.is_closing():
            self._arm(REST_WITHIN_S)

    def num_unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self.transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """The client has left unread as much as may wait for it."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        self._unread = self.loop.call_later(
            READ_WITHIN_S, self._see_reading, self.transport.get_write_buffer_size()
        )

    def _see_reading(self, num_bytes: int) -> None:
        """A client that has taken anything meanwhile is only slow."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _set_idle(self, is_idle: bool) -> None:
        if is_idle != self._is_idle:
            address, num_idle = self.client[0] if self.client else "", self.limits.num_idle
            self._is_idle = is_idle
            num_idle[address] += 1 if is_idle else -1
            if not num_idle[address]:
                del num_idle[address]

    def _expect_headers(self) -> None:
        self._in_headers, self._num_bytes = True, 0
        self._arm(HEADERS_WITHIN_S)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._alarm = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _too_slow(self) -> None:
        self._alarm = None
        if not self.transport.is_closing():
            self.transport.close()


def _waited_s(transport: asyncio.BaseTransport) -> float:
    """Seconds for which the data that was read now has waited for the event loop, where the kernel
    tells. Until a connection is accepted, they wait, too."""
    tcp = transport.get_extra_info("socket")
    if not sys.platform.startswith("linux") or tcp is None or tcp.family == socket.AF_UNIX:
        return 0.0
    try:
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_MS.size)
        waited_ms = _LAST_DATA_MS.unpack(info)[0]
    except (OSError, struct.error):  # it was closed meanwhile, or has none
        return 0.0
    return waited_ms / 1000 if waited_ms >= _FEW_MS else 0.0


def max_connections() -> int:
    """Raises the limit of open files as far as this process may, and leaves some of them in
    reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(
            ValueError, OSError
        ):  # some systems have another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    num_files = _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(min(MAX_CONNECTIONS, num_files - min(_RESERVED_FILES, num_files // 2)), 1)
