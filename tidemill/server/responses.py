"""OpenAI's Responses API: create, streamed or whole; retrieve, cancel, delete; conversations that continue a stored response."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import CallArguments, CallStart, Piece, Reading, TextPiece, call_grammar
from tidemill.sampling import Grammar, SamplingParams
from tidemill.server.body import Body, body_of, schema_of
from tidemill.server.call import new_id
from tidemill.server.guard import Caller
from tidemill.server.openai_types import MAX_MESSAGES
from tidemill.server.service import Service
from tidemill.server.sse import EventStream, named_event, until_disconnect
from tidemill.wire import Delta

_json = msgspec.json.Encoder().encode
MAX_STORED, MAX_STORED_BYTES = 1000, 64 * 2**20  # of one tenant
MAX_STORED_OF_ALL, MAX_STORED_BYTES_OF_ALL = 4 * MAX_STORED, 4 * MAX_STORED_BYTES


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class ResponseRequest(Body):
    model: str
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    store: bool | None = True
    tools: list[FunctionTool] | None = Field(default=None, max_length=256)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    user: str | None = Field(default=None, max_length=1024)

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def looks_for_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def functions(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True, exclude={"type", "strict"}) for tool in self.tools or []]

    def params(self) -> SamplingParams:
        given: dict[str, Any] = {"max_tokens": self.max_output_tokens}
        for field in ("temperature", "top_p"):
            if (value := getattr(self, field)) is not None:
                given[field] = value
        wanted = self.text.format if self.text else None
        if self.must_call:
            name = self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None
            several = name is None and self.parallel_tool_calls is not False
            given["grammar"] = call_grammar(self.functions(), name, several)
        elif wanted is not None and wanted.type == "json_object":
            given["grammar"] = Grammar("json_schema", '{"type": "object"}')
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise InvalidRequest("A text format json_schema needs a schema.", param="text")
            given["grammar"] = Grammar("json_schema", json.dumps(wanted.schema_))
        return SamplingParams(**given)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a conversation as chat templates expect them."""
    made: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            made.append({"role": role, "content": _text(item.get("content"))})
        elif kind == "function_call" and isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str):
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            if made and made[-1].get("tool_calls"):
                made[-1]["tool_calls"].append(call)
            else:
                made.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output" and isinstance(item.get("output"), str):
            made.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": item["output"]})
        elif kind != "reasoning":
            raise InvalidRequest(f"An input item of type {str(kind)[:40]!r} is not supported, or lacks a field.", param="input")
    return made


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"A content part of type {str(kind)[:40]!r} is not supported.", fix="Send text.", param="input")
        texts.append(part["text"])
    return "".join(texts)


