"""OpenAI's Responses API: create, retrieve, list the input, cancel, delete and count tokens."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.responses import conversations
from tidemill.server.api.responses.codec import ResponseCodec
from tidemill.server.api.responses.prompt import items_of, prompt_of
from tidemill.server.api.responses.types import CountRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.http.aside import aside
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.http.responses import EventStream
from tidemill.server.store.files import read_limit
from tidemill.server.store.responses import Item, Store, page_of

_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router, store = APIRouter(), models.responses
    add_endpoint(router, models, "/v1/responses", ResponseCodec)

    @router.post("/v1/responses/input_tokens", openapi_extra=schema_of(CountRequest))
    async def input_tokens(
        request: Request, body: CountRequest = Depends(body_of(CountRequest))
    ) -> dict[str, Any]:
        caller, service = request.state.caller, models.of(body.model)
        before, new = items_of(store, body, caller.tenant)
        ids = await prompt_of(service, body, before, new, caller.call)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        query, tenant = request.query_params, request.state.caller.tenant
        if query.get("stream", "false") == "false":
            return _as_json(await _body(store, tenant, response_id))
        after = query.get("starting_after", "-1")
        if not re.fullmatch(r"-1|[0-9]{1,9}", after):
            what = "starting_after is the sequence number of an event."
            raise InvalidRequest(what, param="starting_after")
        events = _events(store, tenant, response_id, int(after) + 1)
        return EventStream(events, also_close=events)

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query, tenant = dict(request.query_params), request.state.caller.tenant
        limit = read_limit(query.get("limit"), 20, 100)
        return _as_json(page_of(_input_items(store, tenant, response_id), query, limit))

    @router.get("/v1/response_items/{item_id}")
    async def response_item(request: Request, item_id: str) -> Response:
        """The item that an item_reference names: a router asks which server has it."""
        return _as_json(store.output_item(request.state.caller.tenant, item_id).text)

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        tenant = request.state.caller.tenant
        running: ResponseCodec | None = store.running.get((tenant, response_id))
        if running is None:
            store.get(tenant, response_id)
            store.drop(tenant, response_id)
        else:
            running.is_deleted = True
            await running.cancel()
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        tenant = request.state.caller.tenant
        running: ResponseCodec | None = store.running.get((tenant, response_id))
        if running is not None:
            await running.cancel()
            cancelled = {} if running.is_over else {"status": "cancelled"}
            return _as_json(await aside(partial(_json, running.response() | cancelled)))
        stored = store.get(tenant, response_id)
        if not stored.is_background:  # OpenAI's words
            raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
        return _as_json(await aside(stored.body, stored.num_bytes))

    router.include_router(conversations.make_router(store))
    return router


async def _body(store: Store, tenant: str, response_id: str) -> bytes:
    running: ResponseCodec | None = store.running.get((tenant, response_id))
    if running is not None:
        return await aside(partial(_json, running.response()))
    stored = store.get(tenant, response_id)
    return await aside(stored.body, stored.num_bytes)


def _events(
    store: Store, tenant: str, response_id: str, num_known: int
) -> AsyncGenerator[bytes, None]:
    """The events after so many."""
    running: ResponseCodec | None = store.running.get((tenant, response_id))
    if running is not None and running.task is not None and running.body.stream:
        return running.follow(num_known)
    stored = b"" if running is not None else store.get(tenant, response_id).events
    if not stored:
        what = "Only a response that was created with background and stream is streamed again."
        raise InvalidRequest(what, fix="Retrieve it without stream.", param="stream")
    return _again(stored, num_known)


async def _again(stored: bytes, num_known: int) -> AsyncGenerator[bytes, None]:
    for event in stored.removesuffix(b"\n\n").split(b"\n\n")[num_known:]:
        yield event + b"\n\n"


def _input_items(store: Store, tenant: str, response_id: str) -> tuple[Item, ...]:
    running: ResponseCodec | None = store.running.get((tenant, response_id))
    if running is None:
        return store.get(tenant, response_id).items
    return (*running.before, *running.new)


def _as_json(text: bytes) -> Response:
    return Response(text, media_type="application/json")
