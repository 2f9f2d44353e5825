"""The router in front of stub servers, over real sockets: what is passed on, what is sent again,
and what never is."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.router.stub import Client, Sent, Stub, chat, get, post, response, routed
from tests.waiting import until_async
from tidemill.cluster.router.limits import Limits


async def ask(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    client = await Client.open(port)
    client.send(data)
    try:
        return await client.answer()
    finally:
        client.close()


async def test_turns_of_a_conversation_go_to_one_server_and_conversations_are_spread():
    stubs = [Stub(name) for name in "abc"]
    async with routed(*stubs, check_every_s=60) as (_, port):
        client = await Client.open(port)
        of = []
        # ports are drawn, and with them where each goes: of few, one server may get none
        for number in range(40):
            went = set()
            for turns in (1, 3, 5):
                client.send(post(chat(*(f"{number} {i} " + "x" * 400 for i in range(turns)))))
                went.add(json.loads((await client.answer())[2])["from"])
            assert len(went) == 1
            of += went
        assert len(set(of)) == 3
        assert sum(len(stub.sent) for stub in stubs) == 120
        # they are kept and used again; six are of the first checks
        assert sum(stub.num_connections for stub in stubs) == 9


async def test_headers_between_two_hosts_are_not_passed_on():
    stub = Stub("a")
    async with routed(stub) as (_, port):
        sent = [
            "connection: x-private, keep-alive",
            "x-private: 1",
            "te: gzip",
            "x-kept: 2",
            "x-forwarded-for: 1.2.3.4",
        ]
        status, headers, _ = await ask(
            port, post(chat("hi"), "/v1/chat/completions?q=1", *sent, "authorization: Bearer abc")
        )
        assert status == 200
        assert headers["x-own"] == "1"
        assert "connection" not in headers
        got = stub.sent[0]
        assert got.line == "POST /v1/chat/completions?q=1 HTTP/1.1"
        names = [name for name, _ in got.headers]
        assert not {"connection", "x-private", "te"} & set(names)
        assert got.header("host") == f"127.0.0.1:{stub.port}"
        assert got.header("x-kept") == "2"
        assert got.header("authorization") == "Bearer abc"
        assert [value for name, value in got.headers if name == "x-forwarded-for"] == ["127.0.0.1"]


async def test_a_key_of_the_upstream_takes_the_place_of_the_clients():
    stub = Stub("a")
    async with routed(stub, upstream_key="key-of-the-upstream") as (_, port):
        await ask(
            port,
            post(
                chat("hi"), "/v1/chat/completions", "authorization: Bearer mine", "x-api-key: mine"
            ),
        )
        assert stub.sent[0].header("authorization") == "Bearer key-of-the-upstream"
        assert stub.sent[0].header("x-api-key") is None
        path = "/v1beta/models/x:streamGenerateContent"
        sse = "?alt=sse"
        for query, kept in (
            ("key=mine", ""),
            ("alt=sse&key=mine", sse),
            ("key=mine&alt=sse", sse),
            ("a=key=1&", "?a=key=1&"),
        ):
            await ask(port, post(chat("hi"), f"{path}?{query}", "x-goog-api-key: mine"))
            assert stub.sent[-1].line == f"POST {path}{kept} HTTP/1.1"
            assert stub.sent[-1].header("x-goog-api-key") is None


async def test_a_stream_is_passed_on_as_it_comes():
    going_on = asyncio.Event()

    async def answer(sent: Sent, writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"8\r\ndata: 1\n\r\n1\r\n\n\r\n")
        await going_on.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    async with routed(Stub("a", answer=answer)) as (router, port):
        client = await Client.open(port)
        client.send(post())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        # the rest has not been sent yet
        assert b"data: 1\n" in await client.reader.readuntil(b"\n\r\n")
        going_on.set()
        assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"data: 2\n\n\r\n0\r\n\r\n")
        client.send(get("/load"))  # the connection can be used again
        assert (await client.answer())[0] == 200
        assert router.num_under_way == 0


async def test_a_client_that_leaves_ends_its_request_at_the_server():
    async def answer(sent: Sent, writer) -> None:
        await asyncio.Event().wait()

    stub = Stub("a", answer=answer)
    async with routed(stub) as (router, port):
        client = await Client.open(port)
        client.send(post())
        await until_async(lambda: stub.sent)
        client.close()
        await until_async(lambda: stub.num_left == 1)
        assert router.num_under_way == 0
        assert router.upstreams[stub.url].load == 0


@pytest.mark.parametrize(
    "how", ["refuses connections", "closes without an answer", "is not ready", "is full"]
)
async def test_another_server_answers_for_one_that_does_not_take_the_request(how):
    async def close(sent: Sent, writer) -> None:
        writer.transport.abort()

    async def not_ready(sent: Sent, writer) -> None:
        writer.write(response(b"{}", "503 Service Unavailable", "retry-after: 1"))

    async def full(sent: Sent, writer) -> None:
        writer.write(response(b"{}", "429 Too Many Requests", "retry-after: 1"))

    bad, good = Stub("bad"), Stub("good")
    async with routed(bad, good, check_every_s=60) as (router, port):
        if how == "refuses connections":
            bad.stop()
        else:
            bad.answer = {
                "closes without an answer": close,
                "is not ready": not_ready,
                "is full": full,
            }[how]
        for number in range(40):  # half of them would go to the bad one
            status, _, body = await ask(port, post(chat(f"conversation {number}")))
            assert (status, json.loads(body)["from"]) == (200, "good")
        assert len(good.sent) == 40
        assert router.num_retries >= 1
        assert how == "is full" or len(bad.sent) <= 1  # it was sent nothing more for a while


async def test_nothing_is_sent_again_once_a_byte_was_passed_on():
    async def dies(sent: Sent, writer) -> None:
        if b'"stream"' in sent.body:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            writer.write(b"9\r\ndata: 1\n\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    stubs = [Stub("a", answer=dies), Stub("b", answer=dies)]
    async with routed(*stubs) as (router, port):
        status, _, body = await ask(port, post(chat("hi", stream=True)))
        events = body.decode().strip().split("\n\n")
        assert (status, events[0].strip()) == (200, "data: 1")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "upstream_error"
        client = await Client.open(port)
        client.send(post())
        # and the connection ends before all of it is there
        assert (await client.rest()).endswith(b"\r\n\r\nabc")
        assert sum(len(stub.sent) for stub in stubs) == 2
        assert router.num_failed == 2


async def test_what_changes_a_servers_state_is_not_sent_twice():
    async def close(sent: Sent, writer) -> None:
        writer.transport.abort()

    stubs = [Stub("a", answer=close), Stub("b", answer=close)]
    async with routed(*stubs) as (_, port):
        status, _, body = await ask(port, post({"metadata": {}}, "/v1/conversations"))
        assert (status, json.loads(body)["error"]["type"]) == (502, "upstream_error")
        assert sum(len(stub.sent) for stub in stubs) == 1


async def test_a_response_goes_on_at_the_server_that_has_it():
    def answers(name: str):
        async def answer(sent: Sent, writer) -> None:
            if sent.line.startswith("GET"):
                writer.write(response(b"{}", "200 OK" if name == "b" else "404 Not Found"))
            else:
                writer.write(response(json.dumps({"from": name}).encode()))

        return answer

    stubs = [Stub(name, answer=answers(name)) for name in "abc"]
    async with routed(*stubs) as (_, port):
        for number in range(3):
            body = {"model": "m", "input": f"{number}", "previous_response_id": "resp_1"}
            assert json.loads((await ask(port, post(body, "/v1/responses")))[2])["from"] == "b"
        asked = [sent.path for stub in stubs for sent in stub.sent if sent.line.startswith("GET")]
        assert asked == ["/v1/responses/resp_1"] * 3  # of each server, once
        named = (
            {"type": "item_reference", "id": "msg_1"},
            {"id": "msg_2"},
            {"id": "msg_3", "type": None},
        )
        for number, reference in enumerate(named):
            items = [
                {"role": "user", "content": f"{number}", "id": "msg_0"},
                {"type": "reasoning", "id": "rs_0"},
                reference,
            ]
            made = await ask(port, post({"model": "m", "input": items}, "/v1/responses"))
            assert json.loads(made[2])["from"] == "b"
        asked = {sent.path for stub in stubs for sent in stub.sent if "response_items" in sent.path}
        assert asked == {f"/v1/response_items/{one['id']}" for one in named}
        assert (await ask(port, get("/v1/responses/resp_1")))[0] == 200


async def test_what_a_server_that_is_down_may_have_is_not_said_to_be_missing():
    async def missing(sent: Sent, writer) -> None:
        writer.write(
            response(b'{"from": "home"}', "200 OK" if sent.path == "/v1/files" else "404 Not Found")
        )

    stubs = [Stub(name, answer=missing) for name in "ab"]
    async with routed(*stubs) as (router, port):
        assert (await ask(port, get("/v1/files/file-1")))[0] == 404  # all say so
        assert (await ask(port, get("/v1/files")))[0] == 200
        home = next(stub for stub in stubs if any(sent.path == "/v1/files" for sent in stub.sent))
        home.health = response(b"{}", "503 Service Unavailable")
        await until_async(lambda: not router.upstreams[home.url].is_healthy)
        for path in ("/v1/files/file-1", "/v1/files"):  # nor is a list made elsewhere
            status, _, body = await ask(port, get(path))
            assert (status, json.loads(body)["error"]["type"]) == (503, "upstream_unavailable")


async def test_adapters_are_loaded_everywhere_and_the_first_refusal_is_told():
    async def refuse(sent: Sent, writer) -> None:
        writer.write(response(b'{"error": "no"}', "400 Bad Request"))

    stubs = [Stub("a"), Stub("b")]
    async with routed(*stubs) as (_, port):
        assert (await ask(port, post({"lora_name": "x"}, "/v1/load_lora_adapter")))[0] == 200
        assert [len(stub.sent) for stub in stubs] == [1, 1]
        stubs[1].answer = refuse
        assert (await ask(port, post({"lora_name": "x"}, "/v1/load_lora_adapter")))[0] == 400


async def test_models_are_merged_and_a_request_goes_where_its_model_is():
    stubs = [Stub("a", ["m", "only-a"]), Stub("b", ["m", "only-b"])]
    async with routed(*stubs) as (_, port):
        listed = json.loads((await ask(port, get("/v1/models")))[2])["data"]
        assert [(one["id"], one["of"]) for one in listed] == [
            ("m", "a"),
            ("only-a", "a"),
            ("only-b", "b"),
        ]
        for number in range(6):
            body = chat(f"conversation {number}") | {"model": "only-b"}
            assert json.loads((await ask(port, post(body)))[2])["from"] == "b"
            body = b"\r\n " + json.dumps(body).encode()
            assert json.loads((await ask(port, post(body)))[2])["from"] == "b"
        for name in ("only-a", "only-b"):
            for _ in range(2):
                assert (
                    json.loads((await ask(port, get(f"/v1/models/{name}")))[2])["from"] == name[-1]
                )
        listed = json.loads((await ask(port, get("/api/tags")))[2])["models"]
        assert [one["name"] for one in listed] == ["m:latest", "only-a:latest", "only-b:latest"]
        for name in ("only-b:latest", "alias-of-only-b"):
            for number in range(6):
                body = chat(f"conversation {number}") | {"model": name}
                assert json.loads((await ask(port, post(body, "/api/chat")))[2])["from"] == "b"


async def test_a_name_with_latest_goes_to_the_server_that_lists_it_so():
    stubs = [Stub("a", ["m", "x"]), Stub("b", ["m:latest", "y:latest"])]
    async with routed(*stubs) as (_, port):
        for number in range(8):
            for name, of in (("m", "a"), ("m:latest", "b"), ("x:latest", "a"), ("y", "b")):
                body = chat(f"conversation {number}") | {"model": name}
                assert json.loads((await ask(port, post(body)))[2])["from"] == of


async def test_a_server_that_fails_its_checks_gets_nothing_and_what_waits_there_goes_elsewhere():
    async def never(sent: Sent, writer) -> None:
        await asyncio.Event().wait()

    hung, good = Stub("hung"), Stub("good")
    async with routed(hung, good) as (router, port):
        good.health = response(b"{}", "503 Service Unavailable")
        await until_async(lambda: not router.upstreams[good.url].is_healthy)
        hung.answer = never
        waiting = asyncio.create_task(ask(port, post()))
        await until_async(lambda: hung.sent)
        good.health = response(b"{}")
        await until_async(lambda: router.upstreams[good.url].is_healthy)
        hung.health = response(b"{}", "500 Internal Server Error")
        assert json.loads((await waiting)[2])["from"] == "good"
        assert json.loads((await ask(port, get("/health")))[2]) == {
            "status": "ok",
            "healthy": 1,
            "upstreams": 2,
        }
        good.health = hung.health
        await until_async(lambda: not router.upstreams[good.url].is_healthy)
        assert (await ask(port, get("/health")))[0] == 503
        status, headers, body = await ask(port, post())
        assert (status, headers["retry-after"], json.loads(body)["error"]["type"]) == (
            503,
            "1",
            "upstream_unavailable",
        )


async def test_a_request_that_waited_for_a_connection_is_not_sent_there_once_another_server_answers_it():
    reachable, going_on = asyncio.Event(), asyncio.Event()

    async def stream(sent: Sent, writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await going_on.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    slow, good = Stub("slow"), Stub("good", answer=stream)
    async with routed(slow, good, check_within_s=0.3) as (router, port):
        good.health = response(b"{}", "503 Service Unavailable")
        await until_async(lambda: not router.upstreams[good.url].is_healthy)
        upstream = router.upstreams[slow.url]
        connect = upstream.connect

        async def connect_later():
            await reachable.wait()
            return await connect()

        upstream.connect = connect_later
        client = await Client.open(port)
        client.send(post())
        await until_async(lambda: router.num_under_way == 1)
        good.health = response(b"{}")
        # the checks of the other fail, too
        assert b"data: 1" in await client.reader.readuntil(b"data: 1")
        reachable.set()
        await until_async(lambda: upstream.is_healthy)
        assert (len(slow.sent), len(good.sent), upstream.load) == (0, 1, 0)
        going_on.set()
        assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"data: 2\n\n\r\n0\r\n\r\n")
        client.send(get("/load"))
        assert (await client.answer())[0] == 200


async def test_servers_are_added_and_removed_while_requests_are_under_way():
    going_on = asyncio.Event()

    async def slow(sent: Sent, writer) -> None:
        await going_on.wait()
        writer.write(response(b'{"from": "a"}'))

    first, second = Stub("a", answer=slow), await Stub("b").start()
    async with routed(first) as (router, port):
        waiting = asyncio.create_task(ask(port, post()))
        await until_async(lambda: first.sent)
        assert (await ask(port, post({"url": second.url}, "/router/upstreams")))[0] == 200
        await until_async(lambda: router.upstreams[second.url].is_healthy)
        gone = post({"url": first.url}, "/router/upstreams").replace(b"POST", b"DELETE", 1)
        assert (await ask(port, gone))[0] == 200
        assert (await ask(port, gone))[0] == 404
        assert json.loads((await ask(port, post()))[2])["from"] == "b"
        going_on.set()
        assert json.loads((await waiting)[2])["from"] == "a"
    second.stop()


async def test_requests_over_a_unix_socket_leave_their_limit(tmp_path):
    async with routed(Stub("a"), limits=Limits(1)) as (router, _):
        server = await asyncio.get_running_loop().create_unix_server(
            router.clients.make, tmp_path / "s"
        )
        client = Client(*await asyncio.open_unix_connection(tmp_path / "s"))
        for _ in range(3):
            client.send(post({}, "/flush_cache"))
            assert (await client.answer())[0] == 200
        client.close()
        server.close()


async def test_a_host_that_is_gone_is_noticed_though_nothing_is_sent_to_it():
    async with routed(Stub("a")) as (router, _):
        (upstream,) = router.upstreams.values()
        connection = await upstream.connect()
        assert connection._transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE
        )
        connection.close()


async def test_draining_lets_what_is_under_way_end():
    going_on = asyncio.Event()

    async def slow(sent: Sent, writer) -> None:
        await going_on.wait()
        writer.write(response(b"{}"))

    stub = Stub("a", answer=slow)
    async with routed(stub) as (router, port):
        busy, idle, late = [await Client.open(port) for _ in range(3)]
        busy.send(post())
        late.send(b"POST / HTTP/1.1\r\nhost: localhost\r\n")
        await until_async(lambda: stub.sent)
        draining = asyncio.create_task(router.drain(30))
        assert await idle.rest() == b""
        late.send(b"content-length: 0\r\n\r\n")
        status, _, body = await late.answer()
        assert (status, json.loads(body)["error"]["type"]) == (503, "server_stopping")
        going_on.set()
        status, headers, _ = await busy.answer()
        assert (status, headers["connection"]) == (200, "close")
        await draining
        assert router.num_under_way == 0
