"""Spans, as a collector receives them: a real OTLP receiver over HTTP beside a real server."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.server.collector import values
from tests.server.conftest import KEYS, Server
from tidemill.errors import ConfigError
from tidemill.server.observe import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEY = {"authorization": f"Bearer {KEYS[0]}"}


def complete(server: Server, **more) -> dict:
    headers = KEY | {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True} | more
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()


def test_a_request_is_a_span_with_its_parts(tenants, collector):
    before = time.time_ns()
    (span,) = collector.wait("text_completion tiny", complete(tenants)["id"])
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


def test_each_sample_is_a_span(tenants, collector):
    spans = collector.wait("text_completion tiny", complete(tenants, n=3, temperature=1)["id"], 3)
    assert len({span.span_id for span in spans}) == 3
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def cancelled_id(server) -> str:
    """Of a request that was cancelled: asked for again while it ends before the cancellation comes."""
    body = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = KEY | {"X-Request-Id": "left"}
    for _ in range(50):
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=headers
        ) as reply:
            lines = reply.iter_lines()
            first = next(line for line in lines if line.startswith('data: {"id"'))
            done = httpx.delete(f"{server.url}/v1/requests/left", headers=KEY)
            rest = list(lines)
        # one chunk may be all of it
        if done.status_code == 200 and '"finish_reason":"length"' not in "".join([first, *rest]):
            return json.loads(first[6:])["id"]
    raise AssertionError("every request ended before it was cancelled")


def test_a_stop_string_and_a_cancellation(tenants, collector):
    text = complete(tenants, max_tokens=20)["choices"][0]["text"]
    (span,) = collector.wait(
        "text_completion tiny", complete(tenants, max_tokens=3000, stop=text[2:4])["id"]
    )
    assert values(span)["gen_ai.response.finish_reasons"] == ["stop"]
    (span,) = collector.wait("text_completion tiny", cancelled_id(tenants))
    assert values(span)["error.type"] == "request_cancelled"
    assert span.status.code == 2


def test_a_client_that_does_not_want_its_trace_recorded(tenants, collector):
    headers = KEY | {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    quiet = httpx.post(
        f"{tenants.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers
    ).json()
    headers = KEY | {"traceparent": "x" * 1000}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    odd = httpx.post(f"{tenants.url}/v1/chat/completions", json=chat, headers=headers).json()
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
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[otel\]'"):
        tracing.make_tracing("http://h:1", {})
    assert tracing.make_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}) is None
