"""Connections of clients: HTTP/1.1 in, one request at a time to the router, responses out.

Everything a client sends is bounded in bytes and in time, and what goes on to a server is written
anew: no client decides how an upstream sees where requests end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
import msgspec

from tidemill.cluster.router.request import MAX_CACHED_HEAD_BYTES, CachedHead, Request
from tidemill.cluster.router.upstream import Headers
from tidemill.errors import Draining, InvalidRequest, QueueFull, RequestTooLarge, TidemillError
from tidemill.server.http.access import Caller
from tidemill.server.http.errors import error_body, format_error, headers_of
from tidemill.server.http.limits import (
    BODY_WITHIN_S,
    HEADERS_WITHIN_S,
    KEEP_ALIVE_S,
    KEEP_ALIVE_SPARE_S,
    MAX_BODY_BYTES,
    MAX_BUFFERED_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_OPEN_BODY_BYTES,
    MAX_PIPELINED,
    MAX_UPLOAD_BYTES,
    PART_WITHIN_S,
    READ_WITHIN_S,
    REST_WITHIN_S,
)
from tidemill.server.http.target import path_of

_SWEEP_EVERY_S = 1.0
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HeadersTooLarge(InvalidRequest):
    status = 431


class Timeout(InvalidRequest):
    status = 408


class Job(Protocol):
    """A request that is being answered."""

    def client_left(self) -> None: ...

    def pause(self) -> None:
        """The client does not keep up with the response."""

    def resume(self) -> None: ...


class ClientConnections:
    """All connections of clients."""

    def __init__(
        self,
        admit: Callable[[Request], Caller],
        handle: Callable[[ClientConnection, Request], Job | None],
        max_connections: int,
        has_keys: bool = False,
    ) -> None:
        """`admit`: who sends a request, by its headers, or why it is refused; asked before a body
        is taken. `handle`: answers a request through its connection, now or later; it returns what
        does so later. `has_keys`: callers without a tenant may use some paths only."""
        self.admit, self.handle, self.max_connections, self.has_keys = (
            admit,
            handle,
            max_connections,
            has_keys,
        )
        self.max_idle = max(max_connections // 2, 1)  # of one address
        self.all: set[ClientConnection] = set()
        self.num_idle: Counter[str] = Counter()  # by address: without a request under way
        self.num_buffered = 0  # bytes
        self.is_draining = False
        self._sweeping: asyncio.TimerHandle | None = None

    def make(self) -> ClientConnection:
        return ClientConnection(self)

    def sweep(self) -> None:
        """Close what is too slow; again every second. One timer for all costs less than one for
        each request."""
        now = time.monotonic()
        for client in [each for each in self.all if each.deadline_s <= now]:
            client.too_slow()
        self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_EVERY_S, self.sweep)

    def drain(self) -> None:
        self.is_draining = True
        for client in list(self.all):
            client.close_if_idle()

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for client in list(self.all):
            client.abort()


class ClientConnection(asyncio.Protocol):
    def __init__(self, clients: ClientConnections) -> None:
        self._clients = clients
        self._parser = httptools.HttpRequestParser(self)
        self._job: Job | None = None  # the request that is being answered
        self._is_busy = False
        self._is_idle = False  # as counted
        self._queue: deque[Request] = deque()
        self._is_broken = False  # nothing more is read
        self._is_closed = False
        self._is_paused = False
        self._unread = 0
        # the head of a request that this connection has had
        self._cached_head: CachedHead | None = None
        self._head = b""  # of the request that is being parsed, if it came in one piece
        self.deadline_s = float("inf")
        self._expect_head()

    def _expect_head(self) -> None:
        self._request: Request | None = None
        self._in_head, self._num_head = True, 0
        self._body = bytearray()
        self._num_body = self._max_body = 0
        self._body_until_s = 0.0

    # ---- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        clients = self._clients
        clients.all.add(self)
        if len(clients.all) > clients.max_connections:
            self._turn_away(
                Draining("There are too many connections.", fix="Try again in a moment.")
            )
        elif clients.num_idle[self.address] >= clients.max_idle:
            self._turn_away(
                QueueFull(
                    "This address has too many idle connections.", fix="Use the ones there are."
                )
            )
        else:
            self._set_idle(True)
            self.deadline_s = time.monotonic() + HEADERS_WITHIN_S

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._set_idle(False)
        self._clients.all.discard(self)
        self._clients.num_buffered -= self._num_body + sum(
            len(request.body) for request in self._queue
        )
        self._queue.clear()
        if self._is_busy:
            self._give_body_back()
        job, self._job = self._job, None
        if job is not None:
            job.client_left()

    def eof_received(self) -> bool:
        return False  # a client that sends no more wants no answer either

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        if self._in_head:
            if not self._num_head and self._request is None:
                if self._take_with_cached_head(data):
                    return
                self._head = data[: data.find(b"\r\n\r\n", 0, MAX_CACHED_HEAD_BYTES) + 4]
            if not self._num_head and not self._is_busy:
                self._expect_by(time.monotonic() + HEADERS_WITHIN_S)
            self._num_head += len(data)
        else:
            self._expect_by(min(time.monotonic() + PART_WITHIN_S, self._body_until_s))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, TidemillError):
                raise
            self._refuse(cause)
        except httptools.HttpParserUpgrade:
            # the request is answered in HTTP/1.1, and what may follow in another protocol is not
            # read
            self._is_broken = True
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"This is not valid HTTP: {error}."))
        else:
            if self._in_head and self._num_head > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge(f"The headers may have {MAX_HEADER_BYTES} bytes."))

    def _take_with_cached_head(self, data: bytes) -> bool:
        """A whole request with a head that was parsed before."""
        if (
            self._cached_head is None
            or self._is_busy
            or self._is_paused
            or (request := self._cached_head.read(data)) is None
        ):
            return False
        clients, num_bytes = self._clients, len(request.body)
        if (
            num_bytes > self._cached_head.max_body
            or clients.num_buffered + num_bytes > MAX_BUFFERED_BYTES
        ):
            return False  # the parser's path says why not
        clients.num_buffered += num_bytes
        self.deadline_s = float("inf")
        self._set_idle(False)
        self._begin(request)
        return True

    def _expect_by(self, deadline_s: float) -> None:
        """Unless it is behind with reading, which has a deadline of its own."""
        if not self._is_paused:
            self.deadline_s = deadline_s

    def pause_writing(self) -> None:
        self._is_paused, self._unread = True, self._transport.get_write_buffer_size()
        self.deadline_s = time.monotonic() + READ_WITHIN_S
        if self._job is not None:
            self._job.pause()

    def resume_writing(self) -> None:
        self._is_paused = False
        self.deadline_s = float("inf")
        if self._job is not None:
            self._job.resume()
        elif self._queue:
            self._next()

    def too_slow(self) -> None:
        """Its deadline has passed."""
        if self._is_paused and self._transport.get_write_buffer_size() < self._unread:
            self._unread = self._transport.get_write_buffer_size()  # slow, but it reads
            self.deadline_s = time.monotonic() + READ_WITHIN_S
        elif self._is_paused or self._is_broken or (self._in_head and not self._num_head):
            self.abort()
        else:
            self._refuse(Timeout("The request did not arrive in time."))

    def _set_idle(self, is_idle: bool) -> None:
        if is_idle != self._is_idle:
            self._is_idle, num_idle = is_idle, self._clients.num_idle
            num_idle[self.address] += 1 if is_idle else -1
            if not num_idle[self.address]:
                del num_idle[self.address]

    def close_if_idle(self) -> None:
        if not self._is_busy and self._in_head and not self._num_head:
            self._transport.close()

    def abort(self) -> None:
        if not self._is_closed:
            self._transport.abort()

    # ---- the parser

    def on_message_begin(self) -> None:
        if len(self._queue) >= MAX_PIPELINED:
            raise QueueFull(
                f"More than {MAX_PIPELINED} requests wait on this connection.",
                fix="Read the responses first.",
            )
        self._request = Request(self.address)
        self._headers = self._request.headers

    def on_url(self, url: bytes) -> None:
        assert self._request is not None
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))
            return
        self._num_head += len(name) + len(value)  # trailers have no effect
        if self._num_head > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"The trailers may have {MAX_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        request, parser = self._request, self._parser
        head, self._head = self._head, b""  # the next request in the same piece has another
        assert request is not None
        if (
            self._num_head > MAX_HEADER_BYTES
            and sum(len(a) + len(b) + 4 for a, b in request.headers) > MAX_HEADER_BYTES
        ):
            raise HeadersTooLarge(f"The headers may have {MAX_HEADER_BYTES} bytes.")
        if len(request.headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"There may be {MAX_HEADERS} headers.")
        request.method, version = parser.get_method(), parser.get_http_version()
        request.is_http10 = version == "1.0"
        request.keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        if version not in ("1.0", "1.1"):
            raise InvalidRequest("Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        if request.method not in _METHODS:
            raise InvalidRequest("The method of the request is not one that is served here.")
        request.path = path_of(request.target)
        self._in_head, self._num_head = False, 0
        self._max_body = MAX_UPLOAD_BYTES if request.path == "/v1/files" else MAX_BODY_BYTES
        if request.method == b"OPTIONS":
            self._max_body = 0  # a preflight has no key, so nothing is kept of it
        request.first = first = dict(reversed(request.headers))
        length = int(first.get(b"content-length", b"0"))
        has_body = length > 0
        if b"transfer-encoding" in first:
            has_body = True
            if any(
                name == b"transfer-encoding" and value.lower() != b"chunked"
                for name, value in request.headers
            ):
                raise InvalidRequest("The only transfer encoding that is taken is chunked.")
        if has_body:
            request.caller = self._clients.admit(request)
            if self._clients.has_keys and not request.caller.tenant:
                self._max_body = min(self._max_body, MAX_OPEN_BODY_BYTES)
        if length > self._max_body:
            raise RequestTooLarge(f"The body may have {self._max_body} bytes.")
        if len(head) > 4:
            self._cached_head = CachedHead.of(head, request, self._max_body)
        now = time.monotonic()
        self._body_until_s = now + BODY_WITHIN_S
        self._expect_by(now + PART_WITHIN_S)
        if b"expect" in first and first[b"expect"].lower() == b"100-continue" and not self._is_busy:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        self._clients.num_buffered += len(body)
        if self._num_body > self._max_body:
            raise RequestTooLarge(f"The body may have {self._max_body} bytes.")
        if self._clients.num_buffered > MAX_BUFFERED_BYTES:
            raise QueueFull(
                "The router holds too many bytes of requests.", fix="Try again in a moment."
            )
        self._body += body

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        request.body = bytes(self._body)
        self._expect_head()
        self._expect_by(float("inf"))
        self._set_idle(False)
        if self._is_busy or self._is_paused:
            self._queue.append(request)
        else:
            self._begin(request)

    # ---- requests and responses

    def _begin(self, request: Request) -> None:
        self._is_busy, self._current = True, request
        self._framing = ""
        self._job = None
        try:
            job = self._clients.handle(self, request)
        except TidemillError as error:
            self.answer_error(error)
        else:
            if self._is_busy and self._current is request:
                self._job = job

    def take_over(self, job: Job) -> None:
        """The request that is being answered is answered by another from now on."""
        self._job = job

    def begin_response(self, status: int, headers: Headers, length: int | None) -> list[bytes]:
        """The head of a response, to be written with what there is of its body (`framed`)."""
        request = self._current
        out = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        out += [b"%b: %b\r\n" % header for header in headers]
        if status in (204, 304):
            self._framing = "none"
        elif length is not None:
            self._framing = "length"
            out.append(b"content-length: %d\r\n" % length)
        elif request.is_http10:
            self._framing, request.keeps_alive = "close", False
        else:
            self._framing = "chunked"
            out.append(b"transfer-encoding: chunked\r\n")
        if self._clients.is_draining or self._is_broken:
            request.keeps_alive = False
        if not request.keeps_alive:
            out.append(b"connection: close\r\n")
        elif request.is_http10:
            out.append(b"connection: keep-alive\r\n")
        out.append(b"\r\n")
        return out

    def framed(self, data: bytes) -> bytes:
        """A piece of the body."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._framing == "chunked" else data

    def write(self, parts: list[bytes]) -> None:
        if not self._is_closed:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def end_response(self, parts: list[bytes]) -> None:
        """The last of it; then comes the next request."""
        if self._framing == "chunked" and self._current.method != b"HEAD":
            parts.append(b"0\r\n\r\n")
        if parts:
            self.write(parts)
        request = self._current
        self._give_body_back()
        self._is_busy, self._job = False, None
        if self._is_closed:
            return
        if not request.keeps_alive:
            self._close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._next)
        elif not self._is_broken:
            self._set_idle(True)
            self._expect_by(
                time.monotonic()
                + (HEADERS_WITHIN_S if self._num_head else KEEP_ALIVE_S + KEEP_ALIVE_SPARE_S)
            )

    def _close(self) -> None:
        """When all is written. What a refused client still sends is read and dropped for a while:
        closing on it would make its system drop the answer."""
        is_refused, self._is_broken = self._is_broken, True
        if is_refused and self._transport.can_write_eof():
            self.deadline_s = time.monotonic() + REST_WITHIN_S
            self._transport.write_eof()
        else:
            self.deadline_s = time.monotonic() + READ_WITHIN_S
            self._transport.close()

    def _next(self) -> None:
        if self._queue and not self._is_busy and not self._is_paused and not self._is_closed:
            self._begin(self._queue.popleft())

    def answer(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Headers | None = None,
    ) -> None:
        """A whole response of the router's own."""
        parts = self.begin_response(
            status, [(b"content-type", content_type), *(headers or [])], len(body)
        )
        self.end_response(parts if self._current.method == b"HEAD" else [*parts, body])

    def answer_json(self, body: Any, status: int = 200) -> None:
        self.answer(status, msgspec.json.encode(body))

    def answer_error(self, error: TidemillError) -> None:
        body = msgspec.json.encode(
            format_error(self._current.path, error_body(error), error.status)
        )
        named = headers_of(error)
        if named.pop("Connection", "") == "close":
            self._current.keeps_alive = False
        if error.status == 401:
            named["www-authenticate"] = "Bearer"
        self.answer(
            error.status,
            body,
            headers=[(name.lower().encode(), value.encode()) for name, value in named.items()],
        )

    def break_off(self) -> None:
        """A response that has begun cannot be completed: the client must see that it is not."""
        self._give_body_back()
        self._is_busy, self._job = False, None
        self.abort()

    def _give_body_back(self) -> None:
        self._clients.num_buffered -= len(self._current.body)
        self._current.body = b""

    def _turn_away(self, error: TidemillError) -> None:
        """A connection that is one too many: it does not wait for what its client may send."""
        self._is_busy, self._current = True, Request(self.address)
        self.answer_error(error)

    def _refuse(self, error: TidemillError) -> None:
        """Refuses the rest of a connection: it is not read any more. Requests that are under way go
        on."""
        self._is_broken = True
        self._clients.num_buffered -= self._num_body
        path = self._request.path if self._request is not None else ""
        self._expect_head()
        if self._is_busy:
            self._current.keeps_alive = False
            self._clients.num_buffered -= sum(len(request.body) for request in self._queue)
            self._queue.clear()
            self._expect_by(float("inf"))
            return
        self._is_busy, self._current = True, Request(self.address)
        self._current.path = path
        self.answer_error(error)
