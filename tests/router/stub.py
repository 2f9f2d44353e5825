"""A stub upstream: answers over real sockets as a test says, and keeps what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidemill.cluster.router.router import Router


@dataclass
class Sent:
    """A request as an upstream sees it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split()[1]

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


Answer = Callable[[Sent, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"content-length: {len(body)}",
        "content-type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Stub:
    name: str
    models: list[str] = field(default_factory=lambda: ["m"])
    answer: Answer | None = None
    sent: list[Sent] = field(default_factory=list)  # without health checks and lists of models
    num_connections: int = 0
    num_left: int = 0  # connections that ended while their request was answered
    port: int = 0
    health: bytes = response(b"{}")

    async def start(self) -> Stub:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """No new connections; those there are end at once."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()

    _tasks: set[asyncio.Task] = field(default_factory=set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while True:
                await self._one(await _read(reader), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(
        self, sent: Sent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if sent.path == "/health":
            writer.write(self.health)
            return
        if sent.path == "/v1/models":
            listed = [
                {"id": name, "of": self.name, "aliases": [f"alias-of-{name}"]}
                for name in self.models
            ]
            writer.write(response(json.dumps({"data": listed}).encode()))
            return
        if sent.path == "/api/tags":
            listed = [{"name": f"{name}:latest", "of": self.name} for name in self.models]
            writer.write(response(json.dumps({"models": listed}).encode()))
            return
        self.sent.append(sent)
        if self.answer is None:
            writer.write(
                response(
                    json.dumps({"from": self.name}).encode(),
                    "200 OK",
                    "connection: keep-alive",
                    "x-own: 1",
                )
            )
            return
        answering = asyncio.ensure_future(self.answer(sent, writer))
        # nothing comes before the answer, unless the router leaves
        leaving = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if answering in done and leaving not in done:
            leaving.cancel()
            answering.result()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            return
        self.num_left += 1
        answering.cancel()
        raise ConnectionError


async def _read(reader: asyncio.StreamReader) -> Sent:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    headers = [
        (name.lower(), value.strip())
        for name, _, value in (line.partition(":") for line in head[1:])
    ]
    length = int(dict(headers).get("content-length", "0"))
    assert "transfer-encoding" not in dict(headers)  # the router frames every request by its length
    return Sent(head[0], headers, await reader.readexactly(length))


@asynccontextmanager
async def routed(*stubs: Stub, **options) -> AsyncIterator[tuple[Router, int]]:
    """A router in front of them, and its port."""
    for stub in stubs:
        await stub.start()
    router = Router([stub.url for stub in stubs], **{"check_every_s": 0.05} | options)
    await router.start()
    server = await asyncio.get_running_loop().create_server(router.clients.make, "127.0.0.1", 0)
    try:
        yield router, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        router.close()
        for stub in stubs:
            stub.stop()


class Client:
    """A connection that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def open(port: int) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {
            name: value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        if "content-length" in headers:
            return (
                int(head[0].split()[1]),
                headers,
                await self.reader.readexactly(int(headers["content-length"])),
            )
        body = b""
        while "transfer-encoding" in headers:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            body += (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                break
        return int(head[0].split()[1]), headers, body

    async def rest(self) -> bytes:
        return await self.reader.read()

    def close(self) -> None:
        self.writer.transport.abort()


def post(body: object = None, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    data = (
        body
        if isinstance(body, bytes)
        else json.dumps(body if body is not None else chat("hi")).encode()
    )
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def chat(*texts: str, **more) -> dict:
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)],
    } | more
