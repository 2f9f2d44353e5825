"""A receiver of spans: OTLP over HTTP, as collectors speak it."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.waiting import until


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
                    collector.resource = {
                        one.key: one.value.string_value for one in group.resource.attributes
                    }
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
            found = [
                span
                for span in self.spans
                if span.name == name and values(span).get("gen_ai.response.id") == request_id
            ]
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
        return (
            [plain(one) for one in value.array_value.values]
            if kind == "array_value"
            else getattr(value, kind)
        )

    return {one.key: plain(one.value) for one in span.attributes}