class _Shelf:
    """The stored responses of one tenant, oldest first: conversation and response, as JSON."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self.num_bytes = 0

    def drop(self, response_id: str) -> None:
        self.num_bytes -= sum(map(len, self.stored.pop(response_id, ())))

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.stored)))


class Store:
    """Responses that can be retrieved or continued, each by its tenant only. A tenant that stores too much loses its oldest; if
    all together store too much, the tenant that stores most does. Nobody can evict the responses of a tenant that stores less."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}  # by tenant: ids are the clients' to choose

    def put(self, tenant: str, items: list[dict[str, Any]], body: dict[str, Any]) -> None:
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.drop(body["id"])
        made = shelf.stored[body["id"]] = (_json(items), _json(body))
        shelf.num_bytes += sum(map(len, made))
        while len(shelf.stored) > MAX_STORED or shelf.num_bytes > MAX_STORED_BYTES:
            shelf.drop_oldest()
        shelves = self._shelves.values()
        while sum(len(one.stored) for one in shelves) > MAX_STORED_OF_ALL:
            max(shelves, key=lambda one: len(one.stored)).drop_oldest()
        while sum(one.num_bytes for one in shelves) > MAX_STORED_BYTES_OF_ALL:
            max(shelves, key=lambda one: one.num_bytes).drop_oldest()

    def get(self, tenant: str, response_id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.stored:
            raise Unknown(f"There is no response {response_id[:100]!r}.", param="response_id")
        items, body = shelf.stored[response_id]
        return msgspec.json.decode(items), msgspec.json.decode(body)

    def drop(self, tenant: str, response_id: str) -> None:
        if tenant in self._shelves:
            self._shelves[tenant].drop(response_id)


class Unknown(InvalidRequest):
    status = 404


def make_router(service: Service) -> APIRouter:
    router = APIRouter()
    store = Store()

    @router.post("/v1/responses", openapi_extra=schema_of(ResponseRequest))
    async def create(request: Request, body: ResponseRequest = Depends(body_of(ResponseRequest))) -> Response:
        caller: Caller = request.state.caller
        if not body.stream:
            return Response(await until_disconnect(request, whole(body, caller)), media_type="application/json")
        writer, outputs, keep = await begin(body, caller)
        first = await until_disconnect(request, anext(outputs))
        keep()
        return EventStream(_stream(writer, first, outputs, keep), also_close=outputs, is_framed=True)

    async def whole(body: ResponseRequest, caller: Caller) -> bytes:
        return await _whole(*await begin(body, caller))

    async def begin(body: ResponseRequest, caller: Caller) -> tuple[ResponseWriter, Outputs, Callable[[], None]]:
        """The writer of the response, the outputs it is made of, and a function that stores the response as it is so far."""
        service.check_model(body.model)
        tenant = caller.tenant
        params = body.params()
        await service.check_grammar(params)
        items = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        if body.previous_response_id is not None:
            before, earlier = store.get(tenant, body.previous_response_id)
            items = [*before, *earlier["output"], *items]
        messages = _messages(items)
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        tools = [{"type": "function", "function": one} for one in body.functions()] if body.looks_for_calls else None
        prompt = await service.encode_chat(messages, tools=tools)
        reading = service.reading(prompt, body.functions() if body.looks_for_calls else (), body.must_call)
        params = reading.gated(params)
        writer = ResponseWriter(caller.call.request_id, service.model_name, body, params, len(prompt), reading)

        def keep() -> None:
            if body.store is not False:
                store.put(tenant, items, writer.body())

        return writer, service.stream(caller, prompt, params, reading=reading), keep

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
        return store.get(request.state.caller.tenant, response_id)[1]

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        store.get(request.state.caller.tenant, response_id)
        store.drop(request.state.caller.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        caller = request.state.caller
        if service.cancel(response_id, caller.tenant):
            items, body = store.get(caller.tenant, response_id)
            store.put(caller.tenant, items, body | {"status": "cancelled"})
        return store.get(caller.tenant, response_id)[1]

    service.whole_responses["/v1/responses"] = (ResponseRequest, whole)
    return router


Outputs = AsyncGenerator[tuple[Delta, TextDelta], None]


class ResponseWriter:
    """Output items, whole and as events."""

    def __init__(
        self,
        response_id: str,
        model: str,
        asked: ResponseRequest,
        params: SamplingParams,
        num_prompt: int,
        reading: Reading,
    ) -> None:
        self.response_id = response_id
        self._asked, self._params, self._model = asked, params, model
        self._created_s = int(time.time())
        self._parser = reading.parser()
        self._one_call = asked.parallel_tool_calls is False
        self._num_events = 0
        self.output: list[dict[str, Any]] = []
        self._num_prompt, self._num_output, self._num_cached, self._num_reasoning = num_prompt, 0, 0, 0
        self.status = "in_progress"
        self._why: str | None = None
        self._error: dict[str, str] | None = None

    def body(self) -> dict[str, Any]:
        asked = self._asked
        usage = None
        if self.status != "in_progress":
            usage = {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
                "output_tokens": self._num_output,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
                "total_tokens": self._num_prompt + self._num_output,
            }
        text_format = (
            asked.text.format.model_dump(by_alias=True, exclude_none=True)
            if asked.text and asked.text.format
            else {"type": "text"}
        )
        choice = asked.tool_choice.model_dump() if isinstance(asked.tool_choice, NamedTool) else asked.tool_choice or "auto"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_s,
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": self._why} if self._why else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store is not False,
            "temperature": self._params.temperature,
            "text": {"format": text_format},
            "tool_choice": choice,
            "tools": [tool.model_dump() for tool in asked.tools or []],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": asked.user,
            "metadata": asked.metadata or {},
        }

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        made = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return made

    def take(self, delta: Delta, text: TextDelta) -> list[dict[str, Any]]:
        self._num_output += text.num_tokens
        self._num_reasoning += text.num_reasoning
        self._num_cached = delta.num_cached
        pieces = self._parser.push(text.text)
        if text.finish_reason:
            pieces += self._parser.finish()
        events = [event for piece in pieces for event in self._events(piece)]
        if text.finish_reason:
            events += self._end_item("incomplete" if text.finish_reason == "length" else "completed")
            self.status = "incomplete" if text.finish_reason == "length" else "completed"
            self._why = "max_output_tokens" if text.finish_reason == "length" else None
        return events

    def fail(self, error: TidemillError) -> None:
        self.status = "cancelled" if error.kind == "request_cancelled" else "failed"
        self._error = {"code": "server_error", "message": str(error)}

    @property
    def _open(self) -> dict[str, Any] | None:
        return self.output[-1] if self.output and self.output[-1]["status"] == "in_progress" else None

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            return self._text_events(piece)
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallStart):
            item = {"type": "function_call", "id": new_id("fc"), "call_id": piece.call_id, "name": piece.name, "arguments": ""}
            return self._start_item(item)
        assert isinstance(piece, CallArguments)
        self.output[-1]["arguments"] += piece.text
        return [self._of_item("response.function_call_arguments.delta", delta=piece.text)]

    def _text_events(self, piece: TextPiece) -> list[dict[str, Any]]:
        kind, part, name = (
            ("reasoning", "reasoning_text", "reasoning_text") if piece.is_reasoning else ("message", "output_text", "output_text")
        )
        events: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != kind:
            item: dict[str, Any] = {"type": kind, "id": new_id("rs" if piece.is_reasoning else "msg"), "content": []}
            item["summary" if piece.is_reasoning else "role"] = [] if piece.is_reasoning else "assistant"
            events += self._start_item(item)
            empty: dict[str, Any] = {"type": part, "text": ""}
            if not piece.is_reasoning:
                empty |= {"annotations": [], "logprobs": []}
            self.output[-1]["content"].append(empty)
            events.append(self._of_item("response.content_part.added", content_index=0, part=dict(empty)))
        self.output[-1]["content"][0]["text"] += piece.text
        more: dict[str, Any] = {} if piece.is_reasoning else {"logprobs": []}
        return [*events, self._of_item(f"response.{name}.delta", content_index=0, delta=piece.text, **more)]

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self.event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _start_item(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end_item("completed")
        self.output.append(item | {"status": "in_progress"})
        added = self.output[-1] | ({"content": []} if "content" in item else {})
        return [*events, self.event("response.output_item.added", output_index=len(self.output) - 1, item=added)]

    def _end_item(self, status: str) -> list[dict[str, Any]]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            events.append(self._of_item("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]))
        elif item["content"]:
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
            events.append(self._of_item(f"response.{kind}.done", content_index=0, text=part["text"], **more))
            events.append(self._of_item("response.content_part.done", content_index=0, part=dict(part)))
        return [*events, self.event("response.output_item.done", output_index=len(self.output) - 1, item=dict(item))]


async def _whole(writer: ResponseWriter, outputs: Outputs, keep: Any) -> bytes:
    try:
        async with aclosing(outputs):
            async for delta, text in outputs:
                writer.take(delta, text)
    except TidemillError as error:
        writer.fail(error)
        raise
    finally:
        keep()
    return _json(writer.body())


async def _stream(
    writer: ResponseWriter, first: tuple[Delta, TextDelta], rest: Outputs, keep: Any
) -> AsyncGenerator[bytes, None]:
    try:
        for kind in ("response.created", "response.in_progress"):
            yield named_event(writer.event(kind, response=writer.body()))
        for event in writer.take(*first):
            yield named_event(event)
        async for delta, text in rest:
            for event in writer.take(delta, text):
                yield named_event(event)
        yield named_event(writer.event(f"response.{writer.status}", response=writer.body()))
    except TidemillError as error:
        writer.fail(error)
        yield named_event(writer.event("response.failed", response=writer.body()))
    finally:
        keep()
        await rest.aclose()
