"""OpenAI's Conversations API: lists of items that responses continue. They are kept with the stored
responses."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.responses.types import Items, Metadata, make_id, messages_of, stored_item
from tidemill.server.http.aside import aside
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.server.http.responses import json_response
from tidemill.server.store.files import read_limit
from tidemill.server.store.responses import Item, Store, Stored, Unknown, page_of


class ConversationRequest(Body):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationChange(Body):
    metadata: Metadata = Field(default_factory=dict)


class NewItems(Body):
    items: Items


def make_router(store: Store) -> APIRouter:
    router = APIRouter()

    def get(request: Request, conversation_id: str) -> Stored:
        return store.get(request.state.caller.tenant, conversation_id, "conversation")

    @router.post("/v1/conversations", openapi_extra=schema_of(ConversationRequest))
    async def create(
        request: Request, body: ConversationRequest = Depends(body_of(ConversationRequest))
    ) -> Response:
        items = await _checked(body.items or [])
        name = make_id("conv")
        conversation = {
            "id": name,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        store.put(request.state.caller.tenant, name, Stored.of(items, conversation))
        return json_response(conversation)

    @router.get("/v1/conversations/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> Response:
        return _as_json(get(request, conversation_id).body())

    @router.post("/v1/conversations/{conversation_id}", openapi_extra=schema_of(ConversationChange))
    async def update(
        request: Request,
        conversation_id: str,
        body: ConversationChange = Depends(body_of(ConversationChange)),
    ) -> Response:
        before = get(request, conversation_id)
        conversation = msgspec.json.decode(before.head) | {"metadata": body.metadata}
        store.put(
            request.state.caller.tenant, conversation_id, Stored.of(before.items, conversation)
        )
        return json_response(conversation)

    @router.delete("/v1/conversations/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        get(request, conversation_id)
        store.drop(request.state.caller.tenant, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @router.post("/v1/conversations/{conversation_id}/items", openapi_extra=schema_of(NewItems))
    async def add(
        request: Request, conversation_id: str, body: NewItems = Depends(body_of(NewItems))
    ) -> Response:
        tenant = request.state.caller.tenant
        store.get_to_continue(tenant, conversation_id, "conversation")
        new = await _checked(body.items)
        before = store.get_to_continue(
            tenant, conversation_id, "conversation"
        )  # others may have added to it meanwhile
        if len(before.items) + len(new) > MAX_MESSAGES:
            raise InvalidRequest(f"A conversation may have {MAX_MESSAGES} items.", param="items")
        store.put(tenant, conversation_id, replace(before, items=(*before.items, *new)))
        return _as_json(await aside(partial(page_of, new, {"order": "asc"}, MAX_MESSAGES)))

    @router.get("/v1/conversations/{conversation_id}/items")
    async def items(request: Request, conversation_id: str) -> Response:
        query = dict(request.query_params)
        return _as_json(
            page_of(
                get(request, conversation_id).items, query, read_limit(query.get("limit"), 20, 100)
            )
        )

    @router.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def item(request: Request, conversation_id: str, item_id: str) -> Response:
        return _as_json(find(get(request, conversation_id), item_id).text)

    @router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
        before = get(request, conversation_id)
        gone = find(before, item_id)
        kept = tuple(item for item in before.items if item is not gone)
        store.put(request.state.caller.tenant, conversation_id, replace(before, items=kept))
        return _as_json(before.body())

    return router


def find(conversation: Stored, item_id: str) -> Item:
    found = next((item for item in conversation.items if item.id == item_id), None)
    if found is None:
        raise Unknown(f"There is no item {item_id[:100]!r}.", param="item_id")
    return found


def _as_json(text: bytes) -> Response:
    return Response(text, media_type="application/json")


async def _checked(items: list[dict[str, Any]]) -> list[Item]:
    """Items that can be part of a prompt, as they are stored."""

    def check() -> list[Item]:
        messages_of(items)
        return [Item.of(stored_item(item)) for item in items]

    return await aside(check)
