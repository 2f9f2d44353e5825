"""Anthropic's Messages API: messages, streamed or whole, and counting tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.tools import AnswerParser, CallBegins, Piece, Words, call_schema
from tidemill.sampling import Grammar, SamplingParams
from tidemill.server.body import body_of, schema_of
from tidemill.server.errors import error_body
from tidemill.server.guard import Caller
from tidemill.server.openai_types import MAX_MESSAGES
from tidemill.server.service import Service
from tidemill.server.sse import EventStream, named_event, until_disconnect
from tidemill.wire import Delta

_json = msgspec.json.Encoder().encode
_STRICT = ConfigDict(extra="forbid", strict=True)


class CacheControl(BaseModel):
    """Said and not needed: whatever was computed is found again."""

    model_config = _STRICT

    type: Literal["ephemeral"]
    ttl: str | None = None


class _Block(BaseModel):
    """Clients send back what they got, with fields of their own that say nothing."""

    model_config = _STRICT

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(BaseModel):
    model_config = _STRICT

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(BaseModel):
    model_config = _STRICT

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolChoice(BaseModel):
    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(BaseModel):
    model_config = _STRICT

    user_id: str | None = Field(default=None, max_length=1024)


class Prompt(BaseModel):
    """What becomes a prompt."""

    model_config = _STRICT

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: ToolChoice | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """As templates know it."""
        made: list[dict[str, Any]] = []
        if self.system:
            made.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            made += _turns(message)
        return made

    @property
    def looks_for_calls(self) -> bool:
        return bool(self.tools) and not (self.tool_choice and self.tool_choice.type == "none")

    def functions(self) -> list[dict[str, Any]]:
        return [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in self.tools or []
        ]

    def how(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": one} for one in self.functions()] if self.looks_for_calls else None
        goes_on = self.messages[-1].role == "assistant" and isinstance(self.messages[-1].content, str)
        return {"tools": tools, "continue_final_message": goes_on}


class MessagesRequest(Prompt):
    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def params(self) -> SamplingParams:
        given: dict[str, Any] = {"max_tokens": self.max_tokens}
        for field in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, field)) is not None:
                given[field] = value
        if self.stop_sequences:
            given["stop"] = tuple(self.stop_sequences)
        choice = self.tool_choice
        if choice is not None and self.must_call:
            name = choice.name if choice.type == "tool" else None
            functions = self.functions()
            if (choice.type == "tool" and name is None) or not any(name in (None, one["name"]) for one in functions):
                raise InvalidRequest("tool_choice asks for a tool that is not among the tools.", param="tool_choice")
            several = name is None and not choice.disable_parallel_tool_use
            given["grammar"] = Grammar("json_schema", json.dumps(call_schema(functions, name, several)))
        return SamplingParams(**given)


def _text(content: str | list[TextBlock] | None) -> str:
    return content or "" if not isinstance(content, list) else "".join(block.text for block in content)


def _turns(message: Message) -> list[dict[str, Any]]:
    """Results of tools are turns of their own; calls belong to the assistant's."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    text, calls = "", []
    for block in message.content:
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
    if text or calls or not made:
        made.append({"role": message.role, "content": text} | ({"tool_calls": calls} if calls else {}))
    return made


def make_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=schema_of(MessagesRequest))
    async def messages(request: Request, body: MessagesRequest = Depends(body_of(MessagesRequest))) -> Response:
        service.check_model(body.model)
        params = body.params()
        await service.check_grammar(params)
        prompt = await service.encode_chat(body.conversation(), **body.how())
        caller: Caller = request.state.caller
        answer = _Answer(caller.call.request_id, service, body, len(prompt))
        outputs = service.stream(caller, prompt, params)
        if not body.stream:
            return Response(await until_disconnect(request, _whole(answer, outputs)), media_type="application/json")
        first = await until_disconnect(request, anext(outputs))
        return EventStream(_stream(answer, first, outputs), also_close=outputs, is_framed=True)

    @router.post("/v1/messages/count_tokens", openapi_extra=schema_of(Prompt))
    async def count_tokens(body: Prompt = Depends(body_of(Prompt))) -> dict[str, Any]:
        service.check_model(body.model)
        return {"input_tokens": len(await service.encode_chat(body.conversation(), **body.how()))}

    return router


Outputs = AsyncGenerator[tuple[Delta, TextDelta], None]


class _Answer:
    """Text as it comes to content blocks: a block begins where the kind of text changes."""

    def __init__(self, message_id: str, service: Service, body: MessagesRequest, num_prompt: int) -> None:
        self.message_id = message_id
        self._model = service.model_name
        self._parser = AnswerParser(body.looks_for_calls, body.must_call)
        self._one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        self.blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self.num_prompt, self.num_output, self.num_cached = num_prompt, 0, 0
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None

    def start(self) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, int]:
        return {
            "input_tokens": self.num_prompt - self.num_cached,
            "cache_read_input_tokens": self.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.num_output,
        }

    def take(self, delta: Delta, text: TextDelta) -> list[dict[str, Any]]:
        """Events that tell of it."""
        self.num_output += text.num_tokens
        self.num_cached = delta.num_cached
        pieces = self._parser.push(text.text)
        if text.finish_reason:
            pieces += self._parser.finish()
        events = [event for piece in pieces for event in self._tell(piece)]
        if text.finish_reason:
            events += self._end_block()
            self._finish(text)
        return events

    def _finish(self, text: TextDelta) -> None:
        self.stop_reason = "max_tokens" if text.finish_reason == "length" else "end_turn"
        if isinstance(text.stop, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", text.stop
        elif self.stop_reason == "end_turn" and any(block["type"] == "tool_use" for block in self.blocks):
            self.stop_reason = "tool_use"

    def _tell(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, Words):
            kind, field = ("thinking", "thinking") if piece.is_reasoning else ("text", "text")
            events = []
            if not self.blocks or self.blocks[-1]["type"] != kind or self.blocks[-1].get("_over"):
                empty = {"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {})
                events += self._begin_block(empty)
            self.blocks[-1][field] += piece.text
            return [*events, self._delta({"type": f"{kind}_delta", field: piece.text})]
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallBegins):
            self._arguments = ""
            call_id = f"toolu_{piece.call_id.removeprefix('call_')}"
            return self._begin_block({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
        self._arguments += piece.text
        return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]

    def _begin_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end_block()
        self.blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _end_block(self) -> list[dict[str, Any]]:
        if not self.blocks or self.blocks[-1].get("_over"):
            return []
        block = self.blocks[-1]
        block["_over"] = True
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(self._arguments or "{}")
            except ValueError:  # it broke off
                block["input"] = {}
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def whole(self) -> dict[str, Any]:
        content = [{name: value for name, value in block.items() if name != "_over"} for block in self.blocks]
        return self.start() | {"content": content, "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


async def _whole(answer: _Answer, outputs: Outputs) -> bytes:
    async with aclosing(outputs):
        async for delta, text in outputs:
            answer.take(delta, text)
    return _json(answer.whole())


async def _stream(answer: _Answer, first: tuple[Delta, TextDelta], rest: Outputs) -> AsyncGenerator[bytes, None]:
    try:
        yield named_event({"type": "message_start", "message": answer.start()})
        for event in answer.take(*first):
            yield named_event(event)
        async for delta, text in rest:
            for event in answer.take(delta, text):
                yield named_event(event)
        ending = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        yield named_event({"type": "message_delta", "delta": ending, "usage": answer.usage()})
        yield named_event({"type": "message_stop"})
    except TidemillError as error:
        yield named_event({"type": "error", **error_body(error)})
    finally:
        await rest.aclose()
