"""OpenTelemetry spans of requests, made from the engine's events: one per sample, with its queue,
prefill and decode inside.

The server fills the spans and a thread of the SDK sends them (extra `tidemill[otel]`). Its queue is
bounded: while a collector is slow or gone spans are dropped, and requests notice nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tidemill.errors import ConfigError
from tidemill.server.http.context import RequestContext
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "Run: pip install 'tidemill[otel]'"
_CLOSE_S = 3.0  # for the last spans; a collector that does not answer does not hold up the end
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # else: chat
_Recorded: TypeAlias = (
    events.Submitted | events.Admitted | events.FirstToken | events.Finished | events.Aborted
)
_log = logging.getLogger("tidemill.server")


@dataclass(slots=True)
class _Sample:
    num_prompt: int
    begun_s: float
    admitted_s: float | None = None
    first_s: float | None = None
    num_cached: int = 0


@dataclass(slots=True)
class _TracedRequest:
    """A request of the engine: the call it belongs to, and its samples that have not ended."""

    call: RequestContext
    samples: dict[str, _Sample] = field(default_factory=dict)
    is_over: bool = False  # the call does not wait for it any more


class Tracing:
    """Reads events. `begin` and `end` say which call a request of the engine belongs to."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME") or "tidemill"
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tidemill", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._requests: dict[str, _TracedRequest] = {}
        self._offset_s = (
            time.time() - time.monotonic()
        )  # events have the monotonic clock, spans the time of day

    def begin(self, request_id: str, call: RequestContext) -> None:
        self._requests[request_id] = _TracedRequest(call)

    def end(self, request_id: str) -> None:
        """The call is done with it. The engine may report the end of its samples later: after a
        stop string, or an abort."""
        request = self._requests.get(request_id)
        if request is not None:
            request.is_over = True
            self._forget(request_id, request)

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            match event:
                case (
                    events.Submitted()
                    | events.Admitted()
                    | events.FirstToken()
                    | events.Finished()
                    | events.Aborted()
                ):
                    request_id = event.request_id.partition(":")[0]  # after it: the sample
                    request = self._requests.get(request_id)
                    if request is not None:
                        self._record(request, event)
                        self._forget(request_id, request)

    def _forget(self, request_id: str, request: _TracedRequest) -> None:
        if request.is_over and not request.samples and self._requests.get(request_id) is request:
            del self._requests[request_id]

    def _record(self, request: _TracedRequest, event: _Recorded) -> None:
        if isinstance(event, events.Submitted):
            request.samples[event.request_id] = _Sample(event.num_prompt, event.time_s)
            return
        sample = request.samples.get(event.request_id)
        if sample is None:
            return
        match event:
            case events.Admitted() if sample.admitted_s is None:  # again after a preemption
                sample.admitted_s, sample.num_cached = event.time_s, event.num_cached
            case events.FirstToken():
                sample.first_s = event.time_s
            case events.Finished() | events.Aborted():
                del request.samples[event.request_id]
                self._write(request.call, sample, event)

    def _write(
        self, call: RequestContext, sample: _Sample, end: events.Finished | events.Aborted
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(call.path, "chat")
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tidemill",
            "gen_ai.request.model": call.model,
            "gen_ai.response.model": call.model,
            "gen_ai.response.id": call.request_id,
            "gen_ai.response.finish_reasons": [end.reason],
            "gen_ai.usage.input_tokens": sample.num_prompt,
            "gen_ai.usage.output_tokens": end.num_output,
            "gen_ai.usage.cache_read.input_tokens": sample.num_cached,
            "http.route": call.path,
        }
        parent, begun = self._propagator.extract(call.trace), self._ns(sample.begun_s)
        span = self._tracer.start_span(
            f"{operation} {call.model}", parent, SpanKind.SERVER, attributes, start_time=begun
        )
        inside = set_span_in_context(span)
        times = (
            ("queue", sample.begun_s),
            ("prefill", sample.admitted_s),
            ("decode", sample.first_s),
        )
        known = [(name, time_s) for name, time_s in times if time_s is not None]
        ends_s = [time_s for _, time_s in known[1:]] + [end.time_s]
        for (name, from_s), to_s in zip(known, ends_s, strict=True):
            self._tracer.start_span(name, inside, start_time=self._ns(from_s)).end(self._ns(to_s))
        if isinstance(end, events.Aborted):
            span.set_attribute("error.type", end.reason)
            span.set_status(Status(StatusCode.ERROR, end.reason))
        span.end(self._ns(end.time_s))

    def _ns(self, monotonic_s: float) -> int:
        return int((monotonic_s + self._offset_s) * 1e9)

    def close(self) -> None:
        """Sends what is left, within a bound."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_S)


def make_tracing(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """None: nobody asked for spans. `endpoint`: the collector's base address, as in
    OTEL_EXPORTER_OTLP_ENDPOINT."""
    named = next((name for name in _VARIABLES if environ.get(name)), None)
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        endpoint is None and named is None
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        if endpoint is not None:
            raise ConfigError(
                "OpenTelemetry is not installed.", fix=_INSTALL, param="otlp_endpoint"
            ) from None
        _log.warning(
            "%s is set, and OpenTelemetry is not installed: there will be no spans. %s",
            named,
            _INSTALL,
        )
        return None
    exporter: Any = (
        OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(_traces_url(endpoint))
    )
    return Tracing(exporter)


def _traces_url(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}.",
            fix="Give an address like http://127.0.0.1:4318.",
            param="otlp_endpoint",
        )
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
