"""Faults of clients, requests, engines and of the machine: each is contained, none ends the
service, and what cannot be mended ends the process, so that it is started again. Real servers;
their engine dies or waits at certain prompts (tests/fragile)."""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.fragile import DEADLY, GATED, Fragile
from tests.helpers import LONG_S
from tests.server.conftest import Server, behind_our_protocol
from tests.server.test_chaos import metrics
from tests.waiting import until
from tidemill.server.http import connections

PLAIN = {"prompt": "the tide", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def post(body, path="/v1/completions"):
    text = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + text


def unread(server, body):
    """A stream that is asked for and not read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(post(body))
    return raw


def aborted(server):
    """Sequences, by the metrics."""
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith('tidemill_requests_finished_total{reason="abort"}'):
            return float(line.split()[-1])
    return 0.0


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Fragile(tmp_path_factory.mktemp("fragile"), patch)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    return tmp_path_factory.mktemp("temporary") / "tmp"


@pytest.fixture(scope="module")
def shared(fragile, roomy_folder, temporary):
    """A server with few file descriptors and a temporary folder of its own. Who does not read is
    ended by the bound of his backlog, however long the engine takes to fill it. Half of the usual
    one is still more than lies in the sockets' buffers."""
    patch = "from tidemill.engine import inbox\nfrom tidemill.server.http import connections\n"
    patch += f"inbox.MAX_CELLS = 2**17\nconnections.READ_WITHIN_S = {LONG_S}"
    temporary.mkdir()
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (200, 256))
    with pytest.MonkeyPatch.context() as poor:
        poor.setenv("TMPDIR", str(temporary))
        poor.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=limit))
        running = Server(roomy_folder, patch=patch).wait()
    yield running
    fragile.open_gate()
    assert running.stop() == 0


@pytest.fixture
def server(shared, fragile):
    fragile.close_gate()
    return shared


# ---- requests that kill engines, engines that do not come back


# tests/engine/test_client.py has this without a server, and so the next one and a folder that is
# gone
@pytest.mark.slow
def test_two_requests_that_kill_the_engine_do_not_end_the_service(server):
    """Nothing else is under way, so no step completes between the deaths."""
    ask = partial(httpx.post, f"{server.url}/v1/completions")
    undisturbed = ask(json=PLAIN).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        for reply in list(
            pool.map(lambda i: ask(json={"prompt": [DEADLY, i], "max_tokens": 5}), range(2))
        ):
            assert reply.status_code == 503
            assert "failed 3 times at this request" in reply.text
    assert server.gauge("engine_restarts_total") > 3
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert ask(json=PLAIN).json()["choices"] == undisturbed


@pytest.mark.slow
def test_a_server_whose_engine_cannot_be_started_again_ends_with_an_error(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "m")
    server = Server(tmp_path / "m").wait()
    (tmp_path / "m" / "config.json").unlink()
    os.kill(server.engine_pid(), signal.SIGKILL)
    told, _ = server.process.communicate(timeout=LONG_S)
    assert server.process.returncode == 1
    assert "could not be started 3 times in a row" in told.split("error:")[-1]
    assert "Traceback" not in told


# ---- what the machine lacks


@pytest.fixture
def http(server):
    """A connection that is there already."""
    with httpx.Client(base_url=server.url) as made:
        assert made.get("/health").status_code == 200
        yield made


def test_idle_connections_leave_enough_for_an_engine_to_be_started_again(server, http):
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard == 256  # it was raised
    engine = server.engine_pid()
    with contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(300)
        ]
        last = idle[-1].recv(100)  # all are accepted by now, or refused
        assert last.startswith(b"HTTP/1.1 429 ")
        with socket.create_connection(
            ("127.0.0.1", server.port), source_address=("127.0.0.2", 0)
        ) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        os.kill(engine, signal.SIGKILL)
        assert http.post("/v1/completions", json=PLAIN).status_code == 200
    assert server.engine_pid() != engine


