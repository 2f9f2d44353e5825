"""A call of the API: its id, its figures, and its line in the request log.

The line has the tenant, token counts, times and how the call ended; never a text. Refused calls are
logged at a limited rate, so that a flood of them does not fill the disk.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.errors import ConfigError
from tidemill.server import page
from tidemill.server.http import stopwatch
from tidemill.server.http.stopwatch import WRITING, Stopwatch

MAX_ID_CHARS = 128
ID_PATTERN = rf"^[A-Za-z0-9._-]{{1,{MAX_ID_CHARS}}}$"
_PREFIXES = {
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
    "/v1/chat/completions/batch": "chatcmpl",
    "/v1/responses": "resp",
    "/v1/messages": "msg",
    "/v1/embeddings": "embd",
    "/classify": "classify",
    "/generate": "gen",
    "/v1/rerank": "rerank",
    "/generative_scoring": "generative-scoring",
    "/v2/embed": "embd",
    "/v1/score": "score",
}
_WITHOUT_V1 = frozenset(
    {"/models", "/chat/completions", "/chat/completions/input_tokens", "/responses"}
)  # llama.cpp's names
_LLAMACPP = frozenset({"/completion", "/completions", "/infill", "/embedding", "/embeddings"})
_UNDERSCORED = frozenset({"resp", "msg", "fc", "rs"})  # as OpenAI and Anthropic write them
_MAX_IGNORED_NAMED = 64  # fields in a header
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
# Polled every few seconds, or a dozen at once that belong to the page; logged only on errors.
_QUIET = frozenset({"/health", "/ready", "/metrics"}) | page.PATHS
_REFUSED_AT_ONCE, _REFUSED_PER_S = 50, 5.0
_log = logging.getLogger("tidemill.server")


@dataclass(slots=True)
class RequestContext:
    """Filled on its way through the server."""

    request_id: str = ""
    method: str = "POST"
    path: str = ""
    tenant: str = ""
    model: str = ""
    num_body_bytes: int = 0  # of JSON
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0  # when the first token was there
    queue_s: float = 0.0
    decode_s: float = 0.0  # in the engine, from the first token to the last
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    finish_reason: str = ""
    error: str = ""  # its type
    status: int = 0
    labels: list[str] = field(
        default_factory=list
    )  # what the client calls it; others may be called the same
    trace: dict[str, str] = field(
        default_factory=dict
    )  # traceparent and tracestate, as the client sent them
    is_llamacpp: bool = False  # called under a path that only llama.cpp has
    ignored: set[str] = field(default_factory=set)  # fields of the body that have no effect
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def name(self) -> str:
        """The id that the client gets to see: its own label, or else ours."""
        return self.labels[0] if self.labels else self.request_id

    def fields(self) -> dict[str, Any]:
        """The fields of the log line; empty ones are left out."""
        now = time.monotonic()
        fields: dict[str, Any] = {
            "time": _now(),
            "id": self.request_id,
            "label": " ".join(self.labels),
            "status": self.status,
            "method": self.method[:16],
            "route": self.path[:200],
            "tenant": self.tenant[:8],
            "model": self.model,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }
        fields = {name: value for name, value in fields.items() if value}
        if self.num_prompt:
            fields |= {
                "prompt_tokens": self.num_prompt,
                "cached_tokens": self.num_cached,
                "output_tokens": self.num_output,
            }
            fields["queue_ms"] = round(1000 * self.queue_s, 1)
        if self.first_s:
            fields["first_token_ms"] = round(1000 * (self.first_s - self.begun_s), 1)
        if self.num_output > 1 and self.decode_s:
            fields["tokens_per_second"] = round((self.num_output - 1) / self.decode_s, 1)
        return fields | {"total_ms": round(1000 * (now - self.begun_s), 1)}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def new_id(prefix: str) -> str:
    return f"{prefix}{'_' if prefix in _UNDERSCORED else '-'}{uuid.uuid4().hex}"


class RequestLog:
    """A line for each call that has ended, to stderr or to a file. If the file is moved away, a new
    one is made."""

    def __init__(self, path: Path | None = None, log_format: str = "text") -> None:
        if log_format not in ("text", "json"):
            raise ConfigError(f"There is no log format {log_format!r}.", fix="Choose text or json.")
        self._is_json = log_format == "json"
        try:
            self._handler: logging.Handler = (
                WatchedFileHandler(path) if path else logging.StreamHandler(sys.stderr)
            )
        except OSError as error:
            raise ConfigError(
                f"The log file cannot be written: {error}.", fix="Choose another --log-file."
            ) from error
        self._left, self._since_s = (
            float(_REFUSED_AT_ONCE),
            time.monotonic(),
        )  # refusals that may be logged now
        self._num_unlogged = 0
        self._is_failing = False

    def write(self, call: RequestContext) -> None:
        if call.path in _QUIET and call.status < 400:
            return
        if call.status >= 400 and not self._may_log_refusal():
            self._num_unlogged += 1
            return
        fields = call.fields()
        if self._num_unlogged:
            fields["refusals_not_logged"], self._num_unlogged = self._num_unlogged, 0
        self._emit(fields)

    def note(self, event: str, **fields: Any) -> None:
        """A line that is not about a call."""
        self._emit({"time": _now(), "event": event} | fields)

    def _emit(self, fields: dict[str, Any]) -> None:
        text = msgspec.json.encode(fields).decode() if self._is_json else _as_text(fields)
        try:
            self._handler.emit(
                logging.LogRecord("tidemill.requests", logging.INFO, "", 0, text, None, None)
            )
            self._is_failing = False
        except (
            OSError
        ) as error:  # its folder is gone, or the disk is full: calls do not fail for that
            if not self._is_failing:
                _log.error("the request log cannot be written: %s", error)
            self._is_failing = True

    def _may_log_refusal(self) -> bool:
        now = time.monotonic()
        self._left = min(
            self._left + _REFUSED_PER_S * (now - self._since_s), float(_REFUSED_AT_ONCE)
        )
        self._since_s = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _as_text(fields: dict[str, Any]) -> str:
    """Values are quoted only where they would be ambiguous."""
    words = []
    for name, value in fields.items():
        text = str(value)
        if not text.isascii() or not text.isprintable() or " " in text or '"' in text:
            text = msgspec.json.encode(text).decode().encode("ascii", "backslashreplace").decode()
        words.append(text if name == "time" else f"{name}={text}")
    return " ".join(words)


def _named(fields: set[str]) -> bytes:
    """Names of fields as the value of a header. Some are the client's own: only words, and not too
    many."""
    words = sorted({name if re.fullmatch(ID_PATTERN, name) else "?" for name in fields})
    if len(words) > _MAX_IGNORED_NAMED:
        words = [*words[:_MAX_IGNORED_NAMED], "..."]
    return ", ".join(words).encode()


class RequestMiddleware:
    """The outermost layer: gives each call an id, sends it or the client's label back, and writes
    the log line at the end. A name that is not valid is ignored."""

    def __init__(
        self,
        app: ASGIApp,
        log: RequestLog | None,
        on_end: Callable[[RequestContext], None] = lambda _: None,
    ) -> None:
        self._app, self._log, self._on_end = app, log, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_llamacpp = scope["path"] in _WITHOUT_V1 or scope["path"] in _LLAMACPP
        if scope["path"] in _WITHOUT_V1:
            scope = dict(scope) | {
                "path": f"/v1{scope['path']}",
                "raw_path": b"/v1" + scope.get("raw_path", b""),
            }
        path = scope["path"]
        label = next(
            (value for name, value in scope["headers"] if name == b"x-request-id"), b""
        ).decode("latin-1")
        labels = [label] if re.fullmatch(ID_PATTERN, label) else []
        trace = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _TRACE_HEADERS
        }
        call = RequestContext(
            new_id(_PREFIXES.get(path, "req")), scope["method"], path, labels=labels, trace=trace
        )
        call.is_llamacpp = is_llamacpp
        state = scope.setdefault("state", {})
        state["call"], call.stopwatch = call, state.get("stopwatch", call.stopwatch)
        stopwatch.start(call.stopwatch)

        def sending(message: Message) -> Awaitable[None]:  # once a token: no coroutine of its own
            if message["type"] == "http.response.start":
                call.status = message["status"]
                name = call.name.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
                if path.startswith("/v1/messages"):  # Anthropic's
                    message["headers"].append((b"request-id", name))
                if call.ignored:
                    message["headers"].append((b"x-tidemill-ignored", _named(call.ignored)))
                call.stopwatch.enter(WRITING)
            elif not message.get("more_body"):
                return _send_last(message, send, call.stopwatch)
            return send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if not call.stopwatch.is_written:
                call.stopwatch.stop()  # the client has left
            self._on_end(call)
            if self._log is not None:
                self._log.write(call)


async def _send_last(message: Message, send: Send, of_call: Stopwatch) -> None:
    of_call.enter(WRITING)
    await send(message)
    of_call.end()
