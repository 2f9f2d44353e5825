"""A client's request, and the head of the one before it on a connection: clients send the same head
again and again."""

from __future__ import annotations

import re

from tidemill.cluster.router.upstream import HOP_BY_HOP, Headers
from tidemill.server.http.access import KEY_HEADERS, Caller

MAX_CACHED_HEAD_BYTES = 2048  # of a head that is kept
_MAX_DIGITS = 10
_VALUE = re.compile(rb"[!-~](?:[\t -~]*[!-~])?")  # of a header, without spaces around it
# the latter are written anew
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-forwarded-for"}
KEYS = frozenset({b"authorization", *KEY_HEADERS})
_FIXED = _NOT_FORWARDED | KEYS | {b"origin"}  # they decide about more than what is passed on


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
        # once they are made: the header lines that go on to an upstream
        self.forwarded: list[bytes] = []
        self.body: bytes = b""
        self.caller: Caller | None = None  # once it is known
        self.is_http10 = self.keeps_alive = False

    def get(self, name: bytes) -> bytes:
        return self.first.get(name, b"")

    def drop_key(self) -> None:
        """Removes a key from the target's query, where some clients of Google's write one, too."""
        path, _, query = self.target.partition(b"?")
        if b"key=" in query:
            kept = [field for field in query.split(b"&") if not field.startswith(b"key=")]
            self.target = path + b"?" * bool(kept) + b"&".join(kept)

    def head_for(self, host: bytes, key: bytes) -> bytes:
        """Its head as it goes on to an upstream. `key`: of all upstreams, instead of the client's;
        empty: none."""
        if not self.forwarded:
            self.forwarded += _forwarded(self, key)
        lines = b"".join(self.forwarded)
        if self.body or self.method in (b"POST", b"PUT", b"PATCH"):
            words = (self.method, self.target, host, lines, len(self.body))
            return b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % words
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (self.method, self.target, host, lines)


def _forwarded(request: Request, key: bytes) -> list[bytes]:
    """A line for each header, which may be empty, and one with what the router says itself."""
    named = request.get(b"connection")
    dropped = {word.strip().lower() for word in named.split(b",")} if named else ()
    lines = []
    for name, value in request.headers:
        # the upstream has another host
        is_own_page = name == b"origin" and value.partition(b"://")[2] == request.get(b"host")
        if name in _NOT_FORWARDED or name in dropped or (key and name in KEYS) or is_own_page:
            lines.append(b"")
        else:
            lines.append(b"%b: %b\r\n" % (name, value))
    own = b"authorization: Bearer %b\r\n" % key if key else b""
    return [
        *lines,
        own + (b"x-forwarded-for: %b\r\n" % request.address.encode() if request.address else b""),
    ]


class CachedHead:
    """A head that was parsed. The same lines need not be parsed again, also if the length or plain
    headers have other values."""

    __slots__ = ("_after", "_before", "_length_at", "_like", "_lines", "_prefixes", "max_body")

    def __init__(
        self,
        lines: list[bytes],
        prefixes: list[bytes],
        length_at: int,
        like: Request,
        max_body: int,
    ) -> None:
        """`prefixes`: what comes before the value of each line; empty: it must be the same."""
        self._lines, self._prefixes, self._length_at, self._like, self.max_body = (
            lines,
            prefixes,
            length_at,
            like,
            max_body,
        )
        self._before = b"\r\n".join([*lines[:length_at], prefixes[length_at]])
        self._after = b"\r\n".join([b"", *lines[length_at + 1 :], b"", b""])

    @staticmethod
    def of(head: bytes, request: Request, max_body: int) -> CachedHead | None:
        """`head`: the bytes that were parsed as `request`. None: it has no plain length, or an
        effect beyond its request."""
        lines, names = (
            head.removesuffix(b"\r\n\r\n").split(b"\r\n"),
            [name for name, _ in request.headers],
        )
        is_plain = (
            request.keeps_alive
            and not request.is_http10
            and request.caller is not None
            and len(lines) == len(names) + 1
        )
        if (
            not is_plain
            or names.count(b"content-length") != 1
            or b"expect" in names
            or b"transfer-encoding" in names
        ):
            return None
        if request.get(b"connection").lower() not in (b"", b"keep-alive"):
            return None
        prefixes = [b""]
        for line, name in zip(lines[1:], names, strict=True):
            prefix = line[: len(name)] + b": "
            may_differ = (
                line.startswith(prefix)
                and names.count(name) == 1
                and (name not in _FIXED or name == b"content-length")
            )
            prefixes.append(prefix if may_differ else b"")
        length_at = names.index(b"content-length") + 1
        return (
            CachedHead(lines, prefixes, length_at, request, max_body)
            if prefixes[length_at]
            else None
        )

    def read(self, data: bytes) -> Request | None:
        """The request, if `data` is one with such a head, whole."""
        like, request = self._like, Request.__new__(Request)
        request.headers, request.first, request.forwarded = like.headers, like.first, like.forwarded
        begin = len(self._before)
        end = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
        # nothing but the length differs
        if end > 0 and data.startswith(self._before) and data.startswith(self._after, end):
            length, end = data[begin:end], end + len(self._after) - 4
        else:
            end = data.find(b"\r\n\r\n", 0, MAX_CACHED_HEAD_BYTES)
            lines = data[:end].split(b"\r\n") if end > 0 else []
            if len(lines) != len(self._lines) or not self._differs_plainly(request, lines):
                return None
            length = lines[self._length_at][len(self._prefixes[self._length_at]) :]
        if not length.isdigit() or len(length) > _MAX_DIGITS or int(length) != len(data) - end - 4:
            return None
        request.address, request.method, request.target, request.path = (
            like.address,
            like.method,
            like.target,
            like.path,
        )
        request.caller, request.is_http10, request.keeps_alive = like.caller, False, True
        request.body = data[end + 4 :]
        return request

    def _differs_plainly(self, request: Request, lines: list[bytes]) -> bool:
        """`request` gets the other values of headers."""
        for at, (new, old) in enumerate(zip(lines, self._lines, strict=True)):
            if new == old:
                continue
            prefix = self._prefixes[at]
            if not prefix or not new.startswith(prefix):
                return False
            if at != self._length_at:
                if not _VALUE.fullmatch(new, len(prefix)):
                    return False
                _replace(request, self._like, at - 1, new[len(prefix) :])
        return True


def _replace(request: Request, like: Request, at: int, value: bytes) -> None:
    """Another value of a header that is passed on as it is."""
    if request.headers is like.headers:
        request.headers, request.first, request.forwarded = (
            like.headers.copy(),
            like.first.copy(),
            like.forwarded.copy(),
        )
    name, _ = request.headers[at]
    request.headers[at], request.first[name] = (name, value), value
    if request.forwarded:
        request.forwarded[at] = b"%b: %b\r\n" % (name, value)
