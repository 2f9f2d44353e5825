"""Spans, as a collector receives them: a real OTLP receiver over HTTP beside a real server."""

from __future__ import annotations

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.server.conftest import Server
from tests.waiting import until
from tidemill.errors import ConfigError
from tidemill.server.observe import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resource = {one.key: one.value.string_value for one in group.resource.attributes}
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def wait(self, name: str, request_id: str, num: int = 1) -> list[Span]:
        def find() -> list[Span]:
            found = [span for span in self.spans if span.name == name and values(span)["gen_ai.response.id"] == request_id]
            return found if len(found) >= num else []

        return until(find)

    def children(self, span: Span) -> list[Span]:
        """The SDK sends spans in the order in which they end: those inside first."""
        inside = [one for one in self.spans if one.parent_span_id == span.span_id]
        return sorted(inside, key=lambda one: one.start_time_unix_nano)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def values(span: Span) -> dict[str, object]:
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in span.attributes}


@pytest.fixture(scope="module")
def collector():
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def traced(tiny_folder, collector):
    patch = pytest.MonkeyPatch()
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    patch.setenv("OTEL_SERVICE_NAME", "mill-7")
    running = Server(tiny_folder, "--otlp-endpoint", collector.url).wait()
    patch.undo()
    yield running
    assert running.stop() == 0


def complete(server: Server, **more) -> dict:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True} | more
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()


def test_a_request_is_a_span_with_its_parts(traced, collector):
    before = time.time_ns()
    (span,) = collector.wait("text_completion tiny", complete(traced)["id"])
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == PARENT
    assert span.kind == Span.SPAN_KIND_SERVER
    assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    read = values(span)
    assert read["gen_ai.request.model"] == read["gen_ai.response.model"] == "tiny"
    assert read["gen_ai.usage.input_tokens"] == 5
    assert read["gen_ai.usage.output_tokens"] == 5
    assert read["gen_ai.response.finish_reasons"] == ["length"]
    assert read["http.route"] == "/v1/completions"
    assert span.status.code == 0
    parts = collector.children(span)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert parts[0].start_time_unix_nano == span.start_time_unix_nano
    assert [one.end_time_unix_nano for one in parts] == [
        parts[1].start_time_unix_nano,
        parts[2].start_time_unix_nano,
        span.end_time_unix_nano,
    ]
    assert collector.resource["service.name"] == "mill-7"


def test_each_sample_is_a_span(traced, collector):
    spans = collector.wait("text_completion tiny", complete(traced, n=3, temperature=1)["id"], 3)
    assert len({span.span_id for span in spans}) == 3
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def cancelled_id(server) -> str:
    """Of a request that was cancelled: asked for again while it ends before the cancellation comes."""
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(50):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "left"}) as reply:
            lines = reply.iter_lines()
            first = next(line for line in lines if line.startswith('data: {"id"'))
            done = httpx.delete(f"{server.url}/v1/requests/left")
            rest = list(lines)
        if done.status_code == 200 and '"finish_reason":"length"' not in "".join([first, *rest]):  # one chunk may be all of it
            return json.loads(first[6:])["id"]
    raise AssertionError("every request ended before it was cancelled")


def test_a_stop_string_and_a_cancellation(traced, collector):
    text = complete(traced, max_tokens=20)["choices"][0]["text"]
    (span,) = collector.wait("text_completion tiny", complete(traced, max_tokens=400, stop=text[2:4])["id"])
    assert values(span)["gen_ai.response.finish_reasons"] == ["stop"]
    (span,) = collector.wait("text_completion tiny", cancelled_id(traced))
    assert values(span)["error.type"] == "request_cancelled"
    assert span.status.code == 2


def test_a_client_that_does_not_want_its_trace_recorded(traced, collector):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    quiet = httpx.post(f"{traced.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers).json()
    headers = {"traceparent": "x" * 1000}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    odd = httpx.post(f"{traced.url}/v1/chat/completions", json=chat, headers=headers).json()
    (span,) = collector.wait("chat tiny", odd["id"])
    assert not span.parent_span_id
    assert quiet["id"] not in {values(span).get("gen_ai.response.id") for span in collector.spans}


def test_a_collector_that_is_gone_hurts_nobody(tiny_folder, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server = Server(tiny_folder).wait()
    texts = {complete(server)["choices"][0]["text"] for _ in range(5)}
    assert len(texts) == 1
    assert server.stop() == 0


def test_what_turns_it_on(monkeypatch):
    assert tracing.make_tracing(None, {}) is None
    assert tracing.make_tracing("http://h:1", {"OTEL_SDK_DISABLED": "true"}) is None
    with pytest.raises(ConfigError, match="Give an address"):
        tracing.make_tracing("h:1", {})
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[otel\]'"):
        tracing.make_tracing("http://h:1", {})
    assert tracing.make_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}) is None
