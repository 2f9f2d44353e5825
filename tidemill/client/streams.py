"""Streamed responses: server-sent events from the bytes of a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from tidemill.client.errors import BadResponse, refusal

_decode = msgspec.json.Decoder().decode
_END = b"[DONE]"


class Events:
    """Server-sent events, cut out of parts of a stream as they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that this part completes."""
        text = self._rest + part if self._rest else part
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # its newline may be in the next part
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *blocks, self._rest = text.split(b"\n\n")
        return [data for block in blocks if (data := _data(block))]


def _data(block: bytes) -> bytes:
    """The data of an event: one line in nearly all."""
    if block.startswith(b"data:") and b"\n" not in block:
        return block[5:].removeprefix(b" ")
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def chunks(url: str, parts: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a streamed response, which ends with [DONE]."""
    events, is_whole = Events(), False
    for part in parts:
        for data in events.feed(part):
            if data == _END:
                is_whole = True
            else:
                yield _chunk(url, data)
    if not is_whole:
        raise _cut(url)


async def async_chunks(url: str, parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The same for an asynchronous client."""
    events, is_whole = Events(), False
    async for part in parts:
        for data in events.feed(part):
            if data == _END:
                is_whole = True
            else:
                yield _chunk(url, data)
    if not is_whole:
        raise _cut(url)


def _chunk(url: str, data: bytes) -> dict[str, Any]:
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise BadResponse(url, "sends an event that is no JSON object")
    if chunk.get("error"):
        raise refusal(url, 400, data)
    return chunk


def _cut(url: str) -> BadResponse:
    return BadResponse(url, "ended a response before it was complete", fix="Check the server's log.")