@pytest.mark.slow
def test_a_temporary_folder_that_is_gone_for_a_while_is_waited_for(server, http, temporary):
    shutil.rmtree(temporary)
    os.kill(server.engine_pid(), signal.SIGKILL)
    failed = 0
    while failed < 4:  # more often than an engine may fail to start
        failed += "could not be started again" in server.process.stdout.readline()
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 503
    temporary.mkdir()
    assert http.post("/v1/completions", json=PLAIN).status_code == 200


async def test_connections_are_limited_in_total_and_per_address(monkeypatch):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def opened(port, address="127.0.0.1"):
        return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))

    async def refusal(port, address="127.0.0.1"):
        reader, writer = await opened(port, address)
        try:
            return (await reader.read())[9:12]
        finally:
            writer.close()

    async def asked(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await reader.readuntil(b"\r\n\r\n"))[9:12]

    limits = connections.Connections(max_total=4)
    monkeypatch.setattr(connections.BoundedProtocol, "limits", limits)
    async with behind_our_protocol(app) as port:
        first = [await opened(port) for _ in range(2)]
        assert [await asked(*one) for one in first] == [b"204"] * 2  # both are idle again
        assert limits.num_idle == {"127.0.0.1": 2}
        assert await refusal(port) == b"429"
        others = [await opened(port, "127.0.0.2") for _ in range(2)]
        assert [await asked(*one) for one in others] == [b"204"] * 2
        assert await refusal(port, "127.0.0.3") == b"503"
        first[0][1].close()
        while limits.num_idle["127.0.0.1"] > 1:
            await asyncio.sleep(0.001)
        assert await asked(*await opened(port)) == b"204"
        for _, writer in [*first, *others]:
            writer.close()


# ---- clients that do not read


MANY = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}


def test_a_client_that_does_not_read_is_ended_at_a_bound_and_told(server):
    """Its backlog would be 500,000 log-probabilities."""
    before = aborted(server)
    with unread(server, MANY | {"prompt": "x"}) as raw:
        until(lambda: aborted(server) == before + 16)
        assert server.gauge("requests_running") == 0
        raw.settimeout(LONG_S)
        got = b""
        while part := raw.recv(2**20):
            got = (got + part)[-10_000:]
            if got.endswith(b"0\r\n\r\n"):
                break
        assert b"client_too_slow" in got


def test_a_request_is_aborted_at_once_though_its_client_does_not_read(server, fragile):
    """The engine waits at position 300, when more has been sent than lies in the sockets' buffers,
    and less than may wait."""
    before = metrics(server)["output_tokens_total"]
    aborted_before = aborted(server)
    with unread(server, MANY | {"prompt": [GATED, 30], "request_id": "unread"}):
        until(lambda: metrics(server)["output_tokens_total"] >= before + 16 * 295)
        assert httpx.delete(f"{server.url}/v1/requests/unread").json()["cancelled"]
        fragile.open_gate()
        until(lambda: aborted(server) == aborted_before + 16)
        assert server.gauge("requests_running") == 0
        assert server.gauge("requests_waiting") == 0


# ---- connections that are used again


@pytest.mark.parametrize("idle_s", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_idle_connections_stay_open_and_say_for_how_long(server, idle_s):
    with httpx.Client(base_url=server.url, limits=httpx.Limits(keepalive_expiry=60)) as http:
        first = http.get("/health")
        assert first.headers["keep-alive"] == "timeout=75"
        stream = first.extensions["network_stream"]
        time.sleep(idle_s)  # 6: more than the 5 s after which uvicorn would close it
        second = http.get("/health")
        assert second.extensions["network_stream"] is stream


async def test_an_idle_connection_has_longer_than_headers_have(monkeypatch):
    async def app(scope, receive, send):
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body"})

    monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.2)
    async with behind_our_protocol(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in (b"", b"abc", b""):  # the second comes when its response is complete
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            await asyncio.sleep(0.5)
        writer.write(b"\r\n")  # no request, but its beginning
        assert await reader.read() == b""  # closed
