"""Access control, against a real server with keys."""

import asyncio
import contextlib
import hashlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest

from tests.helpers import LONG_S
from tests.server.conftest import KEYS, Server, behind_our_protocol
from tests.waiting import until
from tidemill.errors import ConfigError
from tidemill.sched.request import BACKGROUND
from tidemill.server import page
from tidemill.server.http import connections
from tidemill.server.http.access import ADMIN_PATHS, Access, Guard
from tidemill.server.http.context import RequestMiddleware

KEY, OTHER, ADMIN = "key-of-the-first-user", "key-of-the-second-user", "key-of-the-admin-only"


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(
        f"# digests only\nsha256:{hashlib.sha256(OTHER.encode()).hexdigest()} priority=5\n"
    )
    options = (
        "--api-key",
        KEY,
        "--api-key-file",
        str(keys),
        "--admin-key",
        ADMIN,
        "--allowed-host",
        "mill.example",
    )
    running = Server(
        tiny_folder, *options, "--allowed-origin", "https://chat.example", "--max-requests", "1"
    ).wait()
    yield running
    assert running.stop() == 0


def ask(server, key=KEY, path="/v1/models", method="GET", **headers):
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        sent["authorization"] = f"Bearer {key}"
    return httpx.request(method, f"{server.url}{path}", headers=sent)


def test_every_route_but_health_and_readiness_needs_a_key(server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    routes = httpx.get(f"{server.url}/openapi.json", headers={"x-api-key": KEY}).json()["paths"]
    assert len(routes) > 5
    for path, methods in routes.items():
        for method in methods:
            if path not in ("/health", "/ready"):
                reply = httpx.request(method, f"{server.url}{path}")
                assert reply.status_code == 401, path
                # the number is Google's
                assert reply.json()["error"]["code"] in ("invalid_api_key", 401)
                assert reply.json().get("type") == (
                    "error" if path.startswith("/v1/messages") else None
                )
    for key in (KEY, OTHER, ADMIN):
        assert ask(server, key).status_code == 200
    for key in ("x", KEY + "x", KEY[:-1], "é" * 20):
        assert (
            httpx.get(
                f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()}
            ).status_code
            == 401
        )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_metrics_need_the_admin_key(server):
    assert ask(server, KEY, "/metrics").status_code == 403
    assert ask(server, ADMIN, "/metrics").status_code == 200


def test_the_page_needs_no_key_but_what_it_shows_does(server):
    for path in page.PATHS:
        assert httpx.get(f"{server.url}{path}").status_code == 200
        assert httpx.get(f"{server.url}{path}", headers={"host": "evil.example"}).status_code == 403
    assert ask(server, "", "/v1/engine/live").status_code == 401
    assert ask(server, KEY, "/v1/engine/live").status_code == 403
    headers = {"x-api-key": ADMIN}
    with httpx.stream("GET", f"{server.url}/v1/engine/live", headers=headers) as reply:
        assert reply.status_code == 200


def test_a_request_is_cancelled_by_its_tenant_or_the_admin_only(server):
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}
    for key, status in ((OTHER, 404), (ADMIN, 200)):
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEY}
        ) as reply:
            lines = reply.iter_lines()  # kept: when it goes, so does the connection
            name = json.loads(next(lines)[6:])["id"]
            assert ask(server, key, f"/v1/requests/{name}", "DELETE").status_code == status


def test_slots_show_requests_without_their_texts_to_the_admin(server):
    """llama.cpp's route."""
    assert ask(server, "", "/slots").status_code == 401
    assert ask(server, KEY, "/slots").status_code == 403
    until(lambda: ask(server, ADMIN, "/slots?fail_on_no_slot=1").status_code == 200)
    (free,) = ask(server, ADMIN, "/slots").json()
    assert free["is_processing"] is False
    # one sequence after the other
    body = {"prompt": "a secret", "stream": True, "ignore_eos": True, "max_tokens": 500, "n": 100}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEY}
    ) as reply:
        lines = reply.iter_lines()  # kept: when it goes, so does the connection
        name = json.loads(next(lines)[6:])["id"]
        until(lambda: ask(server, ADMIN, "/slots?fail_on_no_slot=1").status_code == 503)
        # between two sequences
        while not (slot := ask(server, ADMIN, "/slots").json()[0])["is_processing"]:
            pass
    assert slot["id_task"].startswith(name)
    assert slot["n_prompt_tokens"] == len("a secret")
    assert "secret" not in json.dumps(slot)


