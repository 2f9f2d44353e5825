"""Responses that end when the client disconnects: server-sent events, and whole responses while
they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.server.http import stopwatch
from tidemill.server.http.stopwatch import FORMATTING, WRITING

T = TypeVar("T")
KEEP_ALIVE_S = 10.0  # without an event, after which a comment is sent
_KEEP_ALIVE = b": keep-alive\n\n"
_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection before the response was ready."""


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Does the work, or cancels it if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any) -> Response:
    """A response that is encoded at once: FastAPI would look at each item of a list of token
    ids."""
    return Response(_json(body), media_type="application/json")


DONE = b"data: [DONE]\n\n"  # the last event of a stream of OpenAI's


def data_event(body: Any) -> bytes:
    """An event in wire format, without a name."""
    return b"data: " + _json(body) + b"\n\n"


def named_event(event: dict[str, Any]) -> bytes:
    """An event in wire format, named by its type."""
    return b"event: " + event["type"].encode() + b"\ndata: " + _json(event) + b"\n\n"


class EventStream(Response):
    """Server-sent events in wire format. While there is none for a time, comments keep the
    connection open."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], also_close: Any) -> None:
        """`also_close`: what the chunks are made from; closed even if no chunk was requested."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._source = also_close
        self._num_sent = 0
        self._is_sending = True  # or has not begun, or has ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        keeper = asyncio.ensure_future(self._keep_alive(send))
        try:
            await asyncio.wait([sending, watcher], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            keeper.cancel()
            if not sending.done():
                sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    async def _send(self, send: Send) -> None:
        times = stopwatch.of_task()
        async with aclosing(self._source), aclosing(self._chunks) as chunks:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            self._is_sending = False
            async for chunk in chunks:
                times.enter(WRITING)
                self._is_sending = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                times.enter(FORMATTING)
                self._is_sending = False
                self._num_sent += 1
            self._is_sending = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_sent == self._num_sent and not self._is_sending:
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})


class JSONLines(EventStream):
    """Objects of JSON, a line each. They have no comments, so that nothing keeps the connection
    open."""

    media_type = "application/x-ndjson"

    async def _keep_alive(self, send: Send) -> None:
        pass


class JSONList(EventStream):
    """The data of events as one JSON list."""

    media_type = "application/json"

    def __init__(self, events: AsyncGenerator[bytes, None], also_close: Any) -> None:
        super().__init__(_as_list(events), also_close)

    async def _keep_alive(self, send: Send) -> None:
        pass


async def _as_list(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    separator = b"["
    async with aclosing(events):
        async for event in events:
            yield separator + event.removeprefix(b"data: ").removesuffix(b"\n\n")
            separator = b",\r\n"
    yield b"]"
