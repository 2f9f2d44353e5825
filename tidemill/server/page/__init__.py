"""The chat page: static files in this folder. There is no build step, and nothing is loaded from
another host.

They hold no secret, so they need no key; the page asks for the key and sends it with every call.
Its content security policy lets a browser run no script but these files and connect to no other
server, and no text can become markup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    # Revalidated, so that after an upgrade no old file is used with a new one.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    media_type: str
    etag: str


def _read() -> dict[str, _File]:
    found = {}
    for file in files(__name__).iterdir():
        media_type = _TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:
            body = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = _File(
                body, f"{media_type}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            )
    return found


_FILES = _read()
PATHS = frozenset(_FILES)


def make_router(is_shown: bool = True) -> APIRouter:
    """Without the page, HEAD / still tells Ollama's clients that there is a server."""
    router = APIRouter()
    if not is_shown:
        router.add_api_route("/", _nothing, methods=["GET", "HEAD"], include_in_schema=False)
        return router
    for path, file in _FILES.items():
        router.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)
    return router


async def _nothing(request: Request) -> Response:
    if request.method == "HEAD":
        return Response()
    raise HTTPException(404)


def _sender(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        headers = _HEADERS | {"ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)

    return send
