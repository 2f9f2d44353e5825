"""Anthropic's Messages API: messages, streamed or whole, and token counts."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import CallStart, Piece, Reading, TextPiece, call_grammar
from tidemill.sampling import SamplingParams
from tidemill.server.body import Body, body_of, schema_of
from tidemill.server.errors import error_body
from tidemill.server.guard import Caller
from tidemill.server.openai_types import MAX_MESSAGES
from tidemill.server.service import Service
from tidemill.server.sse import EventStream, named_event, until_disconnect
from tidemill.wire import Delta

_json = msgspec.json.Encoder().encode


class CacheControl(Body):
    """Accepted, without effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(Body):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Body):
    user_id: str | None = Field(default=None, max_length=1024)


class Prompt(Body):
    """What the prompt is made of."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: ToolChoice | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it."""
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
        continues = self.messages[-1].role == "assistant" and isinstance(self.messages[-1].content, str)
        return {"tools": tools, "continue_final_message": continues}

    @property
    def continued(self) -> str:
        """The text that the output continues."""
        last = self.messages[-1]
        return last.content if last.role == "assistant" and isinstance(last.content, str) else ""


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
            name = choice.name or "" if choice.type == "tool" else None
            several = name is None and not choice.disable_parallel_tool_use
            given["grammar"] = call_grammar(self.functions(), name, several)
        return SamplingParams(**given)


def _text(content: str | list[TextBlock] | None) -> str:
    return content or "" if not isinstance(content, list) else "".join(block.text for block in content)


def _turns(message: Message) -> list[dict[str, Any]]:
    """Tool results become messages of their own; calls are part of the assistant's message."""
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
        reading = service.reading(prompt, body.functions() if body.looks_for_calls else (), body.must_call, body.continued)
        writer = MessageWriter(caller.call.request_id, service.model_name, body, len(prompt), reading)
        outputs = service.stream(caller, prompt, reading.gated(params), reading=reading)
        if not body.stream:
            return Response(await until_disconnect(request, _whole(writer, outputs)), media_type="application/json")
        first = await until_disconnect(request, anext(outputs))
        return EventStream(_stream(writer, first, outputs), also_close=outputs, is_framed=True)

    @router.post("/v1/messages/count_tokens", openapi_extra=schema_of(Prompt))
    async def count_tokens(body: Prompt = Depends(body_of(Prompt))) -> dict[str, Any]:
        service.check_model(body.model)
        return {"input_tokens": len(await service.encode_chat(body.conversation(), **body.how()))}

    return router


Outputs = AsyncGenerator[tuple[Delta, TextDelta], None]


class MessageWriter:
    """Content blocks, whole and as events: a new block starts where the kind of content changes."""

    def __init__(self, message_id: str, model: str, body: MessagesRequest, num_prompt: int, reading: Reading) -> None:
        self.message_id = message_id
        self._model = model
        self._parser = reading.parser()
        self._one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the call in the open block
        self._num_prompt, self._num_output, self._num_cached = num_prompt, 0, 0
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
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_read_input_tokens": self._num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._num_output,
        }

    def take(self, delta: Delta, text: TextDelta) -> list[dict[str, Any]]:
        """New output, as events."""
        self._num_output += text.num_tokens
        self._num_cached = delta.num_cached
        pieces = self._parser.push(text.text)
        if text.finish_reason:
            pieces += self._parser.finish()
        events = [event for piece in pieces for event in self._events(piece)]
        if text.finish_reason:
            events += self._end_block()
            self._finish(text)
        return events

    def _finish(self, text: TextDelta) -> None:
        self.stop_reason = "max_tokens" if text.finish_reason == "length" else "end_turn"
        if isinstance(text.stop, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", text.stop
        elif self.stop_reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            self.stop_reason = "tool_use"

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            kind = "thinking" if piece.is_reasoning else "text"
            events = []
            if not self._is_open or self._blocks[-1]["type"] != kind:
                empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
                events += self._start_block(empty)
            self._blocks[-1][kind] += piece.text
            return [*events, self._delta({"type": f"{kind}_delta", kind: piece.text})]
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallStart):
            kept = not piece.call_id.startswith("call_")  # some templates take their own ids only
            call_id = piece.call_id if kept else f"toolu_{piece.call_id.removeprefix('call_')}"
            return self._start_block({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
        self._arguments += piece.text
        return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]

    def _start_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end_block()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _end_block(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            with suppress(ValueError):  # cut off by max_tokens
                self._blocks[-1]["input"] = json.loads(self._arguments or "{}")
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def whole(self) -> dict[str, Any]:
        return self.start() | {"content": self._blocks, "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


async def _whole(writer: MessageWriter, outputs: Outputs) -> bytes:
    async with aclosing(outputs):
        async for delta, text in outputs:
            writer.take(delta, text)
    return _json(writer.whole())


async def _stream(writer: MessageWriter, first: tuple[Delta, TextDelta], rest: Outputs) -> AsyncGenerator[bytes, None]:
    try:
        yield named_event({"type": "message_start", "message": writer.start()})
        for event in writer.take(*first):
            yield named_event(event)
        async for delta, text in rest:
            for event in writer.take(delta, text):
                yield named_event(event)
        ending = {"stop_reason": writer.stop_reason, "stop_sequence": writer.stop_sequence}
        yield named_event({"type": "message_delta", "delta": ending, "usage": writer.usage()})
        yield named_event({"type": "message_stop"})
    except TidemillError as error:
        yield named_event({"type": "error", **error_body(error)})
    finally:
        await rest.aclose()
