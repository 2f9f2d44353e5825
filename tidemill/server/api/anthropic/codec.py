"""The codec of Anthropic's Messages API: content blocks, whole and as events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from tidemill.errors import TidemillError
from tidemill.server.api.anthropic.types import MessagesRequest
from tidemill.server.api.anthropic.types import Prompt as PromptBody
from tidemill.server.generation.conversation import own_id, template_variables
from tidemill.server.generation.message import Part, PartEvent
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.request import Generation, Output, Prompt
from tidemill.server.generation.retention import TTLS, mark_leases
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestContext
from tidemill.server.http.errors import error_body, format_error
from tidemill.server.http.responses import named_event

_BYTES_PER_PART = 64  # of JSON, to estimate
_FIELDS = {"effort": "output_config.effort", "thinking": "thinking"}
_KINDS = {"reasoning": "thinking", "text": "text", "call": "tool_use"}


async def prompt_of(
    service: Service, body: PromptBody, call: RequestContext
) -> tuple[list[int], dict[str, Any]]:
    """The prompt's token ids, and the arguments with which it was encoded."""
    conversation = await aside(body.conversation, body.num_parts * _BYTES_PER_PART)
    template = service.tokenizer.chat_template
    source = template.source if template else None
    variables, unknown = template_variables(source, body.effort, body.thinks)
    call.ignored |= {_FIELDS[name] for name in unknown}
    variables |= body.chat_template_kwargs or {}
    options = {"variables": variables, **body.template_options(conversation)}
    return await service.encode_chat(conversation, **options), options


class MessagesCodec(Codec):
    body_type = MessagesRequest
    body: MessagesRequest

    # ---- from the body to the generation

    async def read(self) -> Generation:
        body, service = self.body, self.service
        params = await aside(body.params, self.caller.call.num_body_bytes)
        ids, options = await prompt_of(service, body, self.caller.call)
        salt = body.cache_salt or ""
        marks = await aside(body.marks, body.num_parts * _BYTES_PER_PART)
        prefix_leases = await mark_leases(service, self.caller.tenant, ids, marks, options, salt)
        functions = body.functions() if body.looks_for_calls else ()
        switches = {"thinking": False} if body.thinks is False else options["variables"]
        output_format = service.output_format(
            ids, functions, body.must_call, body.continued(), switches
        )
        is_enabled = body.thinking is not None and body.thinking.type == "enabled"
        budget = body.thinking.budget_tokens if body.thinking and is_enabled else None
        params = self.with_budget(output_format, params, budget, "budget_tokens")
        self._message_id = own_id(self.caller.call, "msg")
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        # Clients ask for the most their model can write, whatever the prompt.
        self._is_shortened = body.max_tokens > max(service.context_of(params) - len(ids), 1)
        hours = (hold.num_tokens for hold in prefix_leases if hold.ttl_s == TTLS["1h"])
        self._num_for_an_hour = max(hours, default=0)
        choice = body.tool_choice
        return Generation(
            service,
            self.caller,
            [Prompt(ids, params, output_format, prefix_leases, salt)],
            one_call=choice is not None and choice.disable_parallel_tool_use,
            must_call=body.must_call,
            ends_with_context=True,
        )

    # ---- what is written

    def _usage(self) -> dict[str, Any]:
        """The usage of the response. Tokens that are held were computed for the request, or found
        in the cache: only the former count as its creation."""
        figures = self.generation.figures
        num_created = max(figures.num_held - figures.num_cached, 0)
        num_for_an_hour = min(self._num_for_an_hour, figures.num_held) - figures.num_cached
        num_for_an_hour = max(num_for_an_hour, 0)
        return {
            "input_tokens": figures.num_prompt - figures.num_cached - num_created,
            "cache_read_input_tokens": figures.num_cached,
            "cache_creation_input_tokens": num_created,
            "cache_creation": {
                "ephemeral_5m_input_tokens": num_created - num_for_an_hour,
                "ephemeral_1h_input_tokens": num_for_an_hour,
            },
            "output_tokens": figures.num_output,
            "output_tokens_details": {"thinking_tokens": figures.num_reasoning},
            "service_tier": "standard",
        }

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model_name,
            "content": content,
            **ending,
            "usage": self._usage(),
        }

    def _ending(self) -> dict[str, Any]:
        (choice,) = self.generation.choices
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_shortened else "max_tokens"
        elif isinstance(choice.stop, str):
            reason, sequence = "stop_sequence", choice.stop
        elif choice.ends_with_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def whole(self) -> dict[str, Any]:
        (choice,) = self.generation.choices
        assert choice.reader is not None, "the output of a message is read"
        return self._message([self._block(part) for part in choice.reader.parts], self._ending())

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind == "call":
            return _call_block(part) | {"input": part.arguments() or {}}  # none if it was cut off
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        text = part.text if self._shows_thinking else ""
        return {"type": "thinking", "thinking": text, "signature": _signature(text)}

    # ---- a stream

    def start(self) -> Iterable[bytes]:
        """The first token says how much of the prompt was cached; of a request that waits it is not
        known."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        yield named_event({"type": "message_start", "message": message})
        yield named_event({"type": "ping"})

    def event(self, output: Output) -> Iterable[bytes]:
        return (
            named_event(event) for part_event in output.events for event in self._events(part_event)
        )

    def _events(self, event: PartEvent) -> Iterable[dict[str, Any]]:
        stage, part, text = event
        if stage == "begin":
            block: dict[str, Any] = {"type": _KINDS[part.kind], _KINDS[part.kind]: ""}
            if part.kind == "reasoning":
                block["signature"] = ""
            if part.kind == "call":
                block = _call_block(part) | {"input": {}}
            yield {"type": "content_block_start", "index": part.number, "content_block": block}
        elif stage == "more" and part.kind == "call":
            yield _delta(part, {"type": "input_json_delta", "partial_json": text})
        elif stage == "more" and (part.kind == "text" or self._shows_thinking):
            kind = _KINDS[part.kind]
            yield _delta(part, {"type": f"{kind}_delta", kind: text})
        elif stage == "end":
            if part.kind == "reasoning":  # clients send it back; it is not checked
                signature = _signature(part.text if self._shows_thinking else "")
                yield _delta(part, {"type": "signature_delta", "signature": signature})
            yield {"type": "content_block_stop", "index": part.number}

    def end(self) -> Iterable[bytes]:
        yield named_event(
            {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        )
        yield named_event({"type": "message_stop"})

    def error(self, error: TidemillError) -> Iterable[bytes]:
        call = self.caller.call
        return (named_event(format_error(call.path, error_body(error), error.status, call.name)),)


def _call_block(part: Part) -> dict[str, Any]:
    call_id = f"toolu_{part.call_id.removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": part.name}


def _delta(part: Part, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": part.number, "delta": delta}


def _signature(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
