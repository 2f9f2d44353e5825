"""The entry point that Ray Serve calls in a replica. It is a module of its own, since Serve copies
a deployment's class with the globals it uses."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_NOT_HERE = ("/v1/files", "/v1/batches")


class Entry:
    """The ASGI application of this process: that of its replica, once it has started."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        if scope["type"] == "http" and scope["path"].startswith(_NOT_HERE):
            error = {
                "message": "Files and batches are not stored by a Ray Serve application.",
                "type": "not_supported",
            }
            await JSONResponse({"error": error | {"param": None, "code": None}}, 501)(
                scope, receive, send
            )
            return
        assert Entry.app is not None
        await Entry.app(scope, receive, send)
