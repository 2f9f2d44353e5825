"""The application: the routes of every API over the Models, and health checks."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from tidemill.errors import TidemillError
from tidemill.server import page
from tidemill.server.api import refused
from tidemill.server.api.anthropic import batches as anthropic_batches
from tidemill.server.api.anthropic import routes as anthropic
from tidemill.server.api.cohere import embed as cohere
from tidemill.server.api.gemini import routes as gemini
from tidemill.server.api.llamacpp import routes as llamacpp
from tidemill.server.api.ollama import routes as ollama
from tidemill.server.api.openai import routes as openai
from tidemill.server.api.responses import routes as responses
from tidemill.server.api.sglang import routes as sglang
from tidemill.server.api.tidemill import prompt_caches, usage
from tidemill.server.api.vllm import adapters, label_scores, rerank, tokens
from tidemill.server.generation.models import Models
from tidemill.server.http import errors
from tidemill.server.http.access import Access, Guard
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestLog, RequestMiddleware
from tidemill.server.http.listen import RootPathMiddleware
from tidemill.server.http.responses import EventStream
from tidemill.server.store import batches, files
from tidemill.server.store.storage import Storage
from tidemill.version import __version__

_READY_WITHIN_S = 10.0


def create_app(
    models: Models,
    access: Access,
    storage: Storage,
    runner: batches.Batches,
    log: RequestLog | None,
    root_path: str = "",
) -> ASGIApp:
    app = FastAPI(
        title="Tidemill",
        version=__version__,
        openapi_url=None,  # below
        redirect_slashes=False,
        responses=errors.DESCRIBED,
        servers=[{"url": root_path}] if root_path else None,
    )
    errors.install(app)
    for service in models:
        service.allows_templates = access.request_templates
    for api in (
        openai,
        rerank,
        cohere,
        label_scores,
        responses,
        anthropic,
        gemini,
        tokens,
        llamacpp,
        sglang,
        ollama,
        adapters,
        prompt_caches,
    ):
        app.include_router(api.make_router(models))
    app.include_router(page.make_router(models.default.response_defaults.shows_page))
    app.include_router(refused.make_router())
    app.include_router(usage.make_router(models, access))
    app.include_router(files.make_router(storage))
    app.include_router(batches.make_router(runner, storage))
    app.include_router(anthropic_batches.make_router(runner, storage))

    @app.get("/health")
    async def health() -> Response:
        """Liveness: the process can serve. It stays healthy while an engine restarts, and while one
        of several models or engines works: then its status is `degraded`."""
        return JSONResponse(models.health(), 200 if models.alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Readiness: an engine has completed a step recently, or completes one now; or models are
        loaded on demand."""
        try:
            await models.prove(_READY_WITHIN_S)
        except TidemillError as error:
            return JSONResponse({"status": error.message}, 503)
        health = models.health()
        return JSONResponse(
            health | {"status": "ready" if health["status"] == "ok" else health["status"]}
        )

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        """The health check that SageMaker and SGLang call."""
        return await health()

    @app.get("/load")
    async def load() -> Response:
        """Requests in progress, as vLLM tells them."""
        return JSONResponse({"server_load": models.num_pending})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @cache
    def document() -> bytes:
        return bytes(JSONResponse(app.openapi()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The first time it takes half a second, in which responses must go on."""
        return Response(await aside(document), media_type="application/json")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Beside the event loop: there may be many models."""
        return Response(await aside(models.metrics), media_type=CONTENT_TYPE_LATEST)

    @app.get(
        "/v1/engine/live", include_in_schema=False
    )  # it does not end; generated clients would wait for that
    async def live(request: Request) -> Response:
        caller = request.state.caller
        chosen = models.of(request.query_params.get("model"))
        watcher = chosen.live.watch(
            lambda: models.is_draining, None if caller.is_admin else caller.tenant
        )
        return EventStream(watcher.frames(), also_close=watcher)

    called = RequestMiddleware(Guard(app, access), log, models.usage.take_call)
    return RootPathMiddleware(called, root_path) if root_path else called
