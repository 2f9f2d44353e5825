"""Google's Gemini API: generateContent, streamed or whole, token counts, and the list of models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.gemini.codec import GenerateContentCodec, ListCodec, prompt_of
from tidemill.server.api.gemini.types import CountRequest, GenerateRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.http.body import parsed, raw_body, schema_of
from tidemill.server.http.errors import DESCRIBED_BY_GOOGLE
from tidemill.server.http.responses import json_response
from tidemill.server.http.target import GEMINI_METHODS, GEMINI_PATH, MODEL_PATH


def make_router(models: Models) -> APIRouter:
    router = APIRouter(responses=DESCRIBED_BY_GOOGLE)

    async def list_models() -> Response:
        cards = [_card(service) for service in (*models, *models.adapters())]
        return json_response({"models": cards})

    async def model(name: str) -> Response:
        return json_response(_card(models.of(name)))

    async def generate(request: Request, name: str) -> Response:
        models.of(name)
        body = await parsed(GenerateRequest, await raw_body(request), request.state.caller.call)
        body.model, body.stream = name, request.url.path.endswith(":streamGenerateContent")
        codec = GenerateContentCodec if request.query_params.get("alt") == "sse" else ListCodec
        return await codec(models, body, request.state.caller).respond(request)

    async def count(request: Request, name: str) -> Response:
        service, call = models.of(name), request.state.caller.call
        body = await parsed(CountRequest, await raw_body(request), call)
        counted = body.generate_content_request or body
        if not counted.contents:
            raise InvalidRequest("The parameter 'contents' is required.", param="contents")
        ids, _ = await prompt_of(service, counted, call)
        return json_response({"totalTokens": len(ids)})

    router.add_api_route(GEMINI_PATH.rstrip("/"), list_models)
    router.add_api_route(f"{GEMINI_PATH}{{name:path}}", model)
    for path in (GEMINI_PATH, MODEL_PATH):
        for method in GEMINI_METHODS:
            is_count = method == "countTokens"
            router.add_api_route(
                f"{path}{{name:path}}:{method}",
                count if is_count else generate,
                methods=["POST"],
                openapi_extra=schema_of(CountRequest if is_count else GenerateRequest),
                include_in_schema=path == GEMINI_PATH,
            )
    return router


def _card(service: Service) -> dict[str, Any]:
    can_generate = service.ready.model.own_pooling is None
    return {
        "name": f"models/{service.model_name}",
        "displayName": service.model_name,
        "version": "1",
        "inputTokenLimit": service.max_context,
        "outputTokenLimit": service.max_context,
        "supportedGenerationMethods": list(GEMINI_METHODS) if can_generate else [],
    }
