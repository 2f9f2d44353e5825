"""Clients that are hostile or broken: what they send is bounded in size and time, and never read in
two ways."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.router.stub import Client, Sent, Stub, chat, get, post, response, routed
from tests.router.test_forward import ask
from tests.waiting import until_async
from tidemill.cluster.router import client_connection, upstream
from tidemill.cluster.router.limits import Limits
from tidemill.cluster.router.upstream import Upstream
from tidemill.server.http.access import Access, Caller

SMUGGLED = b"POST /smuggled HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
BROKEN = {
    "both lengths": HEAD
    + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "both, the other way": HEAD
    + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two lengths": HEAD + b"content-length: 0\r\ncontent-length: 40\r\n\r\n" + SMUGGLED,
    "length with a sign": HEAD + b"content-length: +5\r\n\r\nabcde" + SMUGGLED,
    "another encoding": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunked twice": HEAD
    + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "space before the colon": HEAD + b"content-length : 0\r\n\r\n" + SMUGGLED,
    "folded header": HEAD + b"x: 1\r\n content-length: 10\r\n\r\n" + SMUGGLED,
    "bare line feeds": HEAD.replace(b"\r\n", b"\n") + b"content-length: 0\n\n" + SMUGGLED,
    "chunk size with junk": HEAD
    + b"transfer-encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n"
    + SMUGGLED,
    "absolute target": b"GET http://169.254.169.254/ HTTP/1.1\r\nhost: localhost\r\n\r\n"
    + SMUGGLED,
    "tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "many headers": HEAD
    + b"".join(b"x-%d: 1\r\n" % i for i in range(300))
    + b"content-length: 0\r\n\r\n"
    + SMUGGLED,
    "long header": HEAD + b"x: " + b"a" * 70_000 + b"\r\n\r\n" + SMUGGLED,
    "header without end": HEAD + b"x: " + b"a" * 140_000,
    "empty lines": b"\r\n" * 50_000,
    "long trailers": HEAD
    + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    + b"x: aaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 5_000,
    "announced too large": HEAD + b"content-length: 99999999999\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_what_is_not_clearly_one_request_is_refused_whole(data):
    stub = Stub("a")
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        client.send(data)
        answer = await client.rest()  # and the connection ends
        assert answer.startswith((b"HTTP/1.1 4", b"")), answer
        assert answer.count(b"HTTP/1.1 ") <= 1
        if answer:
            assert (
                json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"]
                == "invalid_request_error"
            )
        assert not stub.sent
        assert router.clients.num_buffered == 0
        assert (await ask(port, post()))[0] == 200


async def test_bodies_in_chunks_and_pipelined_requests_are_answered_in_order():
    stub = Stub("a")

    async def echo(sent: Sent, writer) -> None:
        await asyncio.sleep(0.02 if b"first" in sent.body else 0)
        writer.write(response(sent.body))

    stub.answer = echo
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        chunked = b"transfer-encoding: chunked\r\n\r\n5;ext=1\r\nfirst\r\n3\r\n...\r\n0\r\nx-trailer: 1\r\n\r\n"
        client.send(HEAD + chunked + post(b"second") + get("/load") + post(b"third"))
        assert [(await client.answer())[2] for _ in range(2)] == [b"first...", b"second"]
        assert json.loads((await client.answer())[2]) == {"server_load": 0}
        assert (await client.answer())[2] == b"third"
        assert [sent.header("content-length") for sent in stub.sent] == ["8", "6", "5"]
        client.send(post() * 40)  # without waiting for any answer
        answers = await client.rest()
        assert 1 <= answers.count(b"HTTP/1.1 200") <= client_connection.MAX_PIPELINED + 2
        client.close()
        await until_async(lambda: not router.clients.all)
        assert router.clients.num_buffered == 0


async def test_a_head_that_comes_again_is_read_as_the_first_time():
    """Bytes that were parsed once are not parsed again; whatever differs from them is."""
    stub = Stub("a")
    async with routed(stub, access=Access.of(["a" * 16], None, [], [], [])) as (router, port):
        client = await Client.open(port)
        key = "authorization: Bearer " + "a" * 16
        for body in (b"1", b"22", b"", b"a" * 999):
            client.send(post(body, "/v1/completions", key))
            assert (await client.answer())[0] == 200
        assert [(sent.body, sent.header("content-length")) for sent in stub.sent] == [
            (b"1", "1"), (b"22", "2"), (b"", "0"), (b"a" * 999, "999"),
        ]  # fmt: skip
        again = post(b"whole", "/v1/completions", key)
        client.send(again[:-2])  # in two pieces
        await asyncio.sleep(0.02)
        client.send(again[-2:] + again)  # and with the next one behind it
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        # two in a piece: the length ends the first
        client.send(again[:-5] + b"other" + get("/v1/completions", key))
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        assert [sent.body for sent in stub.sent[4:]] == [b"whole", b"whole", b"other", b""]
        client.send(post(b"1", "/v1/completions", key.replace("a" * 16, "b" * 16)))
        assert (await client.answer())[0] == 401
        assert router.clients.num_buffered == 0
        client = await Client.open(port)
        for number in ("1", "2\x01", "3"):  # a header of each request's own
            client.send(
                post(
                    number.encode(),
                    "/v1/completions",
                    key,
                    f"x-id: {number}",
                    "connection: keep-alive",
                )
            )
            if number == "2\x01":
                assert (await client.rest()).startswith(b"HTTP/1.1 4")
                client = await Client.open(port)
            else:
                assert (await client.answer())[0] == 200
        assert [(sent.body, sent.header("x-id")) for sent in stub.sent[8:]] == [
            (b"1", "1"),
            (b"3", "3"),
        ]
        for other in (
            b"host: elsewhere.example",
            b"transfer-encoding: chunked",
            b"x-id : 1",
            b"x-id: 1\r\n 2",
        ):
            client = await Client.open(port)
            client.send(again)
            assert (await client.answer())[0] == 200
            client.send(again.replace(b"host: localhost", other))
            assert (await client.rest()).startswith(b"HTTP/1.1 4")
        before = len(stub.sent)
        for length in (b"+1", b" 1 1", b"1\n", b"0x1", b"99999999999"):
            client = await Client.open(port)
            client.send(again)
            assert (await client.answer())[0] == 200
            client.send(
                again.replace(b"content-length: 5", b"content-length: " + length)[:-5] + b"1"
            )
            assert (await client.rest()).startswith(b"HTTP/1.1 4")
        assert len(stub.sent) == before + 5


class Wire:
    """What the router writes to a client goes nowhere."""

    write = abort = close = write_eof = lambda self, data=b"": None

    def get_extra_info(self, name):
        return ("127.0.0.1", 1)

    def can_write_eof(self):
        return True


def taken(*pieces: bytes) -> list[tuple]:
    """Requests as a connection hands them on, each answered at once."""
    found = []

    def handle(made, request):
        found.append(
            (
                request.method,
                request.target,
                request.headers,
                request.first,
                request.head_for(b"u", b""),
                request.body,
            )
        )
        made.answer(200, b"")

    made = client_connection.ClientConnections(lambda request: Caller(), handle, 10).make()
    made.connection_made(Wire())
    for piece in pieces:
        made.data_received(piece)
    return found


async def test_a_head_like_the_one_before_means_what_it_would_alone():
    base = post(
        b"body",
        "/v1/completions",
        "x-id: 17",
        "connection: keep-alive",
        "X-Other:  spaced ",
        "te: x",
        "accept: */*",
    )
    chance, num_alike = random.Random(1), 0
    assert len(taken(base, base)) == 2
    for _ in range(600):
        other = bytearray(base)
        for _ in range(chance.choice((1, 1, 2, 3))):
            at = chance.randrange(len(other))
            how = chance.randrange(3)
            other[at : at + (how != 0)] = (
                bytes([chance.choice(b"\r\n :;,\t\0x19aZ\x7f\x80-")]) if how != 2 else b""
            )
        alone, after = taken(bytes(other)), taken(base, bytes(other))
        assert after[1:] == alone, bytes(other)
        num_alike += len(alone)
    assert num_alike > 60


async def test_an_upgrade_is_not_made_and_what_follows_it_is_not_read():
    stub = Stub("a")
    async with routed(stub) as (_, port):
        client = await Client.open(port)
        client.send(
            post(
                chat("hi"),
                "/v1/chat/completions",
                "upgrade: h2c",
                "connection: upgrade, http2-settings",
            )
            + SMUGGLED
        )
        assert (await client.rest()).count(b"HTTP/1.1 200") == 1
        assert len(stub.sent) == 1
        assert stub.sent[0].header("upgrade") is None


async def test_a_body_that_grows_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(client_connection, "MAX_BODY_BYTES", 10_000)
    stub = Stub("a")
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        client.send(
            HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"a" * 1024 + b"\r\n"
        )
        for _ in range(12):
            client.send(b"400\r\n" + b"a" * 1024 + b"\r\n")
        assert (await client.answer())[0] == 413
        monkeypatch.setattr(client_connection, "MAX_BUFFERED_BYTES", 5_000)
        assert (await ask(port, post(b"a" * 9_000)))[0] == 429  # of all requests together
        assert router.clients.num_buffered == 0
        assert not stub.sent


async def test_slow_clients_are_closed(monkeypatch):
    monkeypatch.setattr(client_connection, "_SWEEP_EVERY_S", 0.02)
    monkeypatch.setattr(client_connection, "HEADERS_WITHIN_S", 0.2)
    monkeypatch.setattr(client_connection, "PART_WITHIN_S", 0.2)
    async with routed(Stub("a")) as (router, port):
        silent, in_head, in_body = [await Client.open(port) for _ in range(3)]
        in_head.send(b"POST / HTTP/1.1\r\nhost: ")
        in_body.send(post()[:-5])
        assert await silent.rest() == b""
        assert (await in_head.answer())[0] == 408
        assert (await in_body.answer())[0] == 408
        in_head.close()
        in_body.close()
        await until_async(lambda: not router.clients.all)


async def test_a_client_that_does_not_read_holds_back_its_server_and_is_closed(monkeypatch):
    monkeypatch.setattr(client_connection, "_SWEEP_EVERY_S", 0.02)
    monkeypatch.setattr(client_connection, "READ_WITHIN_S", 0.3)
    written = 0

    async def endless(sent: Sent, writer) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            written += 65536
            await writer.drain()

    stub = Stub("a", answer=endless)
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        client.writer.transport.pause_reading()
        client.send(post())
        await until_async(lambda: stub.num_left == 1)
        assert written < 64 * 2**20  # buffers of the sockets, and no more
        assert router.num_under_way == 0


async def test_connections_are_limited(monkeypatch):
    async with routed(Stub("a"), max_connections=4) as (_, port):
        idle = [await Client.open(port) for _ in range(2)]
        refused = await Client.open(port)
        assert (await refused.answer())[0] == 429  # half of them may be idle and of one address
        for one in idle:
            one.send(post())
            assert (await one.answer())[0] == 200


async def test_limits_of_a_key():
    going_on = asyncio.Event()

    async def slow(sent: Sent, writer) -> None:
        await going_on.wait()
        writer.write(response(b"{}"))

    keys = ["key-of-the-first-user", "key-of-the-other-user"]
    stub = Stub("a", answer=slow)
    access = Access.of(keys, None, [], [], [])
    now = 1000.0
    async with routed(stub, access=access, limits=Limits(2, 5, lambda: now)) as (router, port):
        first, other = (f"authorization: Bearer {key}" for key in keys)
        waiting = [
            asyncio.create_task(ask(port, post(chat("hi"), "/v1/chat/completions", first)))
            for _ in range(2)
        ]
        await until_async(lambda: len(stub.sent) == 2)
        status, headers, body = await ask(port, post(chat("hi"), "/v1/chat/completions", first))
        assert (status, headers["retry-after"], json.loads(body)["error"]["type"]) == (
            429,
            "1",
            "rate_limit_error",
        )
        waiting.append(
            asyncio.create_task(ask(port, post(chat("hi"), "/v1/chat/completions", other)))
        )
        await until_async(lambda: len(stub.sent) == 3)  # nobody else is touched
        going_on.set()
        assert [(await one)[0] for one in waiting] == [200] * 3
        statuses = [
            (await ask(port, post(chat("hi"), "/v1/chat/completions", first)))[0] for _ in range(4)
        ]
        assert statuses == [200, 200, 200, 429]  # five in a minute
        now += 13  # the time of one
        statuses = [
            (await ask(port, post(chat("hi"), "/v1/chat/completions", first)))[0] for _ in range(2)
        ]
        assert statuses == [200, 429]
        assert router.limits.num_refused == 3


async def test_keys_hosts_origins_and_paths_are_checked_as_by_a_server():
    access = Access.of(["key-of-the-first-user"], None, ["key-of-the-only-admin"], [], [])
    stub = Stub("a")
    async with routed(stub, access=access) as (_, port):
        user, admin = (
            "authorization: Bearer key-of-the-first-user",
            "x-api-key: key-of-the-only-admin",
        )
        assert (await ask(port, post()))[0] == 401
        assert (await ask(port, get("/health")))[0] == 200
        assert (await ask(port, get("/router/upstreams", user)))[0] == 403
        assert (await ask(port, get("/router/upstreams", admin)))[0] == 200
        assert (await ask(port, get("/metri%63s", user)))[0] == 403
        assert (
            b'tidemill_router_upstream_healthy{upstream="'
            in (await ask(port, get("/metrics", admin)))[2]
        )
        for path in ("/metrics", "/router/upstreams", "/flush_cache"):
            assert json.loads((await ask(port, get(path).replace(b"GET", b"OPTIONS", 1)))[2]) == {
                "from": "a"
            }
        stub.sent.clear()
        # it is taken without a key
        assert (await ask(port, post().replace(b"POST", b"OPTIONS", 1)))[0] == 413
        assert (await ask(port, get("/v1/../metrics", user)))[0] == 400
        assert (
            await ask(
                port, post(chat("hi"), "/v1/chat/completions", user, "origin: http://evil.example")
            )
        )[0] == 403
        assert (
            await ask(
                port,
                post(chat("hi"), "/v1/chat/completions", user).replace(
                    b"localhost", b"evil.example"
                ),
            )
        )[0] == 403
        assert (await ask(port, post(chat("hi"), "/v1/chat/completions", user, "host: localhost")))[
            0
        ] == 400
        assert not stub.sent
        assert (
            await ask(
                port, post(chat("hi"), "/v1/chat/completions", user, "origin: http://localhost")
            )
        )[0] == 200
        assert stub.sent[0].header("origin") is None  # the server knows another host


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_an_upstream_that_does_not_speak_http_is_an_error(answer):
    async def broken(sent: Sent, writer) -> None:
        writer.write(answer)

    async with routed(Stub("a", answer=broken)) as (router, port):
        client = await Client.open(port)
        client.send(post(chat("hi"), "/v1/chat/completions", "connection: close"))
        got = await client.rest()
        assert got.startswith(b"HTTP/1.1 502") or got == b""
        assert router.num_under_way == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://a/path",
        "http://a:99999",
        "unix:",
        "http://a b",
    ],
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(Exception, match="The upstream is"):
        upstream.Upstream(url)


async def test_old_clients_and_head_requests():
    async def stream(sent: Sent, writer) -> None:
        if sent.line.startswith("HEAD"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            )

    async with routed(Stub("a", answer=stream)) as (_, port):
        client = await Client.open(port)
        client.send(b"GET /x HTTP/1.0\r\nhost: localhost\r\n\r\n")
        # HTTP/1.0 has no chunks: the end of the connection is that of the body
        answer = await client.rest()
        assert answer.endswith(b"\r\n\r\nabcde")
        assert b"chunked" not in answer
        client = await Client.open(port)
        client.send(b"HEAD /x HTTP/1.1\r\nhost: localhost\r\n\r\n" + get("/x"))
        assert b"content-length: 5" in await client.reader.readuntil(b"\r\n\r\n")
        assert (await client.answer())[2] == b"abcde"


async def test_an_upstream_behind_a_unix_socket(tmp_path):
    stub = Stub("a")
    path = tmp_path / "s"
    server = await asyncio.start_unix_server(stub._serve, path)
    made = Upstream(f"unix:{path}")
    async with routed(stub) as (router, port):
        router.upstreams = {made.url: made}
        made.is_healthy = True
        assert json.loads((await ask(port, post()))[2])["from"] == "a"
        assert stub.sent[0].header("host") == "localhost"
    server.close()


async def test_the_routers_own_requests_for_a_client_have_one_end():
    stub = Stub("a")
    async with routed(stub, check_every_s=60) as (router, port):
        assert (await ask(port, post(SMUGGLED, "/v1/models").replace(b"POST", b"GET", 1)))[0] == 200
        client = await Client.open(port)
        client.send(get("/v1/models", "connection: close").replace(b"GET", b"HEAD", 1))
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
        assert router.upstreams[stub.url].is_usable  # a response without a body is no failure
        assert (await ask(port, post()))[0] == 200
        assert [sent.path for sent in stub.sent] == ["/v1/chat/completions"]


async def test_bodies_of_clients_that_leave_are_given_back():
    async def never(sent: Sent, writer) -> None:
        await asyncio.Event().wait()

    stub = Stub("a", answer=never)
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        client.send(post() + post())
        await until_async(
            lambda: stub.sent and router.clients.num_buffered > len(stub.sent[0].body)
        )
        client.close()
        await until_async(lambda: not router.clients.all)
        assert router.clients.num_buffered == 0


async def test_a_key_is_checked_before_the_body_is_taken():
    access = Access.of(["key-of-the-first-user"], None, [], [], [])
    async with routed(Stub("a"), access=access) as (router, port):
        client = await Client.open(port)
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 1000\r\n\r\n")
        status, headers, _ = await client.answer()  # without one byte of the body
        assert (status, headers["connection"]) == (401, "close")
        client.close()
        client = await Client.open(port)
        client.send(
            HEAD
            + b"x-api-key: key-of-the-first-user\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"2\r\n[]\r\n" * 100
        )
        await until_async(lambda: router.clients.num_buffered == 200)
        (held,) = (one for one in router.clients.all if one._body)
        assert bytes(held._body) == b"[]" * 100  # and not an object for each piece
        client.close()
        await until_async(lambda: not router.clients.all)
        assert router.clients.num_buffered == 0


@pytest.mark.parametrize("path", ["/health", "/"])
async def test_without_a_key_little_is_held(path):
    async with routed(Stub("a"), access=Access.of(["a" * 16], None, [], [], [])) as (router, port):
        client = await Client.open(port)
        client.send(post(b"{}", path))
        assert (await client.answer())[0] in (200, 405)
        client.send(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n"
            % path.encode()
        )
        assert (await client.answer())[0] == 413
        client = await Client.open(port)
        client.send(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            % path.encode()
        )
        client.send(b"2000\r\n" + b"a" * 0x2000 + b"\r\n")
        assert (await client.answer())[0] == 413
        assert router.clients.num_buffered == 0


async def test_connections_beyond_the_limit_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(client_connection, "REST_WITHIN_S", 60.0)
    async with routed(Stub("a"), max_connections=1) as (router, port):
        kept = await Client.open(port)
        kept.send(post())
        assert (await kept.answer())[0] == 200
        refused = await Client.open(port)
        assert (await refused.answer())[0] == 503
        # though the client has not closed its side
        await until_async(lambda: len(router.clients.all) == 1)
        refused.close()
        kept.send(post())
        assert (await kept.answer())[0] == 200


async def test_bodies_that_are_no_text_are_passed_on_and_take_no_place_for_good():
    stubs = [Stub("a"), Stub("b")]
    deep = b'{"model": "m", "input": [{"type": "item_reference", "x": %s}]}' % (
        b"[" * 995 + b"]" * 995
    )
    bodies = (
        b'{"model": "m", "input": [{"type": "item_reference", "id": "\xff"}]}',
        b'{"messages": [{"role": "\xff"}]}',
        deep,
    )
    async with routed(*stubs, limits=Limits(max_under_way=2)) as (router, port):
        for body in (*bodies, *bodies):
            # servers say what is wrong with them
            assert (await ask(port, post(body, "/v1/responses")))[0] == 200
        assert router.limits.num_refused == 0
        assert router.num_under_way == 0
