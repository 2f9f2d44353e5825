"""Hostile requests against a real server whose model has a hostile chat template: each is refused
with a typed error, or served where it is legal. Other requests complete with the same output, and
memory stays bounded."""

import asyncio
import json
import shutil
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers import LONG_S
from tests.server.conftest import Server, behind_our_protocol
from tests.server.watch import Bystander, percentile, resident_mb
from tidemill.server.http import connections

TEMPLATE = """\
{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}\
{% if fill %}{{ 'x' * 10**11 }}{% endif %}\
{% if write %}{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}{% endif %}\
{% if double %}{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}\
{% if divide %}{{ 1 // 0 }}{% endif %}{% if sort %}{{ [{}, 1]|sort }}{% endif %}\
{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"""

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
BLOCK = {
    "type": "tool_use",
    "id": "a",
    "name": "f",
    "input": {},
    "cache_control": {"type": "ephemeral"},
}
PROMPT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": [BLOCK]}],
    "system": [{"type": "text", "text": "x"}],
}
CALLED = [{"text": "x"}, {"functionCall": {"name": "f", "args": {}}}]
RESULT = [{"functionResponse": {"name": "f", "response": {}}}]
CONTENTS = {
    "contents": [
        {"role": "user", "parts": [{"text": "x"}]},
        {"role": "model", "parts": CALLED},
        {"parts": RESULT},
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "f", "parameters": {"type": "OBJECT", "nullable": True}}
            ]
        }
    ],
    "generationConfig": {"maxOutputTokens": 2},
}
# A valid body of every route, with as much in it as goes together: what is put into its place is
# then looked at.
VALID = {
    "/v1/completions": {"model": "tiny", "prompt": "x", "max_tokens": 2, "structured_outputs": {"json": {"type": "object"}}},
    "/v1/chat/completions": {
        "model": "tiny", "messages": SAID, "max_tokens": 2, "tools": [{"type": "function", "function": TOOL}],
        "response_format": FORMAT, "chat_template_kwargs": {"x": 1},
    },
    "/v1/chat/completions/render": {"model": "tiny", "messages": SAID, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/chat/completions/input_tokens": {"model": "tiny", "messages": SAID},
    "/apply-template": {"model": "tiny", "messages": SAID},
    "/invocations": {"model": "tiny", "prompt": "x", "max_tokens": 2},
    "/completion": {"prompt": "x", "n_predict": 2},
    # for which the model has no tokens
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 2},
    "/embedding": {"content": "x"},
    "/v1/embeddings": {"model": "tiny", "input": "x"},
    "/v1/conversations": {"items": [ITEM], "metadata": {"x": "y"}},
    "/v1/conversations/{conversation_id}": {"metadata": {"x": "y"}},  # of one that is not there
    "/v1/conversations/{conversation_id}/items": {"items": [ITEM]},
    "/v1/responses/input_tokens": {"model": "tiny", "input": [ITEM]},
    "/v1/responses": {
        "model": "tiny", "input": [ITEM], "max_output_tokens": 2, "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    },
    "/v1/messages": PROMPT | {"max_tokens": 2, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens": PROMPT,
    **{f"/v1beta/models/{{name}}:{method}": CONTENTS for method in ("generateContent", "streamGenerateContent")},
    "/v1beta/models/{name}:countTokens": {"contents": CONTENTS["contents"]},
    "/v1/messages/batches": {"requests": [{"custom_id": "x", "params": PROMPT | {"max_tokens": 2}}]},
    "/v1/chat/completions/batch": {"model": "tiny", "messages": [SAID], "max_tokens": 2},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/abort_request": {"rid": "x"},
    "/pooling": {"model": "tiny", "input": "x"},
    "/classify": {"model": "tiny", "input": "x"},
    "/v1/rerank": {"model": "tiny", "query": "x", "documents": ["y"]},
    "/v1/score": {"model": "tiny", "text_1": "x", "text_2": ["y"]},
    "/generative_scoring": {"model": "tiny", "query": "x", "items": ["y"], "label_token_ids": [5, 6]},
    "/v2/embed": {"model": "tiny", "texts": ["x"], "embedding_types": ["float"]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/tokenize": {"messages": SAID},
    "/detokenize": {"tokens": [5]},
    "/v1/prompt_caches": {"name": "x", "model": "tiny", "messages": SAID, "ttl": 60},
    "/v1/prompt_caches/{name}": {"ttl": 60},
    "/v1/prompt_caches/{name}/fork": {"name": "y", "messages": SAID},
    "/v1/batches": {  # of a file that is not there
        "input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"x": "y"},
    },
}  # fmt: skip
# What the description leaves open and the routes look at all the same.
FREE = {
    "/v1/chat/completions": [("messages", 0, "content", 0, "type"), ("messages", 0, "content", 0, "text")],
    "/v1/responses": [
        *(("input", 0, name) for name in ("type", "role", "content", "name", "arguments", "call_id", "output")),
        ("input", 0, "content", 0, "type"), ("input", 0, "content", 0, "text"),
    ],
}  # fmt: skip
HUGE, DEEP = 2**63, {"a": [{"b": [[{"c": {}}]]}]}
VALUES = [
    float("nan"), float("inf"), float("-inf"), -1, 0, 1, 2**31, HUGE, 10**30, 1e300, -0.5, "", "x", "\x00", "é" * 300, "[" * 9999,
    None, True, [], {}, [None], [[]], ["x", 1], [1, 2**70], {"": None}, {"x": HUGE}, {"type": "function"}, DEEP, [DEEP],
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "m"
    shutil.copytree(tiny_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    running = Server(folder).wait()
    ask(
        running,
        "/v1/chat/completions",
        VALID["/v1/chat/completions"] | {"response_format": {"type": "json_object"}},
    )
    yield running
    assert running.stop() == 0


def ask(server, path, body, **more):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | more.pop("headers", {})
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, **more)


def refused(reply, status=400):
    """In words, without a path or an address."""
    assert reply.status_code == status, reply.text[:300]
    error = reply.json()["error"]
    assert error["message"]
    assert len(reply.content) < 2000
    assert not any(word in reply.text for word in ("Traceback", ".py", "/home", "0x"))
    return error


def fields(schema, path=()):
    """Every property, at any depth: paths of names, 0 where a list's item is meant."""
    for kind in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        yield from fields(kind, path)
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name)
        yield from fields(inner, (*path, name))
    if isinstance(schema.get("items"), dict):
        yield (*path, 0)
        yield from fields(schema["items"], (*path, 0))
    if schema.get("type") == "object" and schema.get("additionalProperties"):
        yield (*path, "x")


def put(body, path, value):
    """The body with the value in its place; what is not there on the way is made."""
    if not path:
        return value
    name, *rest = path
    if name == 0:
        first = body[0] if isinstance(body, list) and body else None
        return [put(first, rest, value)]
    made = dict(body) if isinstance(body, dict) else {}
    return made | {name: put(made.get(name), rest, value)}


@pytest.mark.parametrize("num_values", [1, pytest.param(len(VALUES), marks=pytest.mark.slow)])
async def test_every_field_takes_any_value_or_refuses_it(server, num_values):
    """Of each field one value, in turns, or all: some ten thousand bodies."""
    spec = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    schemas = {
        path: told["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, told in spec.items()
        if "application/json" in told.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert set(schemas) == set(VALID), "a route is new or gone: say here what a valid body is"
    places = [
        (path, where)
        for path, schema in schemas.items()
        for where in dict.fromkeys([*fields(schema), *FREE.get(path, ())])
    ]
    bodies = [
        (path, put(VALID[path], where, VALUES[(turn + number) % len(VALUES)]))
        for turn, (path, where) in enumerate(places)
        for number in range(num_values)
    ]
    assert len(bodies) > 300 * num_values
    seen: dict[int, int] = {}
    left = iter(bodies)
    async with httpx.AsyncClient(
        base_url=server.url, headers={"Content-Type": "application/json"}
    ) as client:

        async def work() -> None:
            for path, body in left:
                reply = await client.post(path.replace("{name}", "tiny"), content=json.dumps(body))
                seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
                assert reply.status_code < 500, (path, body, reply.text)
                if reply.status_code >= 400:
                    told = reply.json()["error"]
                    assert told["message"], (path, body)
                    assert "internal" not in told.get("type", told.get("status")).lower(), (
                        path,
                        body,
                        told,
                    )

        await asyncio.gather(*(work() for _ in range(8)))
    assert sum(seen.values()) == len(bodies)
    assert seen[200] > 20 * num_values


# ---- structured output


def nested(depth):
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def rules(num, rule):
    """A chain of them; each is given its number and the next."""
    return "\n".join(["start: r0", *(rule.format(i, i + 1) for i in range(num)), f'r{num}: "a"'])


REF = "#/$defs/"
OF_A = {"$ref": REF + "a"}
GRAMMARS = {
    "a schema 10,000 deep": ({"json": nested(10_000)}, 400),
    "an enum of 1 MB": ({"json": {"enum": ["x" * 50 + str(i) for i in range(20_000)]}}, 400),
    "a reference to itself": ({"json": {"$ref": "#"}}, 400),
    "two references to each other": ({"json": {"$defs": {"a": {"$ref": REF + "b"}, "b": {"$ref": REF + "a"}}, **OF_A}}, 400),
    "a list of itself": ({"json": {"$defs": {"a": {"type": "array", "items": OF_A}}, **OF_A}}, 200),
    "a reference to elsewhere": ({"json": {"$ref": "http://127.0.0.1:1/x"}}, 400),
    "a file": ({"json": {"$ref": "file:///etc/passwd"}}, 400),
    "no schema": ({"json": "{"}, 400),
    "repeated a billion times": ({"regex": "(a{1000}){1000}{1000}"}, 400),
    "backtracking": ({"regex": "(a+)+$"}, 200),
    "more backtracking": ({"regex": "(a|a|a|aa)*b" * 50}, 200),
    "look-around": ({"regex": "(?<=a)b(?=c)"}, 400),
    "open": ({"regex": "((((("}, 400),
    "no such rule": ({"grammar": "start: nothing"}, 400),
    "not a grammar": ({"grammar": "\x00 ::= ]["}, 400),
    "left recursion": ({"grammar": 'start: start "a" | "a"'}, 200),
    "ambiguous": ({"grammar": 'start: start start | "a" | "a" start'}, 200),
    "an explosion": ({"grammar": "start: " + "(" * 300 + '"a"' + "{0,99})" * 300}, 400),
    "rules that double": ({"grammar": rules(60, "r{0}: r{1} r{1}")}, 400),
    "a chain that overflows the stack": ({"grammar": rules(4000, 'r{0}: "x{0}" r{1}')}, 400),
    "8,000 properties": ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(8000)}}}, 400),
    "a choice of nothing": ({"choice": [""]}, 400),
    "a choice of 1 MB": ({"choice": ["x" * 2**20]}, 400),
    "all at once": ({"json": {}, "regex": "a"}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(server, name):
    grammar, status = GRAMMARS[name]
    reply = ask(
        server, "/v1/completions", {"prompt": "x", "max_tokens": 3, "structured_outputs": grammar}
    )
    if status == 400:
        refused(reply)
    assert reply.status_code == status, reply.text[:300]


# ---- templates


@pytest.mark.parametrize("what", ["spin", "fill", "write", "double", "divide", "sort"])
def test_templates(server, what):
    error = refused(
        ask(
            server,
            "/v1/chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {what: True}},
        )
    )
    assert "template" in error["message"]
    assert (
        ask(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).status_code
        == 200
    )


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "self", "bos_token"]
)
def test_what_templates_are_given_cannot_be_replaced(server, name):
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {name: []}}
    reply = ask(server, "/v1/chat/completions", body)
    assert reply.status_code == (200 if name == "self" else 400), reply.text
    assert name == "self" or refused(reply)["param"] == "chat_template_kwargs"


