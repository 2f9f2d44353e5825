"""HTTP connections that may not dawdle: what is not a body that somebody reads is bounded in bytes and in time, and so is how
long an answer may lie unread."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.server.body import MAX_BODY_BYTES

MAX_HEADER_BYTES = 64 * 1024
HEADERS_WITHIN_S = 10.0
REST_WITHIN_S = 5.0  # of a body that was answered before it was all there
READ_WITHIN_S = 60.0  # some of an answer, by a client who is behind
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    _num_bytes = 0  # that were no part of a body somebody reads, since the last that were
    _in_headers = False
    _in_body = False
    _alarm: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._in_headers and self._num_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data[:MAX_HEADER_BYTES]:
            self._refuse()
            return
        super().data_received(data)
        if self._in_headers and self._num_bytes > MAX_HEADER_BYTES:  # empty lines, which the parser takes for nothing
            self._refuse()
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self._in_body and self._num_bytes > (MAX_BODY_BYTES if is_answered else MAX_HEADER_BYTES):
            self.transport.close()  # trailers without end, or a body that nobody wants

    def _refuse(self) -> None:
        self._disarm()
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            self._expect_headers()

    def on_headers_complete(self) -> Any:
        self._disarm()
        self._in_headers, self._in_body, self._num_bytes = False, True, 0
        return super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._num_bytes = False, 0
        self._disarm()
        if self.cycle.response_complete:
            self._expect_headers()  # of the next request
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._arm(REST_WITHIN_S)

    def pause_writing(self) -> None:
        """The client has left unread as much as may wait for it."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        self._unread = self.loop.call_later(READ_WITHIN_S, self._see_reading, self.transport.get_write_buffer_size())

    def _see_reading(self, num_bytes: int) -> None:
        """Whoever has taken anything meanwhile is only slow."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

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
