"""The HTTP transport of Tidemill's clients, against a small server on TCP and on a Unix socket."""

import asyncio
import contextlib
import json
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.waiting import LONG_S
from tidemill.client import Address, AsyncClient, BadResponse, Client, Unreachable, WrongKey
from tidemill.client.streams import Events, chunks
from tidemill.errors import ConfigError, ContextTooLong, InvalidRequest, TidemillError

# characters that Unicode takes for ends of lines
CHUNKS = [{"text": "caf\u00e9 \u2028 \u0085"}, {"text": "b"}]


def _error(kind):
    return b'data: {"error": {"message": "too much", "type": "%b"}}\n\n' % kind.encode()


WHOLE = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode() for chunk in CHUNKS] + [
    b"data: [DONE]\n\n"
]


class Handler(BaseHTTPRequestHandler):
    """Sends what the test has put into its server, and notes what it was asked."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.num_connections += 1

    def do_GET(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(
            (self.path, self.headers["Authorization"], json.loads(data) if data else None)
        )
        self.send_response(self.server.status)
        if isinstance(self.server.reply, bytes):
            self.send_header("Content-Length", str(len(self.server.reply)))
            self.end_headers()
            self.wfile.write(self.server.reply)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in self.server.reply:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if self.server.then == "end":
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True
        if self.server.then == "wait" and not self.connection.recv(1):
            self.server.client_left.set()

    do_POST = do_GET

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        with contextlib.suppress(ConnectionError):  # clients leave when they have seen enough
            super().handle_one_request()
            return
        self.close_connection = True


class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture(params=["tcp", "unix"])
def server(request, tmp_path, monkeypatch):
    monkeypatch.delenv("TIDEMILL_API_KEY", raising=False)
    if request.param == "tcp":
        running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.url = f"http://127.0.0.1:{running.server_port}"
    else:
        running = OnSocket(str(tmp_path / "s"), Handler)
        running.url = f"unix:{tmp_path}/s"
    running.asked, running.num_connections, running.client_left = [], 0, threading.Event()
    running.status, running.reply, running.then = 200, WHOLE, "end"
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


class InLoop:
    """An AsyncClient with the methods of a Client, so that a test is written once."""

    def __init__(self, *arguments):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._runner.run(self._client.close())
        self._runner.close()

    def json(self, *arguments):
        return self._runner.run(self._client.json(*arguments))

    def read(self, path, body, most=None):
        async def read():
            found = []
            async with self._client.stream(path, body) as chunks:
                async for chunk in chunks:
                    found.append(chunk)
                    if len(found) == most:
                        break
            return found

        return self._runner.run(read())


class InThread(Client):
    def read(self, path, body, most=None):
        found = []
        with self.stream(path, body) as chunks:
            for chunk in chunks:
                found.append(chunk)
                if len(found) == most:
                    break
        return found


both = pytest.mark.parametrize("kind", [InThread, InLoop])


@pytest.mark.parametrize(
    ("text", "url", "unix_socket"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("https://example.org/llm/v1/", "https://example.org/llm", None),
        ("localhost:80", "http://localhost:80", None),
        ("[::1]:8000/v1", "http://[::1]:8000", None),
        ("unix:/run/tidemill.sock", "http://localhost", "/run/tidemill.sock"),
        ("unix:///run/tidemill.sock:/llm/v1", "http://localhost/llm", "/run/tidemill.sock"),
    ],
)
def test_addresses(text, url, unix_socket):
    assert Address.parse(text) == Address(url, unix_socket)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:1 ",
        "ftp://a:1",
        "http://",
        "http://[::1",
        "http://a:b",
        "a:1?x=1",
        "me@a:1",
        "unix:",
        "http://a:65536",
        "http://a..b:1",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="http://HOST:PORT, HOST:PORT or unix:PATH"):
        Client(text)


def test_events_are_the_same_wherever_parts_are_cut():
    stream = b": ping\r\n\r\nevent: x\r\ndata: {1\r\ndata:2}\r\n\r\n\ndata:[3]\n\nid: 4\n\ndata: \xe2\x80\xa8\r\rdata: cut"
    for first in range(len(stream)):
        for second in range(first, len(stream)):
            events = Events()
            parts = (stream[:first], stream[first:second], stream[second:])
            assert [data for part in parts for data in events.feed(part)] == [
                b"{1\n2}",
                b"[3]",
                b"\xe2\x80\xa8",
            ]


def test_an_event_of_many_parts_takes_linear_time_and_bounded_memory(monkeypatch):
    """Each part was once joined to all before it: this took minutes."""
    events, part = Events(), b"x" * 2**10
    assert [events.feed(part) for _ in range(2**15)] == [[]] * 2**15
    assert events.num_waiting == 2**25
    monkeypatch.setattr("tidemill.client.streams.MAX_EVENT_BYTES", 2**20)
    with pytest.raises(BadResponse, match="an event of more than 1048576 bytes"):
        list(chunks("here", iter([part] * 2**11)))


@pytest.mark.parametrize(
    ("name", "value"), [("HTTP_PROXY", "foo://here"), ("SSL_CERT_FILE", "/there/is/none")]
)
def test_settings_of_the_environment_that_cannot_be_used(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    # The tests share one context of certificates, which here is to be made anew.
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", httpx.create_ssl_context)
    with pytest.raises(ConfigError, match=f"cannot be used.*{name}"):
        Client("localhost:1")


@both
def test_requests_and_whole_streams_share_a_connection(server, kind, monkeypatch):
    monkeypatch.setenv("TIDEMILL_API_KEY", "first second")
    with kind(
        server.url + (":/root/v1" if server.url.startswith("unix:") else "/root/v1")
    ) as client:
        assert client.read("/v1/completions", {"prompt": "\ud83d"}) == CHUNKS
        server.reply = b'{"a": 1}'
        assert client.json("GET", "/v1/models") == {"a": 1}
        server.reply = b"[1]"
        assert client.json("POST", "/generate", b"{}", list) == [1]
    with kind(server.url, "own") as client:
        client.json("GET", "/x", None, list)
    assert server.asked == [
        ("/root/v1/completions", "Bearer first", {"prompt": "\ud83d"}),
        ("/root/v1/models", "Bearer first", None),
        ("/root/generate", "Bearer first", {}),
        ("/x", "Bearer own", None),
    ]
    assert server.num_connections == 2


@both
def test_a_stream_that_is_left_ends_the_request(server, kind):
    server.reply, server.then = WHOLE[:1], "wait"
    with kind(server.url) as client:
        assert client.read("/v1/completions", {}, 1) == CHUNKS[:1]
        assert server.client_left.wait(LONG_S)


@both
@pytest.mark.parametrize(
    ("reply", "then", "error", "words"),
    [
        (
            WHOLE[:2],
            "end",
            BadResponse,
            "ended a response before it was complete. Check the server's log.",
        ),
        (WHOLE[:2], "break", Unreachable, "does not respond"),
        ([b"data: <html>\n\n"], "end", BadResponse, "no JSON object"),
        ([b"data: [1]\n\n"], "end", BadResponse, "no JSON object"),
        ([_error("invalid_request_error")], "end", InvalidRequest, "with an error: too much"),
        ([_error("internal_error")], "end", TidemillError, "with an error: too much"),
        (b"{}", "end", BadResponse, "before it was complete"),
    ],
)
def test_streams_that_break_off(server, kind, reply, then, error, words):
    server.reply, server.then = reply, then
    with kind(server.url) as client, pytest.raises(error, match=words) as raised:
        client.read("/v1/completions", {})
    assert raised.type is error


@both
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("status", "reply", "error", "words"),
    [
        (
            401,
            b'{"error": {"message": "Who?"}}',
            WrongKey,
            "Who\\? Give its key with --api-key or in TIDEMILL_API_KEY.",
        ),
        (401, b"", WrongKey, "TIDEMILL_API_KEY"),
        (404, b"<html>", BadResponse, "answers with status 404. Check that a server"),
        (404, b'{"error": "no such model"}', InvalidRequest, "refuses it .404.: no such model"),
        (404, b'{"error": {"message": 5, "code": [1]}}', InvalidRequest, "5"),
        (
            400,
            b'{"error": {"message": "m", "code": "context_length_exceeded"}}',
            ContextTooLong,
            "m",
        ),
        (500, b'{"error": {"message": "oh"}}', TidemillError, "refuses it .500.: oh"),
        (307, b"{}", BadResponse, "status 307"),
    ],
)
def test_refusals(server, kind, is_streamed, status, reply, error, words):
    server.status, server.reply = status, reply
    with kind(server.url) as client, pytest.raises(error, match=words) as raised:
        client.read("/v1/x", {}) if is_streamed else client.json("GET", "/v1/x")
    assert raised.type is error


@both
def test_other_servers(server, kind):
    for server.reply in (b"<html>", b"[1]", b""):
        with (
            kind(server.url) as client,
            pytest.raises(BadResponse, match="no JSON object at /v1/models"),
        ):
            client.json("GET", "/v1/models")


@both
def test_unreachable(kind, tmp_path):
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        for url in (f"127.0.0.1:{bound.getsockname()[1]}", f"unix:{tmp_path}/none"):
            with (
                kind(url) as client,
                pytest.raises(Unreachable, match=r"does not respond: .*Check that the server runs"),
            ):
                client.json("GET", "/v1/models")


def test_a_key_with_a_line_break():
    with pytest.raises(ConfigError, match="line break"):
        Client("localhost:1", "a\nb")
