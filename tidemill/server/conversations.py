"""OpenAI's Conversations API: lists of items that responses continue. They are kept with the stored responses."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.body import Body, body_of, schema_of
from tidemill.server.files import read_limit
from tidemill.server.openai_messages import MAX_MESSAGES
from tidemill.server.responses_store import Store, Unknown, page_of
from tidemill.server.responses_types import Items, Metadata, make_id, messages_of, stored_item


class ConversationRequest(Body):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationChange(Body):
    metadata: Metadata = Field(default_factory=dict)


class NewItems(Body):
    items: Items


def append(store: Store, tenant: str, conversation_id: str, items: list[dict[str, Any]]) -> None:
    """Unless the conversation is gone, or full."""
    with suppress(InvalidRequest):
        before, body = store.get_to_continue(tenant, conversation_id, "conversation")
        if len(before) + len(items) <= MAX_MESSAGES:
            store.put(tenant, [*before, *items], body)


def make_router(store: Store) -> APIRouter:
    router = APIRouter()

    def get(request: Request, conversation_id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return store.get(request.state.caller.tenant, conversation_id, "conversation")

    @router.post("/v1/conversations", openapi_extra=schema_of(ConversationRequest))
    async def create(request: Request, body: ConversationRequest = Depends(body_of(ConversationRequest))) -> dict[str, Any]:
        made = {"id": make_id("conv"), "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {}}
        store.put(request.state.caller.tenant, _checked(body.items or []), made)
        return made

    @router.get("/v1/conversations/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> dict[str, Any]:
        return get(request, conversation_id)[1]

    @router.post("/v1/conversations/{conversation_id}", openapi_extra=schema_of(ConversationChange))
    async def update(
        request: Request, conversation_id: str, body: ConversationChange = Depends(body_of(ConversationChange))
    ) -> dict[str, Any]:
        items, made = get(request, conversation_id)
        store.put(request.state.caller.tenant, items, made | {"metadata": body.metadata})
        return made | {"metadata": body.metadata}

    @router.delete("/v1/conversations/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        get(request, conversation_id)
        store.drop(request.state.caller.tenant, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @router.post("/v1/conversations/{conversation_id}/items", openapi_extra=schema_of(NewItems))
    async def add(request: Request, conversation_id: str, body: NewItems = Depends(body_of(NewItems))) -> dict[str, Any]:
        items, made = store.get_to_continue(request.state.caller.tenant, conversation_id, "conversation")
        new = _checked(body.items)
        if len(items) + len(new) > MAX_MESSAGES:
            raise InvalidRequest(f"A conversation may have {MAX_MESSAGES} items.", param="items")
        store.put(request.state.caller.tenant, [*items, *new], made)
        return page_of(new, {"order": "asc"}, MAX_MESSAGES)

    @router.get("/v1/conversations/{conversation_id}/items")
    async def items(request: Request, conversation_id: str) -> dict[str, Any]:
        query = dict(request.query_params)
        return page_of(get(request, conversation_id)[0], query, read_limit(query.get("limit"), 20, 100))

    @router.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        found = next((one for one in get(request, conversation_id)[0] if one["id"] == item_id), None)
        if found is None:
            raise Unknown(f"There is no item {item_id[:100]!r}.", param="item_id")
        return found

    @router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        before, made = get(request, conversation_id)
        await item(request, conversation_id, item_id)
        store.put(request.state.caller.tenant, [one for one in before if one["id"] != item_id], made)
        return made

    return router


def _checked(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items that can be part of a prompt, as they are stored."""
    messages_of(items)
    return [stored_item(item) for item in items]
