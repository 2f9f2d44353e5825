"""Streamed responses: server-sent events from the bytes of a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from tidemill.client.errors import BadResponse, failure

_decode = msgspec.json.Decoder().decode
_END = b"[DONE]"
MAX_EVENT_BYTES = 64 * 2**20


class Events:
    """Server-sent events, cut out of parts of a stream as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._held = b""  # a carriage return, whose newline may be in the next part

    @property
    def num_waiting(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._rest)

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that this part completes."""
        part = self._held + part
        self._held = b"\r" if part.endswith(b"\r") else b""
        if b"\r" in part:
            part = part.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        begin = max(len(self._rest) - 1, 0)
        self._rest += part
        if self._rest.find(b"\n\n", begin) < 0:
            return []
        *blocks, rest = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(rest)
        return [data for block in blocks if (data := _data(block))]


def _data(block: bytes) -> bytes:
    """The data of an event: one line in nearly all."""
    if block.startswith(b"data:") and b"\n" not in block:
        return block[5:].removeprefix(b" ")
    lines = [
        line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines)


class _Chunks:
    """The chunks of one response."""

    def __init__(self, url: str) -> None:
        self._url, self._events, self._is_whole = url, Events(), False

    def read(self, part: bytes) -> Iterator[dict[str, Any]]:
        for data in self._events.feed(part):
            if data == _END:
                self._is_whole = True
            else:
                yield _chunk(self._url, data)
        if self._events.num_waiting > MAX_EVENT_BYTES:
            raise BadResponse(self._url, f"sends an event of more than {MAX_EVENT_BYTES} bytes")

    def end(self) -> None:
        if not self._is_whole:
            what, fix = "ended a response before it was complete", "Check the server's log."
            raise BadResponse(self._url, what, fix)


def chunks(url: str, parts: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a streamed response, which ends with [DONE]."""
    response = _Chunks(url)
    for part in parts:
        yield from response.read(part)
    response.end()


async def async_chunks(url: str, parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The same for an asynchronous client."""
    response = _Chunks(url)
    async for part in parts:
        for chunk in response.read(part):
            yield chunk
    response.end()


def _chunk(url: str, data: bytes) -> dict[str, Any]:
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise BadResponse(url, "sends an event that is no JSON object")
    if chunk.get("error"):
        raise failure(data)
    return chunk
