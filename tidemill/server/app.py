"""The application: routes of every API over one Service, and its life."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tidemill.server import errors, openai
from tidemill.server.service import Service
from tidemill.version import __version__


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Tidemill", version=__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    app.include_router(openai.make_router(service))

    @app.get("/health")
    async def health() -> Response:
        """Is the engine process there?"""
        alive = service.client.alive
        return JSONResponse({"status": "ok" if alive else "engine is down"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app
