"""OpenAI's routes: models, completions, chats and embeddings, and requests by their ids."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.api.openai import embeddings
from tidemill.server.api.openai.chat import ChatBatchCodec, ChatCodec
from tidemill.server.api.openai.completions import CompletionCodec
from tidemill.server.api.openai.messages import ChatMessages
from tidemill.server.api.openai.types import ChatRequest
from tidemill.server.api.vllm.adapters import adapter_card
from tidemill.server.generation.models import AdapterService, Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.service import Service
from tidemill.server.http.body import body_of, parsed, raw_body, schema_of
from tidemill.server.http.responses import json_response

_ENCODER_FIELDS = {
    "input": "/v1/embeddings", "text_1": "/v1/score", "queries": "/v1/score", "data_1": "/v1/score",
    "documents": "/v1/rerank",
}  # fmt: skip


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        services = (*models, *models.adapters())
        return {"object": "list", "data": [_model_card(service) for service in services]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        return _model_card(models.of(model_id))

    add_endpoint(router, models, "/v1/completions", CompletionCodec)
    add_endpoint(router, models, "/v1/chat/completions", ChatCodec)
    add_endpoint(router, models, "/v1/chat/completions/batch", ChatBatchCodec)

    @router.post("/invocations", openapi_extra=schema_of(ChatRequest))
    async def invocations(request: Request) -> Response:
        """The route that SageMaker calls: what the body asks for tells the route."""
        raw = await raw_body(request)
        try:
            names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body must be a JSON object: {error}.") from None
        caller, endpoint = request.state.caller, ENDPOINTS[_route_of(models, names)]
        body = await parsed(endpoint.body_type, raw, caller.call)
        return await endpoint(models, body, caller).respond(request)

    @router.post("/v1/chat/completions/render", openapi_extra=schema_of(ChatMessages))
    async def render(body: ChatMessages = Depends(body_of(ChatMessages))) -> Response:
        """The prompt, without a completion."""
        service, options = models.of(body.model), body.template_options()
        text = await service.render_chat(body.conversation, **options)
        ids = await service.encode_chat(body.conversation, **options)
        return json_response({"prompt": text, "prompt_token_ids": ids})

    @router.post("/v1/chat/completions/input_tokens", openapi_extra=schema_of(ChatRequest))
    async def input_tokens(body: ChatRequest = Depends(body_of(ChatRequest))) -> Response:
        """The length of the prompt, without a completion."""
        service, options = models.of(body.model), body.template_options()
        ids = await service.encode_chat(body.conversation, **options)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    @router.get("/v1/requests/{request_id}/explain")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """Explains where a request's time went, for each of its prompts and samples; of a label,
        for the latest requests with it."""
        caller = request.state.caller
        parts = models.explain(request_id, None if caller.is_admin else caller.tenant)
        if not parts:
            what = f"There are no records of a request {request_id[:100]!r}."
            raise RequestUnknown(what, param="request_id")
        return {"id": request_id, "object": "list", "data": parts}

    @router.delete("/v1/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> dict[str, Any]:
        caller = request.state.caller
        if not models.cancel(request_id, None if caller.is_admin else caller.tenant):
            what = f"There is no request {request_id[:100]!r} in progress."
            raise RequestUnknown(what, param="request_id")
        return {"id": request_id, "object": "request", "cancelled": True}

    router.include_router(embeddings.make_router(models))
    return router


class RequestUnknown(InvalidRequest):
    status = 404


def _route_of(models: Models, names: dict[str, msgspec.Raw]) -> str:
    """The route that a body of /invocations asks for."""
    if "prompt" in names:
        return "/v1/completions"
    if "messages" in names:
        name = msgspec.json.decode(names.get("model", b"null"))
        is_encoder = models.of(name if isinstance(name, str) else None).ready.model.own_pooling
        return "/v1/embeddings" if is_encoder else "/v1/chat/completions"
    return next(
        (_ENCODER_FIELDS[name] for name in _ENCODER_FIELDS if name in names), "/v1/chat/completions"
    )


def _model_card(service: Service) -> dict[str, Any]:
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "tidemill",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.max_context,
        "sampling_defaults": service.defaults.shown(),
        "aliases": list(service.aliases),
        "state": service.state,
    }
    return adapter_card(card, service) if isinstance(service, AdapterService) else card
