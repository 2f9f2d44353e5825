"""Anthropic's Messages API: messages, streamed or whole, and token counts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from tidemill.server.api.anthropic.codec import MessagesCodec, prompt_of
from tidemill.server.api.anthropic.types import CountRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.http.body import body_of, schema_of


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    add_endpoint(router, models, "/v1/messages", MessagesCodec)

    @router.post("/v1/messages/count_tokens", openapi_extra=schema_of(CountRequest))
    async def count_tokens(
        request: Request, body: CountRequest = Depends(body_of(CountRequest))
    ) -> dict[str, Any]:
        ids, _ = await prompt_of(models.of(body.model), body, request.state.caller.call)
        return {"input_tokens": len(ids)}

    return router