def test_prompts_of_another_key_are_not_found_in_the_cache(server):
    def cached(key):
        body = {"prompt": "the same long prefix of all " * 8, "max_tokens": 1}
        reply = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}
        ).json()
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER) == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "mill.example"}, 200),
        ({"host": "localhost:99999999999"}, 200),
        ({"host": "["}, 403),
        ({"host": "10.1.2.3:8000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://chat.example"}, 200),
    ],
)
def test_hosts_and_origins(server, headers, status):
    assert ask(server, **headers).status_code == status


def test_a_page_of_an_allowed_origin_may_ask(server):
    asked = ask(
        server,
        "",
        method="OPTIONS",
        origin="https://chat.example",
        access_control_request_method="POST",
    )
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    names = (
        "authorization, x-api-key, x-stainless-lang, x-stainless-retry-count, openai-organization"
    )
    asked = ask(
        server,
        "",
        method="OPTIONS",
        origin="https://chat.example",
        access_control_request_headers=names,
    )
    assert asked.headers["access-control-allow-headers"] == names
    for key, path, status in (
        ("", "/v1/models", 401),
        (KEY, "/v1/nothing", 404),
        (KEY, "/metrics", 403),
    ):
        refused = ask(server, key, path, origin="https://chat.example")
        assert refused.status_code == status
        assert refused.headers.get_list("access-control-allow-origin") == ["https://chat.example"]
    refused = ask(server, "", origin="https://evil.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert (
        ask(server, origin="https://chat.example").headers["access-control-allow-origin"]
        == "https://chat.example"
    )
    assert "access-control-allow-origin" not in ask(server).headers


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/v1%2fmodels",
        "/v1/models/",
        "/v1/models/..%2f..",
        "/v1/%00",
        "/V1/models",
        "/v1\\models",
    ],
)
def test_tricks_with_paths_lead_nowhere(server, path):
    assert plainly(server, f"GET {path} HTTP/1.1") in (404, 400)


@pytest.mark.parametrize("length", ["1000000000", "99999999999999999999999999", "-1", "x"])
def test_a_body_of_too_many_bytes_is_not_waited_for(server, length):
    """No byte of it is sent, and there is a response."""
    assert plainly(server, "POST /v1/completions HTTP/1.1", f"Content-Length: {length}") in (
        413,
        400,
    )


