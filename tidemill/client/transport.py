"""Requests to a server: one client for threads, one for an event loop."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import httpx
import msgspec

from tidemill.client import streams
from tidemill.client.address import Address
from tidemill.client.errors import BadResponse, Unreachable, refusal
from tidemill.errors import ConfigError

TIMEOUT_S = 600.0  # without a byte from the server
CONNECT_S = 10.0
_FAILURES = (httpx.HTTPError, httpx.InvalidURL)
_JSON_NAMES: dict[type, str] = {dict: "object", list: "array"}
Body = dict[str, Any] | bytes | None  # bytes are JSON already


class _Connection:
    """The common part of both clients. `url` is an address as Address reads it. Without a key, the
    first of TIDEMILL_API_KEY is sent."""

    _client: type
    _transport: type  # connects to Unix sockets
    _http: Any

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float | None = TIMEOUT_S,
        connect_s: float = CONNECT_S,
        keep_alive: bool = True,
    ) -> None:
        address = Address.parse(url)
        self.url, self._root = url, address.url
        limits = httpx.Limits(max_keepalive_connections=None if keep_alive else 0)
        headers = {"Content-Type": "application/json"} | _authorization(key)
        path = address.unix_socket
        try:
            self._http = self._client(
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=connect_s),
                limits=limits,
                transport=path and self._transport(uds=path, limits=limits),
            )
        except (OSError, ValueError, ImportError) as error:
            what = f"The proxy or the certificates of the environment cannot be used: {error}."
            fix = "Check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR."
            raise ConfigError(what, fix=fix) from error

    def _whole(self, reply: httpx.Response, kind: type) -> Any:
        """The JSON of a response, which must be of this type."""
        if not reply.is_success:
            raise refusal(self.url, reply.status_code, reply.content)
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            what = f"sends no JSON {_JSON_NAMES[kind]} at {reply.url.path}"
            raise BadResponse(self.url, what) from None


class Client(_Connection):
    """Requests of a thread."""

    _client, _transport = httpx.Client, httpx.HTTPTransport
    _http: httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def json(self, method: str, path: str, body: Body = None, kind: type = dict) -> Any:
        """The JSON that a server answers with."""
        try:
            reply = self._http.request(method, self._root + path, content=_encode(body))
        except _FAILURES as error:
            raise Unreachable(self.url, error) from error
        return self._whole(reply, kind)

    @contextmanager
    def stream(self, path: str, body: Body) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a streamed response. Leaving it early ends the request in the server."""
        try:
            with self._http.stream("POST", self._root + path, content=_encode(body)) as reply:
                if not reply.is_success:
                    raise refusal(self.url, reply.status_code, reply.read())
                yield streams.chunks(self.url, reply.iter_bytes())
        except _FAILURES as error:
            raise Unreachable(self.url, error) from error


class AsyncClient(_Connection):
    """Requests of an event loop, any number at the same time."""

    _client, _transport = httpx.AsyncClient, httpx.AsyncHTTPTransport
    _http: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, method: str, path: str, body: Body = None) -> httpx.Response:
        """The response as it is, whatever its status."""
        try:
            return await self._http.request(method, self._root + path, content=_encode(body))
        except _FAILURES as error:
            raise Unreachable(self.url, error) from error

    async def json(self, method: str, path: str, body: Body = None, kind: type = dict) -> Any:
        """The JSON that a server answers with."""
        return self._whole(await self.send(method, path, body), kind)

    @asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The chunks of a streamed response. Leaving it early ends the request in the server."""
        try:
            async with self._http.stream("POST", self._root + path, content=_encode(body)) as reply:
                if not reply.is_success:
                    raise refusal(self.url, reply.status_code, await reply.aread())
                yield streams.async_chunks(self.url, reply.aiter_bytes())
        except _FAILURES as error:
            raise Unreachable(self.url, error) from error


def _authorization(key: str | None) -> dict[str, str]:
    key = key or next(iter(os.environ.get("TIDEMILL_API_KEY", "").split()), "")
    if not key.isascii() or not key.isprintable():
        what = "The API key has characters that no header can carry."
        raise ConfigError(what, fix="Is there a line break in it?")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _encode(body: Body) -> bytes | None:
    return json.dumps(body, separators=(",", ":")).encode() if isinstance(body, dict) else body
