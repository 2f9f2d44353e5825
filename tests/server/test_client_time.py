"""The explanation of a request is of what its client waited: from before it sent the request until
it had the last byte."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import dataclass

import httpx
import pytest

from tests.server.conftest import behind_our_protocol
from tests.waiting import until, until_async
from tidemill.server.http import stopwatch
from tidemill.server.http.context import RequestMiddleware

WITHIN, WITHIN_MS = 0.02, 1.0


@dataclass
class Measured:
    request_id: str
    ms: float
    body: bytes


class Client:
    """A connection of its own, and its own clock: read before the first byte is sent, and after the
    last was received."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: dict) -> Measured:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        message = head.encode() + data
        received = bytearray()
        begun = time.monotonic()
        self._socket.sendall(message)
        while not self._is_whole(received):
            received += self._socket.recv(2**16)
        ended = time.monotonic()
        headers, _, rest = bytes(received).partition(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200"), received[:2000]
        named = dict(line.split(b": ", 1) for line in headers.split(b"\r\n")[1:])
        return Measured(named[b"x-request-id"].decode(), 1000 * (ended - begun), rest)

    @staticmethod
    def _is_whole(received: bytearray) -> bool:
        headers, found, rest = bytes(received).partition(b"\r\n\r\n")
        if not found:
            return False
        if b"chunked" in headers:
            return rest.endswith(b"0\r\n\r\n")
        (length,) = [
            int(line.split(b": ")[1])
            for line in headers.split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        return len(rest) >= length

    def close(self) -> None:
        self._socket.close()


def explained(server, request_id):
    def ended():
        found = httpx.get(f"{server.url}/v1/requests/{request_id}/explain").json()["data"]
        return found if all(story["status"] != "under way" for story in found) else None

    return until(ended)


def missing_ms(server, measured):
    """How far the sum is from what the client waited, beyond what is allowed; of all parts of the
    request."""
    stories = explained(server, measured.request_id)
    assert stories
    for story in stories:
        assert sum(span["ms"] for span in story["spans"]) == pytest.approx(
            story["total_ms"], abs=0.1
        )
        assert sum(span["percent"] for span in story["spans"]) == pytest.approx(100, abs=0.1)
        assert story["engine_ms"] <= story["total_ms"]
    return max(
        abs(measured.ms - story["total_ms"]) - WITHIN * measured.ms - WITHIN_MS for story in stories
    )


PROMPT = "Where did the time go? " * 20
CASES = {
    "completion": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}),
    "stream": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "ignore_eos": True},
    ),
    "samples": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "n": 3, "seed": 1},
    ),
    "prompts": (
        "/v1/completions",
        {"prompt": ["a", "bc", "def"], "max_tokens": 20, "ignore_eos": True},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["a", PROMPT]}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_what_the_client_waited(roomy, name):
    """The client's own delay until it reads is in its time only, so the best of some requests
    counts."""
    client = Client(roomy.port)
    try:
        until(lambda: missing_ms(roomy, client.post(*CASES[name])) <= 0)
    finally:
        client.close()


def test_the_sum_is_what_the_client_waited_under_load(roomy):
    """Of many clients at once, most wait for what is told; the others' own threads were late."""
    until(lambda: (missing := _under_load(roomy))[len(missing) * 3 // 4] <= 0)


def _under_load(roomy) -> list[float]:
    """What is missing of each request of many clients."""
    done: list[Measured] = []
    cases = [CASES["completion"], CASES["stream"], CASES["chat"], CASES["samples"]]

    def work(number: int) -> None:
        client = Client(roomy.port)
        done.extend(client.post(*cases[(number + i) % len(cases)]) for i in range(4))
        client.close()

    threads = [threading.Thread(target=work, args=[number]) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(missing_ms(roomy, measured) for measured in done)


def test_a_stop_string_ends_what_the_client_waits_for(roomy):
    """The engine hears of it later."""
    client = Client(roomy.port)
    path, body = CASES["completion"]
    whole = json.loads(client.post(path, body | {"seed": 1}).body)["choices"][0]["text"]
    stopped = body | {"seed": 1, "stop": [whole[len(whole) // 2 :][:3]], "max_tokens": 3000}
    measured = until(lambda: missing_ms(roomy, found := client.post(path, stopped)) <= 0 and found)
    client.close()
    (story,) = explained(roomy, measured.request_id)
    assert story["status"] == "stop"
    assert {"parsing", "tokenizing", "decode", "formatting", "writing"} <= {
        span["span"] for span in story["spans"]
    }


@pytest.mark.parametrize("in_parts", [False, True])
async def test_a_slow_reader_waits_for_itself(in_parts):
    """What the socket does not take is told as writing."""
    watched = []

    async def app(scope, receive, send):
        watched.append(stopwatch.of_task())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64 if in_parts else 0):
            await send({"type": "http.response.body", "body": b"x" * 2**18, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if in_parts else b"x" * 2**24})

    async with behind_our_protocol(RequestMiddleware(app, None)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await until_async(lambda: watched and watched[0].snapshot().get("writing", 0.0) > 0.2)
        assert not watched[0].ended_s
        while await reader.read(2**20):
            pass
        await until_async(lambda: watched[0].ended_s)
        writer.close()
    spans = watched[0].snapshot()
    assert spans["writing"] > 0.2
    assert sum(spans.values()) == pytest.approx(watched[0].ended_s - watched[0].begun_s)


async def test_a_request_that_nobody_waits_for_ends():
    watched = []

    async def app(scope, receive, send):
        watched.append(stopwatch.of_task())
        while (await receive())["type"] != "http.disconnect":
            pass

    async with behind_our_protocol(RequestMiddleware(app, None)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until_async(lambda: watched)
        writer.close()
        await until_async(lambda: watched[0].ended_s)