def plainly(server, *lines):
    """The status of a request as it is written."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            "\r\n".join(
                [*lines, "Host: localhost", f"x-api-key: {KEY}", "Connection: close", "", ""]
            ).encode()
        )
        return int(b"".join(iter(lambda: raw.recv(65536), b"")).split()[1])


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", 405), ("PUT", 405), ("DELETE", 405), ("OPTIONS", 204)]
)
def test_other_methods(server, method, status):
    assert ask(server, method=method).status_code == status


def test_headers_without_end_are_cut_off(server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        try:
            while sent < 100 * 2**20:
                sent += raw.send(b"x" * 65536)
            reply = raw.recv(1000)
        except OSError:
            reply = b""
        assert sent < 10 * 2**20
        assert not reply or b" 431 " in reply
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_many_headers_are_cut_off(server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for i in range(10**6):
                raw.sendall(b"X-%d: y\r\n" % i)
        except OSError:
            pass
        assert i < 10**6 - 1


async def test_the_rest_of_a_body_is_taken_after_an_early_response():
    """A route that answers without reading its body leaves the connection as it should be."""

    async def app(scope, receive, send):
        await send(
            {"type": "http.response.start", "status": 501, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body", "body": b""})

    async with behind_our_protocol(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = 2**20
        for _ in range(2):  # the second request on the same connection
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
            assert b" 501 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LONG_S)
            writer.write(b"x" * size)
            await writer.drain()
        writer.close()


async def test_who_reads_slowly_is_not_who_does_not_read(monkeypatch):
    monkeypatch.setattr(connections, "READ_WITHIN_S", 1.0)
    size = 30 * 2**20
    is_cut_off = asyncio.Event()
    plain = connections.BoundedProtocol.connection_lost
    monkeypatch.setattr(
        connections.BoundedProtocol,
        "connection_lost",
        lambda self, why: (plain(self, why), is_cut_off.set()),
    )

    async def app(scope, receive, send):
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(size).encode())],
            }
        )
        await send({"type": "http.response.body", "body": b"x" * size})

    async with behind_our_protocol(app) as port:
        for pauses, is_whole in ([0.05] * 30, True), ([], False):
            is_cut_off.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            if not is_whole:
                await is_cut_off.wait()
            num = 0
            with contextlib.suppress(ConnectionError):
                while num < size and (part := await reader.read(2**20)):
                    num += len(part)
                    await asyncio.sleep(pauses.pop() if pauses else 0)
            assert (num == size) is is_whole
            writer.close()
            await is_cut_off.wait()


def test_tenants_are_kept_apart_without_an_admin_key(tenants):
    """The same id stands for two requests, and neither tenant sees what shows both."""
    for path in ("/metrics", "/v1/engine/live"):
        for key in KEYS:
            refused = ask(tenants, key, path)
            assert refused.status_code == 403
            assert "--admin-key" in refused.json()["error"]["message"]
    headers = [{"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in KEYS]
    body = {"prompt": [5] * 8, "max_tokens": 400, "ignore_eos": True}
    bodies = [body | {"n": 64}, body]  # the first is still running when it is cancelled
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(httpx.post, f"{tenants.url}/v1/completions", json=given, headers=one)
            for given, one in zip(bodies, headers, strict=True)
        ]
        while (
            httpx.delete(f"{tenants.url}/v1/requests/same", headers=headers[0]).status_code != 200
        ):
            assert not asked[0].done()
        assert [one.result().status_code for one in asked] == [499, 200]
    stories = httpx.get(f"{tenants.url}/v1/requests/same/explain", headers=headers[1]).json()[
        "data"
    ]
    assert [story["status"] for story in stories] == ["length"]


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.3)

    async def app(scope, receive, send):
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body"})

    async with behind_our_protocol(app) as port:
        for start in (b"", b"GET / HTTP/1.1\r\nHo"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            assert await reader.read() == b""
        monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 60.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):  # one that speaks is served, again and again
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("keys", "admin_keys", "asked_with", "status"),
    [
        ([], [], "", 200),
        ([KEY], [], KEY, 200),
        ([KEY, KEY], [], KEY, 200),  # one tenant
        ([KEY, OTHER], [], KEY, 403),
        ([KEY, OTHER], [ADMIN], KEY, 403),
        ([KEY], [ADMIN], KEY, 403),
        ([KEY, OTHER], [ADMIN], ADMIN, 200),
    ],
)
async def test_who_may_see_the_requests_of_all_tenants(keys, admin_keys, asked_with, status):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    guarded = RequestMiddleware(Guard(app, Access.of(keys, None, admin_keys, [], [])), None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded), base_url="http://localhost"
    ) as client:
        for path in ADMIN_PATHS:
            assert (await client.get(path, headers={"x-api-key": asked_with})).status_code == status


@pytest.mark.parametrize(
    ("key", "priority", "status", "allowed"),
    [
        (KEY, -1, 403, "from 0 to 100"),
        (KEY, 0, 200, ""),
        (KEY, 100, 200, ""),
        (KEY, None, 200, ""),
        (KEY, -(2**31), 400, "100"),
        (OTHER, 4, 403, "from 5 to 100"),
        (OTHER, 5, 200, ""),
        (ADMIN, -100, 200, ""),
        (ADMIN, -101, 400, "100"),
    ],
)
def test_a_key_cannot_ask_for_more_urgency_than_it_has(server, key, priority, status, allowed):
    body = {"prompt": "x", "max_tokens": 1, "priority": priority}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key})
    assert reply.status_code == status
    if status != 200:
        assert reply.json()["error"]["param"] == "priority"
        assert allowed in reply.json()["error"]["message"]


def test_priorities_of_keys(tmp_path):
    (tmp_path / "keys").write_text(f"{KEY} priority=-3\n\n# comment\n{OTHER}\n")
    access = Access.of([], str(tmp_path / "keys"), [f"{ADMIN} priority=7"], [], [])
    callers = {key: access.caller_with(key) for key in (KEY, OTHER, ADMIN)}
    assert [caller.priority_of(None) for caller in callers.values()] == [-3, 0, 7]
    assert [caller.is_admin for caller in callers.values()] == [False, False, True]
    assert callers[KEY].priority_of(50) == 50
    assert callers[ADMIN].priority_of(-100) == -100
    for caller in callers.values():
        assert replace(access.caller_of(caller.tenant), call=caller.call) == caller
        lines = [
            replace(caller, in_background=True).priority_of(asked)
            for asked in (caller.priority, 100)
        ]
        assert BACKGROUND <= lines[0] < lines[1]
    assert access.caller_of("unknown") is None
    assert Access().caller_of("").priority_of(-100) == -100
    sealed = Access.of([f"{KEY} record-text=off priority=2", OTHER], None, [], [], [])
    assert sealed.private_tenants == {sealed.caller_with(KEY).tenant}
    assert sealed.caller_with(KEY).priority == 2
    for settings in (
        "record-text=maybe",
        "priority=101",
        "priority=x",
        "urgent",
        "priority=1 priority=2",
    ):
        wrong = f"{KEY} {settings}"
        with pytest.raises(ConfigError, match="priority=N") as refused:
            Access.of([wrong], None, [], [], [])
        assert KEY not in str(refused.value)
    with pytest.raises(ConfigError, match="given twice"):
        Access.of([KEY, f"{KEY} priority=1"], None, [], [], [])


def test_what_keys_may_be_and_where_they_are_needed(tmp_path):
    for wrong in ("", " ", "caf\u00e9"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            Access.of([wrong], None, [], [], [])
    for short in (
        Access.of(["short"], None, [], [], []),
        Access.of([KEY], None, ["short priority=1"], [], []),
    ):
        # the operator's own decision; for others it would be too easy to guess
        short.check_host_is_safe("127.0.0.1")
        with pytest.raises(ConfigError, match="16 characters can be guessed"):
            short.check_host_is_safe("0.0.0.0")
    with pytest.raises(ConfigError, match="cannot be read"):
        Access.of([], str(tmp_path / "none"), [], [], [])
    with pytest.raises(ConfigError, match="without an API key"):
        Access.of([], None, [], [], []).check_host_is_safe("0.0.0.0")
    Access.of([KEY], None, [], [], []).check_host_is_safe("0.0.0.0")
    for host in ("127.0.0.1", "localhost", "::1"):
        Access().check_host_is_safe(host)


@pytest.mark.parametrize(
    ("given", "allowed", "refused"),
    [
        (
            "localhost",
            ["http://localhost", "http://127.0.0.1:3000", "https://[::1]:8"],
            ["http://localhost.evil.com", "null"],
        ),
        ("*", ["http://localhost:1", "https://evil.example", "null"], [""]),
        (
            "https://a.example",
            ["https://a.example"],
            ["http://localhost", "https://a.example:444", ""],
        ),
    ],
)
def test_allowed_origins(given, allowed, refused):
    access = Access.of([], None, [], [], [given])
    assert all(map(access.is_allowed, allowed))
    assert not any(map(access.is_allowed, refused))
