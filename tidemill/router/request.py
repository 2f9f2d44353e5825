"""A client's request, and the head of the one before it on a connection: clients send the same head again and again."""

from __future__ import annotations

import re

from tidemill.router.upstream import HOP_BY_HOP, Headers
from tidemill.server.guard import Caller

MAX_REPEATED_BYTES = 2048  # of a head that is kept
_MAX_DIGITS = 10
_LENGTH = re.compile(rb"\r\ncontent-length: ?(?=\d+\r\n)", re.IGNORECASE)
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-forwarded-for"}  # the latter are written anew
_KEYS = frozenset({b"authorization", b"x-api-key"})


class Request:
    """A client's request, whole."""

    __slots__ = (
        "address", "body", "caller", "first", "forwarded", "headers", "is_http10", "keeps_alive", "method", "path", "target",
    )  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address = address
        self.method = self.target = b""
        self.path = ""  # decoded, without the query
        self.headers: Headers = []
        self.first: dict[bytes, bytes] = {}  # of each name the first value
        self.forwarded: list[bytes] = []  # once they are made: the header lines that go on to an upstream, in one piece
        self.body: bytes = b""
        self.caller: Caller | None = None  # once it is known
        self.is_http10 = self.keeps_alive = False

    def get(self, name: bytes) -> bytes:
        return self.first.get(name, b"")

    def head_for(self, host: bytes, key: bytes) -> bytes:
        """Its head as it goes on to an upstream. `key`: of all upstreams, instead of the client's; empty: none."""
        if not self.forwarded:
            self.forwarded.append(_forwarded(self, key))
        if self.body or self.method in (b"POST", b"PUT", b"PATCH"):
            words = (self.method, self.target, host, self.forwarded[0], len(self.body))
            return b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % words
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (self.method, self.target, host, self.forwarded[0])


def _forwarded(request: Request, key: bytes) -> bytes:
    named = request.get(b"connection")
    dropped = {word.strip().lower() for word in named.split(b",")} if named else ()
    lines = []
    for name, value in request.headers:
        if name in _NOT_FORWARDED or name in dropped or (key and name in _KEYS):
            continue
        if name == b"origin" and value.partition(b"://")[2] == request.get(b"host"):
            continue  # the page is the router's own, and the upstream knows another host
        lines.append(b"%b: %b\r\n" % (name, value))
    if key:
        lines.append(b"authorization: Bearer %b\r\n" % key)
    if request.address:
        lines.append(b"x-forwarded-for: %b\r\n" % request.address.encode())
    return b"".join(lines)


class Repeated:
    """A head that was parsed. The same bytes, but for the digits of the length, need not be parsed again."""

    __slots__ = ("_after", "_before", "_like", "max_body")

    def __init__(self, before: bytes, after: bytes, like: Request, max_body: int) -> None:
        self._before, self._after, self._like, self.max_body = before, after, like, max_body

    @staticmethod
    def of(head: bytes, request: Request, max_body: int) -> Repeated | None:
        """`head`: the bytes that were parsed as `request`. None: it has no plain length, or an effect beyond its request."""
        found = _LENGTH.search(head)
        is_plain = request.keeps_alive and not request.is_http10 and request.caller is not None
        if found is None or not is_plain or b"expect" in request.first or b"transfer-encoding" in request.first:
            return None
        return Repeated(head[: found.end()], head[head.index(b"\r", found.end()) :], request, max_body)

    def read(self, data: bytes) -> Request | None:
        """The request, if `data` is one with this head, whole."""
        begin = len(self._before)
        end = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
        body = end + len(self._after)
        if end < 0 or not data.startswith(self._before) or not data.startswith(self._after, end):
            return None
        digits = data[begin:end]
        if not digits.isdigit() or int(digits) != len(data) - body:
            return None
        like, request = self._like, Request.__new__(Request)
        request.address, request.method, request.target, request.path = like.address, like.method, like.target, like.path
        request.headers, request.first, request.forwarded = like.headers, like.first, like.forwarded
        request.caller, request.is_http10, request.keeps_alive = like.caller, False, True
        request.body = data[body:]
        return request
