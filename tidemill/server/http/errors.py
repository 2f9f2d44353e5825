"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}}. No paths, no
tracebacks."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tidemill.errors import (
    Cancelled,
    ClientTooSlow,
    ContextTooLong,
    DeadlineExceeded,
    ModelFailed,
    NotOffered,
    TidemillError,
)
from tidemill.server.http.responses import ClientGone
from tidemill.server.http.target import is_google

_log = logging.getLogger("tidemill.server")


_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": _TEXT,
        "code": _TEXT,
    },
    "required": ["message", "type", "param", "code"],
}
_GOOGLE_ERROR = {
    "type": "object",
    "properties": {
        "code": {"type": "integer"},
        "message": {"type": "string"},
        "status": {"type": "string"},
    },
    "required": ["code", "message", "status"],
}


def described(error: dict[str, Any] = _ERROR) -> dict[int | str, dict[str, Any]]:
    """The responses of errors, for the OpenAPI document."""
    schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    return {
        "4XX": {
            "description": "The request was refused; the message says why.",
            "content": {"application/json": {"schema": schema}},
        },
        "5XX": {
            "description": "A server error.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
    }


DESCRIBED, DESCRIBED_BY_GOOGLE = described(), described(_GOOGLE_ERROR)

_FINAL = (
    Cancelled,
    ClientTooSlow,
    DeadlineExceeded,
    ModelFailed,
    NotOffered,
)  # the same request would end in the same way
_TRY_AGAIN = (408, 409, 429)


_OF_ANTHROPIC = {  # types of errors by status; others keep theirs
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 500: "api_error", 503:
    "overloaded_error",
    507: "api_error",
}  # fmt: skip


_OF_GOOGLE = {  # names of statuses
    401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 501: "UNIMPLEMENTED",
    503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def format_error(
    path: str, body: dict[str, Any], status: int, request_id: str = ""
) -> dict[str, Any]:
    """An error as the clients of that path's API expect it."""
    if is_anthropic(path):
        error = body["error"] | {"type": _OF_ANTHROPIC.get(status, body["error"]["type"])}
        return {"type": "error", "error": error} | (
            {"request_id": request_id} if request_id else {}
        )
    if is_google(path):
        name = _OF_GOOGLE.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": status, "message": body["error"]["message"], "status": name}}
    if path.startswith("/api/"):  # Ollama's
        return {"error": body["error"]["message"]}
    if (
        path in ("/pooling", "/classify") and body["error"]["type"] == "invalid_request_error"
    ):  # vLLM's
        return {"error": body["error"] | {"type": "BadRequestError"}}
    if (
        path == "/v1/score" and body["error"]["type"] == "invalid_request_error"
    ):  # also as SGLang has it
        return body | {
            "object": "error",
            "message": body["error"]["message"],
            "type": "BadRequestError",
        }
    return body


def headers_of(error: TidemillError) -> dict[str, str]:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if isinstance(error, _FINAL) or (error.status < 500 and error.status not in _TRY_AGAIN):
        headers["x-should-retry"] = "false"
    if error.status in (408, 413):  # the rest of the body will not be read
        headers["Connection"] = "close"
    return headers


def error_body(error: TidemillError) -> dict[str, Any]:
    body = _body(str(error), error.kind, error.param, error.code)
    body["error"] |= error.figures or {}
    return body


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def internal_error() -> dict[str, Any]:
    return _body("An internal error occurred.", "internal_error", None, None)


def _paths(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route.path] if included is None else _paths(included.routes)


def _no_route(app: FastAPI, request: Request) -> str:
    path, known = request.url.path, [path for path in _paths(app.routes) if "{" not in path]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    what = f"Did you mean {near[0]}?" if near else "GET /openapi.json lists the routes."
    return f"There is no route {request.method} {path[:100]} here. {what}"


def install(app: FastAPI) -> None:
    def answer(
        request: Request,
        body: dict[str, Any],
        status: int,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        content = format_error(request.url.path, body, status, request.state.call.name)
        return JSONResponse(content, status, headers)

    @app.exception_handler(TidemillError)
    async def typed(request: Request, error: TidemillError) -> Response:
        request.state.call.error = error.kind
        body = error_body(error)
        if request.state.call.is_llamacpp and isinstance(error, ContextTooLong):
            body["error"]["type"] = "exceed_context_size_error"
        return answer(request, body, error.status, headers_of(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kind = request.state.call.error = (
            "invalid_request_error" if error.status_code < 500 else "internal_error"
        )
        message = str(error.detail)
        if error.status_code == 404:
            message = _no_route(app, request)
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"This route does not take {request.method}. Use {allowed}."
        return answer(request, _body(message, kind, None, None), error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        request.state.call.error = "internal_error"
        _log.exception("unexpected error in %s", request.url.path, exc_info=error)
        return answer(request, internal_error(), 500)
