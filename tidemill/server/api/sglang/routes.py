"""SGLang's own API: generation, and what its clients ask about the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tidemill.errors import TidemillError
from tidemill.server.api.sglang.codec import GenerateCodec
from tidemill.server.api.sglang.types import AbortRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.service import Service
from tidemill.server.http.body import body_of, schema_of
from tidemill.version import __version__


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    add_endpoint(router, models, "/generate", GenerateCodec)

    @router.post("/abort_request", openapi_extra=schema_of(AbortRequest))
    async def abort(
        request: Request, body: AbortRequest = Depends(body_of(AbortRequest))
    ) -> Response:
        caller = request.state.caller
        models.cancel(body.rid, None if caller.is_admin else caller.tenant)
        return Response(b"{}", media_type="application/json")

    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        """No later request finds what was cached before; its pages are free for others."""
        for service in models:
            service.cache_generation += 1
            service.release_pins("the cache was flushed")
        return PlainTextResponse("Cache flushed.\n")

    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return _model_info(models.default)

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return _server_info(models.default)

    router.add_api_route("/get_model_info", model_info, include_in_schema=False)
    router.add_api_route("/get_server_info", server_info, include_in_schema=False)

    @router.get("/health_generate", include_in_schema=False)
    async def health_generate() -> Response:
        try:
            await models.prove(10.0)
        except TidemillError as error:
            return JSONResponse({"status": error.message}, 503)
        return Response(status_code=200)

    return router


def _model_info(service: Service) -> dict[str, Any]:
    return {
        "model_path": service.model_name,  # where its files are is nobody's business
        "tokenizer_path": service.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _server_info(service: Service) -> dict[str, Any]:
    config = service.ready.config
    return {
        "version": __version__,
        "model_path": service.model_name,
        "served_model_name": service.model_name,
        "context_length": config.max_context,
        "max_running_requests": config.max_requests,
        "max_total_num_tokens": config.num_pages * config.page_size,
        "page_size": config.page_size,
        "chunked_prefill_size": config.token_budget,
    }
