"""OpenAI's Responses API: create (streamed, whole, in the background), retrieve, list the input, cancel, delete, count tokens."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import Cancelled, InvalidRequest, TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.sampling import SamplingParams
from tidemill.server.api.openai.writers import MAX_LOGPROB_CELLS
from tidemill.server.api.responses import conversations
from tidemill.server.api.responses.types import (
    MAX_REFERENCES,
    CountRequest,
    ResponseRequest,
    is_reference,
    messages_of,
    stored_item,
)
from tidemill.server.api.responses.writer import ResponseWriter
from tidemill.server.generation.conversation import own_id, template_variables, with_one_system
from tidemill.server.generation.models import Models
from tidemill.server.generation.retention import key_holds
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.http.context import Call
from tidemill.server.http.responses import EventStream, named_event, until_disconnect
from tidemill.server.store.files import read_limit
from tidemill.server.store.responses import Item, Store, Stored, page_of
from tidemill.wire import Delta

_json = msgspec.json.Encoder().encode
_log = logging.getLogger("tidemill.server")
_BYTES_PER_ITEM = 256  # of JSON, to estimate
Outputs = AsyncGenerator[tuple[Delta, TextDelta], None]


@dataclass(slots=True, weakref_slot=True)
class _Job:
    """A response that is being generated."""

    body: ResponseRequest
    caller: Caller
    before: tuple[Item, ...]  # of the conversation so far
    new: tuple[Item, ...]
    writer: ResponseWriter
    outputs: Outputs
    task: asyncio.Task[None] | None = None  # in the background
    is_deleted: bool = False
    events: list[bytes] = field(default_factory=list)  # of one in the background that is streamed, in wire format
    has_more: asyncio.Event = field(default_factory=asyncio.Event)  # events, or its end

    @property
    def key(self) -> tuple[str, str]:
        return self.caller.tenant, self.writer.response_id


class Responses:
    """Those stored, and those being generated."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.store = Store()
        # By tenant and id. Jobs are held by those who run them.
        self._running: WeakValueDictionary[tuple[str, str], _Job] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- from a request to a job

    async def begin(self, body: ResponseRequest, caller: Caller) -> _Job:
        service = self._models.of(body.model)
        if body.request_id is not None and body.request_id not in caller.call.labels:
            caller.call.labels.append(body.request_id)
        if body.background and body.store is False:
            raise InvalidRequest("background can only be used when `store` is true.", fix="Leave out store.", param="background")
        params = _bounded(body.params(), service.max_context)
        await service.check_grammar(params, of_tools=body.must_call)
        before, new = self._items(body, caller.tenant)
        prompt = await self._prompt(service, body, before, new, caller.call)
        params = service.with_defaults(params, prompt)  # the response shows them
        response_id = own_id(caller.call, "resp")
        if body.background:  # it outlives the call that asked for it
            call = caller.call
            again = Call(response_id, path=call.path, tenant=caller.tenant, labels=call.labels, trace=call.trace)
            caller = replace(caller, call=again)
        switches = {"thinking": not (body.reasoning and body.reasoning.effort == "none")} | (body.chat_template_kwargs or {})
        reading = service.reading(prompt, [one.function() for one in body.callees()], body.must_call, variables=switches)
        params = reading.gated(params)
        writer = ResponseWriter(response_id, service.model_name, service.tokenizer, body, params, prompt, reading)
        how: Any = {"one_by_one": body.wants_logprobs, "tells_progress": bool(body.stream and body.return_progress)}
        how |= {"priority": body.priority, "salt": body.cache_salt or ""}
        kept = (body.prompt_cache_key, body.prompt_cache_retention)
        holds = key_holds(service, caller.tenant, *kept, prompt, salt=body.cache_salt or "")
        stored = await aside(lambda: tuple(Item.of(stored_item(item)) for item in new), _BYTES_PER_ITEM * len(new))
        outputs = service.stream(caller, prompt, params, reading=reading, holds=holds, **how)
        job = _Job(body, caller, before, stored, writer, outputs)
        if body.store is not False:
            self._running[job.key] = job
        return job

    async def count(self, body: CountRequest, caller: Caller) -> int:
        service = self._models.of(body.model)
        before, new = self._items(body, caller.tenant)
        return len(await self._prompt(service, body, before, new, caller.call))

    def _items(self, body: ResponseRequest, tenant: str) -> tuple[tuple[Item, ...], list[dict[str, Any]]]:
        """Of the conversation so far, and of this request."""
        new = body.new_items()
        if sum(map(is_reference, new)) > MAX_REFERENCES:
            raise InvalidRequest(f"More than {MAX_REFERENCES} item references.", fix="Send the items.", param="input")
        new = [self.store.output_item(tenant, item["id"]).members() if is_reference(item) else item for item in new]
        if body.previous_response_id is not None and body.conversation_id is not None:
            raise InvalidRequest("previous_response_id and conversation are both given.", fix="Give one.", param="conversation")
        if body.conversation_id is not None:
            return self.store.get_to_continue(tenant, body.conversation_id, "conversation").items, new
        if body.previous_response_id is None:
            return (), new
        if not body.previous_response_id.startswith("resp"):
            raise InvalidRequest("previous_response_id is not the id of a response.", param="previous_response_id")
        if (tenant, body.previous_response_id) in self._running:
            raise InvalidRequest("The previous response is in progress.", fix="Wait for its end.", param="previous_response_id")
        earlier = self.store.get_to_continue(tenant, body.previous_response_id)
        return (*earlier.items, *earlier.outputs), new

    async def _prompt(
        self, service: Service, body: ResponseRequest, before: Sequence[Item], new: list[dict[str, Any]], call: Call
    ) -> list[int]:
        size = sum(len(item.text) for item in before) + _BYTES_PER_ITEM * (len(before) + len(new))
        messages = await aside(lambda: messages_of([*(item.members() for item in before), *new]), size)
        if not messages:
            raise InvalidRequest("The parameter 'input' is required.", param="input")
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        template = service.tokenizer.chat_template
        effort = body.reasoning.effort if body.reasoning else None
        variables, unknown = template_variables(template.source if template else None, effort, None)
        call.ignored |= {"reasoning.effort"} if unknown else set()
        tools = [{"type": "function", "function": one.function()} for one in body.callees()]
        how: dict[str, Any] = {"tools": tools or None, "variables": variables | (body.chat_template_kwargs or {})}
        messages = with_one_system(messages)
        if body.truncation != "auto":
            return await service.encode_chat(messages, **how)
        return await self._truncated(service, messages, how, body.max_output_tokens or 1)

    async def _truncated(self, service: Service, messages: list[dict[str, Any]], how: dict[str, Any], room: int) -> list[int]:
        """Without as many of the oldest turns as must go for the prompt to fit. A turn begins with a message of the user."""
        context = service.max_context
        room = min(room, context // 2)
        begin = int(messages[0]["role"] == "system")
        cuts = [begin, *(i for i, message in enumerate(messages) if message["role"] == "user" and i > begin)]

        async def tokens(cut: int) -> list[int] | None:
            try:
                return await service.encode_chat([*messages[:begin], *messages[cut:]], **how)
            except InvalidRequest as error:
                if error.param != "prompt":
                    raise
                return None  # too long to be tokenized

        kept: list[int] | None = None
        low, high = 0, len(cuts) - 1
        middle = low  # most prompts fit as they are
        while low <= high:
            ids = await tokens(cuts[middle])
            if ids is not None and len(ids) + room <= context:
                kept, high = ids, middle - 1
            else:
                low = middle + 1
            middle = (low + high) // 2
        return kept if kept is not None else await service.encode_chat([*messages[:begin], *messages[cuts[-1] :]], **how)

    # ---- from a job to a response

    async def whole(self, body: ResponseRequest, caller: Caller) -> bytes:
        if body.background:
            raise InvalidRequest("background is not possible here.", fix="Leave it out.", param="background")
        job = await self.begin(body, caller)
        try:
            async with aclosing(job.outputs):
                async for delta, text in job.outputs:
                    job.writer.take(delta, text)
        except TidemillError as error:
            job.writer.fail(error)
            job.is_deleted |= not isinstance(error, Cancelled)  # the client gets the error, not a response
            raise
        finally:
            self._end(job)
        return _json(job.writer.body() | job.writer.timings())

    async def stream(self, job: _Job, first: tuple[Delta, TextDelta]) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events(job, _after(first, job.outputs))) as events:
            async for event in events:
                yield named_event(event)

    async def _events(self, job: _Job, outputs: Outputs) -> AsyncGenerator[dict[str, Any], None]:
        """Runs a job; its events. `outputs`: its own, from the first on."""
        writer, has_begun = job.writer, False
        try:
            yield writer.event("response.created", response=writer.body())
            async for delta, text in outputs:
                if not has_begun:
                    writer.status, has_begun = "in_progress", True
                    yield writer.event("response.in_progress", response=writer.body())
                for event in writer.take(delta, text):
                    yield event
            yield writer.event(f"response.{writer.status}", response=writer.body(), **writer.timings())
        except TidemillError as error:
            writer.fail(error)
            yield writer.event("response.failed", response=writer.body())
        except Exception as error:
            if job.task is None:
                raise
            _log.exception("unexpected error in a background response", exc_info=error)
            writer.fail(TidemillError("An internal error occurred."))
            yield writer.event("response.failed", response=writer.body())
        finally:
            self._end(job)
            await job.outputs.aclose()

    def start(self, job: _Job) -> None:
        """In the background."""
        job.task = asyncio.create_task(self._run(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        job.task.add_done_callback(lambda _: job.has_more.set())  # also if it never began

    async def _run(self, job: _Job) -> None:
        async with aclosing(self._events(job, job.outputs)) as events:
            async for event in events:
                if job.body.stream:
                    job.events.append(named_event(event))
                    job.has_more.set()

    async def follow(self, job: _Job, num_known: int = 0) -> AsyncGenerator[bytes, None]:
        """Events of a job in the background, from the start or after so many. It goes on if nobody follows."""
        assert job.task is not None
        while True:
            job.has_more.clear()
            while num_known < len(job.events):
                num_known += 1
                yield job.events[num_known - 1]
            if job.task.done():
                return
            await job.has_more.wait()

    def _end(self, job: _Job) -> None:
        """Stores the response, once."""
        if not job.writer.is_over:
            job.writer.end("cancelled")  # the client has left
        if self._running.pop(job.key, None) is not None and not job.is_deleted:
            stored = Stored.of((*job.before, *job.new), job.writer.body(), b"".join(job.events))
            self.store.put(job.caller.tenant, job.writer.response_id, stored)
        if job.body.conversation_id is not None and job.writer.status in ("completed", "incomplete"):
            items = (*job.new, *map(Item.of, job.writer.output))
            conversations.append(self.store, job.caller.tenant, job.body.conversation_id, items)

    # ---- stored responses

    async def get(self, tenant: str, response_id: str) -> bytes:
        job = self._running.get((tenant, response_id))
        if job is not None:
            return await aside(partial(_json, job.writer.body()))
        stored = self.store.get(tenant, response_id)
        return await aside(stored.body, stored.num_bytes)

    def get_events(self, tenant: str, response_id: str, num_known: int) -> AsyncGenerator[bytes, None]:
        """Those after so many."""
        job = self._running.get((tenant, response_id))
        if job is not None and job.task is not None and job.body.stream:
            return self.follow(job, num_known)
        stored = b"" if job is not None else self.store.get(tenant, response_id).events
        if not stored:
            what = "Only a response that was created with background and stream is streamed again."
            raise InvalidRequest(what, fix="Retrieve it without stream.", param="stream")
        return _again(stored, num_known)

    def input_items(self, tenant: str, response_id: str) -> tuple[Item, ...]:
        job = self._running.get((tenant, response_id))
        return (*job.before, *job.new) if job is not None else self.store.get(tenant, response_id).items

    async def cancel(self, tenant: str, response_id: str) -> bytes:
        job = self._running.get((tenant, response_id))
        if job is None:
            stored = self.store.get(tenant, response_id)
            if not stored.is_background:
                raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")  # OpenAI's words
            return await aside(stored.body, stored.num_bytes)
        if job.task is None:
            self._models.cancel(job.caller.call.request_id, tenant)
            return await aside(partial(_json, job.writer.body() | {"status": "cancelled"}))
        job.task.cancel()
        await asyncio.wait([job.task])
        self._end(job)  # a task that had not started has not done it
        return await aside(partial(_json, job.writer.body()))

    async def delete(self, tenant: str, response_id: str) -> None:
        job = self._running.get((tenant, response_id))
        if job is None:
            self.store.get(tenant, response_id)
            self.store.drop(tenant, response_id)
            return
        job.is_deleted = True
        await self.cancel(tenant, response_id)


async def _after(first: tuple[Delta, TextDelta], rest: Outputs) -> Outputs:
    yield first
    async for one in rest:
        yield one


async def _again(stored: bytes, num_known: int) -> AsyncGenerator[bytes, None]:
    for event in stored.removesuffix(b"\n\n").split(b"\n\n")[num_known:]:
        yield event + b"\n\n"


def _bounded(params: SamplingParams, max_context: int) -> SamplingParams:
    """The log-probabilities of a response must fit it."""
    if params.logprobs is None:
        return params
    most = MAX_LOGPROB_CELLS // (params.logprobs + 1)
    if params.max_tokens is None:
        return params if max_context <= most else msgspec.structs.replace(params, max_tokens=most)
    if min(params.max_tokens, max_context) > most:
        raise InvalidRequest(
            f"With {params.logprobs} top_logprobs, a response may have {most} tokens.",
            fix="Lower max_output_tokens or top_logprobs.",
            param="max_output_tokens",
        )
    return params


def _stream(events: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(events, also_close=events, is_framed=True)


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    responses = Responses(models)

    @router.post("/v1/responses", openapi_extra=schema_of(ResponseRequest))
    async def create(request: Request, body: ResponseRequest = Depends(body_of(ResponseRequest))) -> Response:
        caller: Caller = request.state.caller
        if body.background:
            job = await responses.begin(body, caller)
            responses.start(job)
            if body.stream:
                return _stream(responses.follow(job))
            return Response(_json(job.writer.body()), media_type="application/json")
        if not body.stream:
            return Response(await until_disconnect(request, responses.whole(body, caller)), media_type="application/json")
        job = await responses.begin(body, caller)
        first = await until_disconnect(request, anext(job.outputs))
        return EventStream(responses.stream(job, first), also_close=job.outputs, is_framed=True)

    @router.post("/v1/responses/input_tokens", openapi_extra=schema_of(CountRequest))
    async def input_tokens(request: Request, body: CountRequest = Depends(body_of(CountRequest))) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": await responses.count(body, request.state.caller)}

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        query, tenant = request.query_params, request.state.caller.tenant
        if query.get("stream", "false") == "false":
            return Response(await responses.get(tenant, response_id), media_type="application/json")
        after = query.get("starting_after", "-1")
        if not re.fullmatch(r"-1|[0-9]{1,9}", after):
            raise InvalidRequest("starting_after is the sequence number of an event.", param="starting_after")
        return _stream(responses.get_events(tenant, response_id, int(after) + 1))

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        query = dict(request.query_params)
        limit = read_limit(query.get("limit"), 20, 100)
        found = page_of(responses.input_items(request.state.caller.tenant, response_id), query, limit)
        return Response(found, media_type="application/json")

    @router.get("/v1/response_items/{item_id}")
    async def response_item(request: Request, item_id: str) -> Response:
        """What an item_reference stands for: a router asks which server has it."""
        found = responses.store.output_item(request.state.caller.tenant, item_id)
        return Response(found.text, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        await responses.delete(request.state.caller.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        return Response(await responses.cancel(request.state.caller.tenant, response_id), media_type="application/json")

    router.include_router(conversations.make_router(responses.store))
    models.whole_responses["/v1/responses"] = (ResponseRequest, responses.whole)
    return router
