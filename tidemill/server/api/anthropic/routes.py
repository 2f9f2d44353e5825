"""Anthropic's Messages API: messages, streamed or whole, and token counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import CallStart, Piece, Reading, TextPiece
from tidemill.server.api.anthropic.types import CountRequest, MessagesRequest, Prompt
from tidemill.server.generation.conversation import own_id, template_variables
from tidemill.server.generation.models import Models
from tidemill.server.generation.retention import TTLS, mark_holds
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.http.context import Call
from tidemill.server.http.errors import error_body, shaped
from tidemill.server.http.responses import EventStream, named_event, until_disconnect
from tidemill.wire import Delta, Hold

_BYTES_PER_PART = 64  # of JSON, to estimate
_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    async def prompt_of(service: Service, body: Prompt, call: Call) -> tuple[list[int], dict[str, Any]]:
        """And how it is encoded."""
        conversation = await aside(body.conversation, body.num_parts * _BYTES_PER_PART)
        template = service.tokenizer.chat_template
        variables, unknown = template_variables(template.source if template else None, body.effort, body.thinks)
        call.ignored |= {{"effort": "output_config.effort", "thinking": "thinking"}[name] for name in unknown}
        variables |= body.chat_template_kwargs or {}
        how = {"variables": variables, **body.how(conversation)}
        return await service.encode_chat(conversation, **how), how

    async def begin(body: MessagesRequest, caller: Caller) -> tuple[MessageWriter, Outputs]:
        service = models.of(body.model)
        params = body.params()
        await service.check_grammar(params, of_tools=body.must_call)
        prompt, how = await prompt_of(service, body, caller.call)
        salt = body.cache_salt or ""
        holds = await mark_holds(service, caller.tenant, prompt, body.marks(), how, salt)
        room = max(service.max_context - len(prompt), 1)  # clients ask for the most their model can write, whatever the prompt
        message_id = own_id(caller.call, "msg")
        functions = body.functions() if body.looks_for_calls else ()
        switches = {"thinking": False} if body.thinks is False else how["variables"]
        reading = service.reading(prompt, functions, body.must_call, body.continued(), switches)
        writer = MessageWriter(message_id, service.model_name, body, len(prompt), reading, body.max_tokens > room, holds)
        budget = body.thinking.budget_tokens if body.thinking and body.thinking.type == "enabled" else None
        if budget is not None and not reading.takes_budget:
            caller.call.ignored.add("budget_tokens")
            budget = None
        params = reading.gated(msgspec.structs.replace(params, max_tokens=min(body.max_tokens, room)), budget)
        return writer, service.stream(caller, prompt, params, salt=salt, reading=reading, holds=holds)

    async def whole(body: MessagesRequest, caller: Caller) -> bytes:
        return await _whole(*await begin(body, caller))

    @router.post("/v1/messages", openapi_extra=schema_of(MessagesRequest))
    async def messages(request: Request, body: MessagesRequest = Depends(body_of(MessagesRequest))) -> Response:
        caller: Caller = request.state.caller
        if not body.stream:
            return Response(await until_disconnect(request, whole(body, caller)), media_type="application/json")
        writer, outputs = await begin(body, caller)
        first = await until_disconnect(request, anext(outputs))
        stream = _stream(writer, first, outputs, caller.call)
        return EventStream(stream, also_close=outputs, is_framed=True)

    @router.post("/v1/messages/count_tokens", openapi_extra=schema_of(CountRequest))
    async def count_tokens(request: Request, body: CountRequest = Depends(body_of(CountRequest))) -> dict[str, Any]:
        prompt, _ = await prompt_of(models.of(body.model), body, request.state.caller.call)
        return {"input_tokens": len(prompt)}

    models.whole_responses["/v1/messages"] = (MessagesRequest, whole)
    return router


Outputs = AsyncGenerator[tuple[Delta, TextDelta], None]


class MessageWriter:
    """Content blocks, whole and as events: a new block starts where the kind of content changes."""

    def __init__(
        self,
        message_id: str,
        model: str,
        body: MessagesRequest,
        num_prompt: int,
        reading: Reading,
        is_shortened: bool = False,
        holds: Sequence[Hold] = (),
    ) -> None:
        """`is_shortened`: the context has less room than max_tokens. `holds`: of its prefixes."""
        self.message_id = message_id
        self._model = model
        self._parser = reading.parser()
        self._one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._is_shortened = is_shortened
        self._num_thinking = 0
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the call in the open block
        self._num_prompt, self._num_output, self._num_cached, self._num_held = num_prompt, 0, 0, 0
        self._num_for_an_hour = max((hold.num_tokens for hold in holds if hold.ttl_s == TTLS["1h"]), default=0)
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

    def usage(self) -> dict[str, Any]:
        """What is held was computed for it, or found in the cache: only the former is its creation."""
        num_created = max(self._num_held - self._num_cached, 0)
        num_for_an_hour = max(min(self._num_for_an_hour, self._num_held) - self._num_cached, 0)
        by_time = {"ephemeral_5m_input_tokens": num_created - num_for_an_hour, "ephemeral_1h_input_tokens": num_for_an_hour}
        return {
            "input_tokens": self._num_prompt - self._num_cached - num_created,
            "cache_read_input_tokens": self._num_cached,
            "cache_creation_input_tokens": num_created,
            "cache_creation": by_time,
            "output_tokens": self._num_output,
            "output_tokens_details": {"thinking_tokens": self._num_thinking},
            "service_tier": "standard",
        }

    def take(self, delta: Delta, text: TextDelta) -> list[dict[str, Any]]:
        """New output, as events."""
        self._num_output += text.num_tokens
        self._num_cached, self._num_held = delta.num_cached, delta.num_held
        pieces = self._parser.push(text.text)
        if text.finish_reason:
            pieces += self._parser.finish()
        self._num_thinking += text.num_reasoning
        events = [event for piece in pieces for event in self._events(piece)]
        if text.finish_reason:
            events += self._end_block()
            self._finish(text)
        return events

    def _finish(self, text: TextDelta) -> None:
        cut_off = "model_context_window_exceeded" if self._is_shortened else "max_tokens"
        self.stop_reason = cut_off if text.finish_reason == "length" else "end_turn"
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
            if piece.is_reasoning and not self._shows_thinking:
                return events
            self._blocks[-1][kind] += piece.text
            return [*events, self._delta({"type": f"{kind}_delta", kind: piece.text})]
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallStart):
            call_id = f"toolu_{piece.call_id.removeprefix('call_')}"
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
        block, events = self._blocks[-1], []
        if block["type"] == "tool_use":
            with suppress(ValueError, RecursionError):  # cut off by max_tokens
                block["input"] = json.loads(self._arguments or "{}")
        elif block["type"] == "thinking":  # clients send it back; it is not checked
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def whole(self) -> dict[str, Any]:
        return self.start() | {"content": self._blocks, "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}


async def _whole(writer: MessageWriter, outputs: Outputs) -> bytes:
    async with aclosing(outputs):
        async for delta, text in outputs:
            writer.take(delta, text)
    return _json(writer.whole())


async def _stream(
    writer: MessageWriter, first: tuple[Delta, TextDelta], rest: Outputs, call: Call
) -> AsyncGenerator[bytes, None]:
    try:
        events = writer.take(*first)  # a token says how much of the prompt was cached; of a request that waits it is not known
        yield named_event({"type": "message_start", "message": writer.start()})
        yield named_event({"type": "ping"})
        for event in events:
            yield named_event(event)
        async for delta, text in rest:
            for event in writer.take(delta, text):
                yield named_event(event)
        ending = {"stop_reason": writer.stop_reason, "stop_sequence": writer.stop_sequence}
        yield named_event({"type": "message_delta", "delta": ending, "usage": writer.usage()})
        yield named_event({"type": "message_stop"})
    except TidemillError as error:
        yield named_event(shaped(call.path, error_body(error), error.status, call.name))
    finally:
        await rest.aclose()