def test_arguments_that_are_too_deep_for_a_template(server):
    call = {**CALL, "function": {"name": "f", "arguments": "[" * 50_000}}
    refused(ask(server, "/tokenize", {"messages": [{"role": "assistant", "tool_calls": [call]}]}))


# ---- bodies

SURROGATES = [
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ["x", "\\udc00\\ud800"]}',
    b'{"\\ud800": 1}',
    b'{"prompt": "\xed\xa0\x80"}',
]


@pytest.mark.parametrize(
    "body",
    [
        *SURROGATES, b'{"prompt": "x"', b"\x00" * 100, b"[" * 2**16, b'{"a":' * 2**15, b'{"prompt": "x"}{}', b"\xef\xbb\xbf{}",
        json.dumps({"prompt": "x"}).encode("utf-16"), b'{"prompt": "x", "n": 1e99999999}',
        b'{"prompt": "x", "seed": ' + b"9" * 10**5 + b"}",
        b'{"prompt": "x", ' + b", ".join(b'"p%d": 0' % i for i in range(5000)) + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_not_what_they_should_be(server, body):
    refused(ask(server, "/v1/completions", body))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "u"}] * 100_000}, {"messages": [{"role": "u", "content": [{}] * 10**6}]},
        {"messages": MESSAGES, "chat_template_kwargs": {str(i): {} for i in range(10**5)}},
    ],
)  # fmt: skip
def test_bodies_of_too_many_parts(server, body):
    refused(ask(server, "/v1/chat/completions", body), 413)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-unknown"])
