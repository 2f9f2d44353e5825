"""Named prompt caches: create, list, get, extend, fork and delete prefixes that stay in the KV
cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field, field_validator

from tidemill.capabilities import require
from tidemill.errors import InvalidRequest
from tidemill.server.api.openai.messages import ChatMessages, Message, Tool
from tidemill.server.generation.models import Models
from tidemill.server.generation.retention import (
    NameTaken,
    NoRoomToPin,
    PromptCache,
    PromptCacheUnknown,
    check_room,
)
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.context import ID_PATTERN
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.server.http.responses import until_disconnect
from tidemill.types.kv_policy import KVPolicy
from tidemill.types.sampling import SamplingParams

DEFAULT_TTL_S, MAX_TTL_S = 3600, 7 * 86400
Name = Annotated[str, Field(pattern=ID_PATTERN)]
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL_S)]  # seconds
_json = msgspec.json.Encoder().encode


class Content(Body):
    """The beginning or continuation of a prompt cache: messages, or a text or tokens."""

    name: Name
    ttl: Ttl = DEFAULT_TTL_S
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    prompt: Any = None
    timeout: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)

    @field_validator("prompt")
    @classmethod
    def _is_one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}
        ):
            return prompt
        raise ValueError("it must be a text or a list of token ids")

    def check(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise InvalidRequest(
                "A prompt cache is made of messages or of a prompt.",
                fix="Give one of them.",
                param="messages",
            )


class CreateRequest(Content):
    model: str | None = None
    tools: list[Tool] | None = Field(default=None, max_length=256)
    add_special_tokens: bool = True  # of a prompt


class ForkRequest(Content):
    """The new one has the content of the other, and this on top."""


class ExtendRequest(Body):
    ttl: Ttl


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    routes = PromptCacheRoutes(models)

    @router.post("/v1/prompt_caches", openapi_extra=schema_of(CreateRequest))
    async def create(
        request: Request, body: CreateRequest = Depends(body_of(CreateRequest))
    ) -> dict[str, Any]:
        return await until_disconnect(request, routes.create(body, request.state.caller))

    @router.get("/v1/prompt_caches")
    async def list_all(request: Request) -> dict[str, Any]:
        caller = request.state.caller
        mine = [
            (service, cache) for service, cache in routes.all() if cache.tenant == caller.tenant
        ]
        return {
            "object": "list",
            "data": [body_of_cache(service, cache) for service, cache in mine],
        }

    @router.get("/v1/prompt_caches/{name}")
    async def get(request: Request, name: str) -> dict[str, Any]:
        return body_of_cache(*routes.find(request.state.caller.tenant, name))

    @router.post("/v1/prompt_caches/{name}", openapi_extra=schema_of(ExtendRequest))
    async def extend(
        request: Request, name: str, body: ExtendRequest = Depends(body_of(ExtendRequest))
    ) -> dict[str, Any]:
        """Another time to live, from now on."""
        service, cache = routes.find(request.state.caller.tenant, name)
        cache.expires_s = time.monotonic() + body.ttl
        service.client.renew(cache.pin, body.ttl, "its time was changed")
        return body_of_cache(service, cache)

    @router.post("/v1/prompt_caches/{name}/fork", openapi_extra=schema_of(ForkRequest))
    async def fork(
        request: Request, name: str, body: ForkRequest = Depends(body_of(ForkRequest))
    ) -> dict[str, Any]:
        return await until_disconnect(request, routes.fork(name, body, request.state.caller))

    @router.delete("/v1/prompt_caches/{name}")
    async def delete(request: Request, name: str) -> dict[str, Any]:
        service, cache = routes.find(request.state.caller.tenant, name)
        service.caches.drop(cache)
        service.client.renew(cache.pin, 0, "deleted")
        return {"name": name, "object": "prompt_cache", "deleted": True}

    return router


def body_of_cache(service: Service, cache: PromptCache) -> dict[str, Any]:
    num_pinned = service.pins.num_tokens(cache.pin)
    return {
        "name": cache.name,
        "object": "prompt_cache",
        "model": cache.model,
        "kind": "prompt" if cache.messages is None else "messages",
        "created": cache.created_s,
        "expires_in": max(round(cache.expires_s - time.monotonic()), 0),
        "tokens": len(cache.token_ids),
        # Whole pages; 0: it is computed and pinned again by the next request with it.
        "pinned_tokens": num_pinned,
        "uses": cache.num_uses,
    }


class PromptCacheRoutes:
    def __init__(self, models: Models) -> None:
        self._models = models

    def all(self) -> Iterator[tuple[Service, PromptCache]]:
        return ((service, cache) for service in self._models for cache in service.caches)

    def find(self, tenant: str, name: str) -> tuple[Service, PromptCache]:
        for service in self._models:
            cache = service.caches.find(tenant, name)
            if cache is not None and cache.is_ready:
                return service, cache
        raise PromptCacheUnknown(f"There is no prompt cache {name[:100]!r}.", param="name")

    async def create(self, body: CreateRequest, caller: Caller) -> dict[str, Any]:
        body.check()
        service = self._models.of(body.model)
        service.ready.model.check_pooling(
            None
        )  # an encoder generates nothing, and has no prefix cache
        if body.tools and body.messages is None:
            raise InvalidRequest(
                "Tools belong to messages.", fix="Give messages, or leave tools out.", param="tools"
            )
        messages = (
            None if body.messages is None else [message.for_template() for message in body.messages]
        )
        if messages is None:
            ids = await _tokens(service, body.prompt, body.add_special_tokens)
        else:
            ids = await _chat_tokens(service, messages, body.tools)
        return await self._pin(service, body, caller, ids, messages, body.tools)

    async def fork(self, name: str, body: ForkRequest, caller: Caller) -> dict[str, Any]:
        body.check()
        _, source = self.find(caller.tenant, name)
        service = self._models.of(source.model)
        if (source.messages is None) != (body.messages is None):
            kind, param = (
                ("a prompt", "messages") if source.messages is None else ("messages", "prompt")
            )
            raise InvalidRequest(
                f"The prompt cache {name!r} is made of {kind}.",
                fix=f"Go on with {kind}.",
                param=param,
            )
        if body.messages is None or source.messages is None:
            ids = [*source.token_ids, *await _tokens(service, body.prompt, False)]
            return await self._pin(service, body, caller, ids, None, None)
        messages = [*source.messages, *(message.for_template() for message in body.messages)]
        ids = await _chat_tokens(service, messages, source.tools)
        return await self._pin(service, body, caller, ids, messages, source.tools)

    async def _pin(
        self,
        service: Service,
        body: Content,
        caller: Caller,
        ids: list[int],
        messages: list[dict[str, Any]] | None,
        tools: list[Tool] | None,
    ) -> dict[str, Any]:
        """Compute it by a request, whose prefix is pinned."""
        config = service.ready.config
        require("prompt caches", config.features)
        if len(ids) < config.page_size:
            what = f"It has {len(ids)} tokens, fewer than a page of the KV cache."
            raise InvalidRequest(
                what,
                fix=f"Give {config.page_size} tokens or more.",
                param="messages" if messages else "prompt",
            )
        num_bytes = 8 * len(ids) + len(
            _json([messages, [tool.model_dump() for tool in tools or ()]])
        )
        every = [cache for _, cache in self.all()]
        if any((cache.tenant, cache.name) == (caller.tenant, body.name) for cache in every):
            raise NameTaken(
                f"There is a prompt cache {body.name!r}.",
                fix="Delete it first, or choose another name.",
                param="name",
            )
        check_room(every, caller.tenant, num_bytes)
        expires_s = time.monotonic() + body.ttl
        cache = PromptCache(
            body.name, caller.tenant, service.model_name, ids, messages, tools, expires_s, num_bytes
        )
        service.caches.put(cache)  # the name is taken from now on
        try:
            num_held, num_cached = await _computed(service, caller, cache, body.timeout)
            if not num_held:
                why = service.pins.why_not(cache.pin)
                fix = (
                    "Delete or shorten prompt caches, or serve with more --kv-memory or "
                    "--max-pinned."
                )
                raise NoRoomToPin(
                    f"The prompt cache cannot be pinned: {why}.", fix=fix, param="name"
                )
            cache.is_ready = True
        finally:
            if not cache.is_ready:
                service.caches.drop(cache)
                service.client.renew(cache.pin, 0, "it was not made")
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": num_cached}}
        return body_of_cache(service, cache) | {"usage": usage}


async def _computed(
    service: Service, caller: Caller, cache: PromptCache, timeout_s: float | None
) -> tuple[int, int]:
    """Computes the prompt of a cache and pins it: the number of tokens pinned, and of those cached
    before."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, kv_policy=KVPolicy("full")
    )  # whatever requests with it keep
    num_held = num_cached = 0
    outputs = service.stream(
        caller, cache.token_ids, params, timeout_s=timeout_s, prefix_leases=[cache.hold]
    )
    async with aclosing(outputs):
        async for delta, _ in outputs:
            num_held, num_cached = delta.num_held, delta.num_cached
    return num_held, num_cached


async def _tokens(service: Service, prompt: str | list[int], add_special: bool) -> list[int]:
    return prompt if isinstance(prompt, list) else await service.encode(prompt, add_special)


async def _chat_tokens(
    service: Service, messages: list[dict[str, Any]], tools: list[Tool] | None
) -> list[int]:
    template_options = ChatMessages.model_construct(
        messages=[], tools=tools, add_generation_prompt=False
    ).template_options()
    return await service.encode_chat(messages, **template_options)
