"""A client that asks a server in one of the APIs, and reads whole responses or streams."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import httpx

from tests.server.matrix.dialects import Dialect, Reply
from tests.waiting import until


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    headers: httpx.Headers


@dataclass(frozen=True)
class API:
    url: str
    dialect: Dialect
    is_streamed: bool

    def post(
        self, prompt: Any, headers: dict[str, str] | None = None, **ask: Any
    ) -> httpx.Response:
        path, body = self.dialect.request({"prompt": prompt, "stream": self.is_streamed, **ask})
        return httpx.post(self.url + path, json=body, headers=headers)

    def ask(self, prompt: Any, **ask: Any) -> Reply:
        """What the server answers to this."""
        return self.read(self.post(prompt, **ask))

    def read(self, response: httpx.Response) -> Reply:
        assert response.status_code == 200, response.text
        if not self.is_streamed:
            return self.dialect.whole(response.json())
        events = events_of(response.text)
        assert not any(map(self.dialect.is_refusal, events)), events[-1]
        return self.dialect.streamed(events)

    def failed(self, response: httpx.Response) -> str:
        """Why a request that was accepted has not ended: by a status, or by a stream's last event."""
        if response.status_code >= 400:
            return self.dialect.refusal(response.json())
        assert self.is_streamed
        last = events_of(response.text)[-1]
        assert self.dialect.is_refusal(last), last
        return self.dialect.refusal(last)

    def leave(self, prompt: Any, label: str, **ask: Any) -> None:
        """Asks, and closes the connection when the request is under way."""
        path, body = self.dialect.request({"prompt": prompt, "stream": self.is_streamed, **ask})
        address = httpx.URL(self.url)
        connection = HTTPConnection(address.host, address.port)
        headers = {"content-type": "application/json", "x-request-id": label}
        connection.request("POST", path, json.dumps(body), headers)
        until(lambda: self.status(label) == "under way")
        connection.close()

    def status(self, label: str) -> str | None:
        """What became of a request."""
        told = httpx.get(f"{self.url}/v1/requests/{label}/explain")
        return told.json()["data"][0]["status"] if told.status_code == 200 else None

    def refused(self, prompt: Any, **ask: Any) -> Refusal:
        """Also of a stream: by a status, with a body in the shape of this API's errors."""
        response = self.post(prompt, **ask)
        assert response.status_code >= 400, response.text
        return Refusal(
            response.status_code, self.dialect.refusal(response.json()), response.headers
        )


def events_of(text: str) -> list[Any]:
    """Of server-sent events or of JSON lines."""
    lines = [
        line.removeprefix("data: ")
        for line in text.splitlines()
        if line.startswith(("data: ", "{"))
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]