def test_compressed_bodies_are_refused(server, coding):
    bomb = zlib.compress(b"[" * 10**7, wbits=31)
    assert (
        "encoding"
        in refused(ask(server, "/v1/completions", bomb, headers={"Content-Encoding": coding}), 415)[
            "message"
        ]
    )


# ---- as they are written


def plainly(server, data, seconds=LONG_S):
    """What comes back until the server closes, for bytes as they are written."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as raw:
        got = b""
        try:
            raw.sendall(data)
            while part := raw.recv(65536):
                got += part
        except OSError:
            pass
        return got


def post(*lines, body=b"", path="/v1/completions"):
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *lines,
        "",
        "",
    ]
    return "\r\n".join(head).encode() + body


GOOD = b'{"prompt": "x", "max_tokens": 1}'
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        post("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
        post("Transfer-Encoding: chunked", "Content-Length: 5", body=b"0\r\n\r\n" + SMUGGLED),
        post("Content-Length: 5", "Content-Length: 6", body=b"{}   " + SMUGGLED),
        post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
        post("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + SMUGGLED),
        post("Content-Length : 2", body=b"{}" + SMUGGLED),
        post("Content-Length: +2", body=b"{}" + SMUGGLED),
        post("Content-Length: 0x2", body=b"{}" + SMUGGLED),
        post("Transfer-Encoding: chunked", body=b"-1\r\n" + SMUGGLED),
        post("Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n" + SMUGGLED),
        post("X: a\rY: b", "Content-Length: 2", body=b"{}" + SMUGGLED),
        post("Host: elsewhere", "Content-Length: 2", body=b"{}"),
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n X: folded\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 1000,
    ],
)
def test_requests_that_could_be_read_in_two_ways(server, data):
    got = plainly(server, data)
    assert got.split(b" ")[1][:1] == b"4", got[:200]
    assert got.count(b"HTTP/1.1 ") == 1  # and what came after it was not taken for a request
    assert b'"tiny"' not in got


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET http://localhost/v1/models HTTP/1.1", 400),
        # the Host header is what counts, and it is checked
        ("GET http://elsewhere/v1/models HTTP/1.1", 400),
        ("GET /v1/models?x=%00 HTTP/1.1", 200),
        ("GET /v1/models#x HTTP/1.1", 400),
        ("GET ///v1/models HTTP/1.1", 400),
        ("GET /v1/./models HTTP/1.1", 400),
        ("GET /v1/../v1/models HTTP/1.1", 400),
        ("GET /v1/%2e%2e/v1/models HTTP/1.1", 400),
        ("GET /v1%2Fmodels HTTP/1.1", 400),
        ("GET /v1/models%00 HTTP/1.1", 400),
        ("GET /v1/models%0d%0aX:y HTTP/1.1", 400),
        ("GET /v1/models/ HTTP/1.1", 404),
        ("GET /v1/models/%ff%fe HTTP/1.1", 400),
        ("GET /" + "x" * 60_000 + " HTTP/1.1", 404),
        ("GET * HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 400),
        ("CONNECT localhost:80 HTTP/1.1", 400),
        ("HEAD /v1/models HTTP/1.1", 405),
        ("TRACE /v1/models HTTP/1.1", 405),
        ("PROPFIND /v1/models HTTP/1.1", 405),
        ("OPTIONS /v1/models HTTP/1.1", 204),
        ("BREW /v1/models HTTP/1.1", 400),
        ("get /v1/models HTTP/1.1", 400),
    ],
)
def test_request_lines(server, line, status):
    got = plainly(server, f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert got.split(b" ")[1].decode() == str(status), got[:300]
    assert b"Traceback" not in got


@pytest.mark.parametrize(
    "origin", ["http://[", "null", "http://", "http://localhost:1", "file://", "http://localhost@x"]
)
def test_origins_that_are_not_ours(server, origin):
    assert httpx.get(f"{server.url}/v1/models", headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_nobody_is_upgraded(server, upgrade):
    lines = f"Host: localhost\r\nConnection: Upgrade, close\r\nUpgrade: {upgrade}\r\nSec-WebSocket-Key: eA==\r\n"
    got = plainly(server, f"GET /v1/models HTTP/1.1\r\n{lines}\r\n".encode())
    assert b" 101 " not in got


@pytest.mark.parametrize(
    ("opening", "endless"),
    [
        (post("Content-Length: 1000000000"), b"x" * 65536),
        (post("Transfer-Encoding: chunked"), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        (
            post("Transfer-Encoding: chunked", path="/nowhere"),
            b"10000\r\n" + b"x" * 65536 + b"\r\n",
        ),
        (post("Transfer-Encoding: chunked", path="/health"), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        (post("Transfer-Encoding: chunked", body=b"0\r\n"), b"X: " + b"x" * 1000 + b"\r\n"),
        (post("Transfer-Encoding: chunked", body=b"0\r\nX: "), b"x" * 65536),
        (post("Transfer-Encoding: chunked", body=b"1;"), b"x" * 65536),
        (b"GET /", b"x" * 65536),
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 65536),
        (b"", b"\r\n" * 1000),
    ],
)
def test_what_has_no_end_is_cut_off(server, opening, endless):
    """A gigabyte is never read."""
    sent = len(opening)
    with socket.create_connection(("127.0.0.1", server.port), timeout=LONG_S) as raw:
        try:
            raw.sendall(opening)
            while sent < 10**9:
                raw.sendall(endless)
                sent += len(endless)
        except OSError:
            pass
    assert sent < 32 * 2**20


# ---- slow clients, and everything at once


async def test_a_client_that_does_not_read_is_dropped(monkeypatch):
    """A response that is not read is held in bounded memory and for a bounded time, and so is a
    body that nobody reads."""
    monkeypatch.setattr(connections, "READ_WITHIN_S", 0.5)
    monkeypatch.setattr(connections, "REST_WITHIN_S", 0.5)
    num_sent, ended = 0, asyncio.Event()

    async def app(scope, receive, send):
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            await receive()
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
                num_sent += 1000
                await asyncio.sleep(0)
            ended.set()
        await send({"type": "http.response.body"})

    async with behind_our_protocol(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(
                raw, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            await asyncio.wait_for(ended.wait(), LONG_S)
            assert num_sent < 20 * 2**20  # what the two kernels hold
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert b" 200 " in await asyncio.wait_for(reader.read(), LONG_S)  # and then it is closed


def test_a_body_that_never_ends_is_not_waited_for(server):
    """Many at once, each a byte now and then: another request completes meanwhile."""
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for i, raw in enumerate(slow):
            raw.sendall(post("Content-Length: 1000")[: 40 if i % 2 else None])
        assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        for raw in slow:
            raw.sendall(b"x")
    finally:
        for raw in slow:
            raw.close()


def dawdlers(server, num):
    """Streams that are asked for and not read."""
    body = json.dumps(
        {
            "prompt": "x",
            "max_tokens": 450,
            "ignore_eos": True,
            "stream": True,
            "n": 4,
            "logprobs": 20,
        }
    ).encode()
    made = []
    for _ in range(num):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(post(f"Content-Length: {len(body)}", body=body))
        made.append(raw)
    return made


def torment(server):
    """Some of everything above."""
    unread = dawdlers(server, 8)
    plainly(
        server, post("Transfer-Encoding: chunked", body=b"100000\r\n" + b"x" * 2**20 + b"\r\n"), 0.1
    )
    plainly(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 2**20, 0.1)
    with ThreadPoolExecutor(4) as pool:
        chats = [
            {"messages": MESSAGES, "chat_template_kwargs": {what: True}}
            for what in ("spin", "fill")
        ]
        chats += [
            {"messages": [{"role": "u"}] * 60_000},
            {"messages": [{"role": "u", "content": "x" * 10**6}]},
        ]
        replies = [pool.submit(ask, server, "/v1/chat/completions", chat) for chat in chats]
        for grammar, _ in list(GRAMMARS.values())[::3]:
            body = {"prompt": "x", "max_tokens": 20, "structured_outputs": grammar}
            replies.append(pool.submit(ask, server, "/v1/completions", body))
        replies.append(pool.submit(ask, server, "/v1/completions", {"prompt": [1] * 2_500_000}))
        assert all(reply.result().status_code in (200, 400, 413) for reply in replies)
    for raw in unread:
        raw.close()


def test_others_get_the_same_output_and_memory_stays_bounded(server):
    asked = [
        {
            "prompt": f"the tide {i}",
            "max_tokens": 60,
            "temperature": 0.8,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(4)
    ]

    def texts():
        replies = [ask(server, "/v1/completions", body) for body in asked]
        return [reply.json()["choices"][0]["text"] for reply in replies]

    alone, before = texts(), resident_mb(server)
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(torment, server)
        rounds = [texts()]
        while not attack.done():
            rounds.append(texts())
        attack.result()
    assert all(one == alone for one in rounds)
    assert resident_mb(server) < before + 300


@pytest.mark.slow
def test_others_hardly_notice_and_memory_stays_flat(server):
    """Latencies, so not among the tests that run on any machine."""
    torment(server)  # whatever is loaded when it is first needed is there
    quiet, before = Bystander(server, 10).gaps(), resident_mb(server)
    bystander, rounds = Bystander(server, 60), 0
    while bystander.is_there:
        torment(server)
        rounds += 1
    gaps, after = bystander.gaps(), resident_mb(server)
    for name, told in (("quiet", quiet), ("tormented", gaps)):
        print(
            name,
            len(told),
            *(f"p{p} {1000 * percentile(told, p):.1f} ms" for p in (50, 99, 99.9, 100)),
        )
    print(f"{rounds} rounds, {before:.0f} MB before, {after:.0f} MB after")
    assert percentile(gaps, 50) < 10 * percentile(quiet, 50) + 0.05
    assert percentile(gaps, 99) < 10 * percentile(quiet, 99) + 0.25
    assert gaps[-1] < 2
    assert after < before + 50
