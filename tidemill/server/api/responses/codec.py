"""The codec of OpenAI's Responses API: output items, whole, as events, and in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from tidemill.errors import Cancelled, InvalidRequest, TidemillError
from tidemill.server.api.responses.prompt import items_of, prompt_of
from tidemill.server.api.responses.types import ResponseRequest, make_id, stored_item
from tidemill.server.generation.conversation import own_id
from tidemill.server.generation.custom_tools import custom_input
from tidemill.server.generation.logprobs import openai_logprobs
from tidemill.server.generation.message import Part, PartEvent
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import Codec, Outputs
from tidemill.server.generation.request import Generation, Output, Prompt
from tidemill.server.generation.retention import key_leases
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestContext
from tidemill.server.http.responses import EventStream, json_response, named_event, until_disconnect
from tidemill.server.store.responses import Item, Stored

BYTES_PER_ITEM = 256  # of JSON, to estimate
_CODES = {"rate_limit_error": "rate_limit_exceeded"}
_TASKS: set[asyncio.Task[None]] = set()  # in the background
_json = msgspec.json.Encoder().encode
_log = logging.getLogger("tidemill.server")


class ResponseCodec(Codec):
    body_type = ResponseRequest
    body: ResponseRequest

    def __init__(self, models: Models, body: ResponseRequest, caller: Caller) -> None:
        if body.request_id is not None and body.request_id not in caller.call.labels:
            caller.call.labels.append(body.request_id)
        self.response_id = own_id(caller.call, "resp")
        if body.background:  # it outlives the call that asked for it
            call = caller.call
            own = RequestContext(
                self.response_id,
                path=call.path,
                tenant=caller.tenant,
                labels=call.labels,
                trace=call.trace,
                num_body_bytes=call.num_body_bytes,
            )
            caller = replace(caller, call=own)
        super().__init__(models, body, caller)
        self.store = models.responses
        self.status = "queued" if body.background else "in_progress"
        self.before: tuple[Item, ...] = ()  # of the conversation so far
        self.new: tuple[Item, ...] = ()
        self.output: list[dict[str, Any]] = []  # items
        self.is_deleted = False
        self.task: asyncio.Task[None] | None = None  # in the background
        self._may_wait = False  # in the background
        self._events: list[bytes] = []  # of one in the background that is streamed, in wire format
        self._has_more = asyncio.Event()  # events, or its end
        self._created_s, self._completed_s = int(time.time()), 0
        self._num_events = 0
        self._has_begun = False  # the engine has taken it
        self._logprobs: list[msgspec.Raw] = []  # of tokens whose text is held back
        self._output_ids: list[int] = []
        self._why: str | None = None
        self._error: dict[str, str] | None = None

    # ---- from the body to the generation

    async def read(self) -> Generation:
        body, service, caller = self.body, self.service, self.caller
        if body.background and not self._may_wait:
            raise InvalidRequest(
                "background is not possible here.", fix="Leave it out.", param="background"
            )
        if body.background and body.store is False:
            what = "background can only be used when `store` is true."
            raise InvalidRequest(what, fix="Leave out store.", param="background")
        params = await aside(body.params, caller.call.num_body_bytes)
        before, new = items_of(self.store, body, caller.tenant)
        ids = await prompt_of(service, body, before, new, caller.call)
        self._callable_tools = {callee.seen_name: callee for callee in body.callable_tools()}
        functions = [callee.function() for callee in self._callable_tools.values()]
        is_off = body.reasoning is not None and body.reasoning.effort == "none"
        switches = {"thinking": not is_off} | (body.chat_template_kwargs or {})
        output_format = service.output_format(ids, functions, body.must_call, variables=switches)
        params = self.with_budget(output_format, params, None, "")
        salt, key = body.cache_salt or "", (body.prompt_cache_key, body.prompt_cache_retention)
        prefix_leases = key_leases(service, caller.tenant, *key, ids, salt=salt)
        self.before = before
        self.new = await aside(
            lambda: tuple(Item.of(stored_item(item)) for item in new), BYTES_PER_ITEM * len(new)
        )
        self._entry = openai_logprobs(service.tokenizer, service.tokenizer.token_text)
        return Generation(
            service,
            caller,
            [Prompt(ids, params, output_format, prefix_leases, salt)],
            one_call=body.parallel_tool_calls is False,
            must_call=body.must_call,
            one_by_one=body.wants_logprobs,
            tells_progress=bool(body.stream and body.return_progress),
            priority=body.priority,
            keeps_logprobs=body.wants_logprobs,
        )

    def ready(self) -> None:
        if self.body.store is not False:
            self.store.running[self.caller.tenant, self.response_id] = self

    # ---- what is written

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def response(self) -> dict[str, Any]:
        body, params = self.body, self.generation.prompts[0].params
        text_format: Any = body.text.format if body.text else None
        if text_format is not None:
            text_format = text_format.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s or None,
            "status": self.status,
            "background": bool(body.background),
            "error": self._error,
            "incomplete_details": {"reason": self._why} if self._why else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.service.model_name,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": {"id": body.conversation_id} if body.conversation_id else None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if self.is_over else None,
            "metadata": body.metadata or {},
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            # Which pydantic-ai reads whatever the client's version.
            "prompt_cache_diagnostics": None,
            **(self._messages() if body.enable_response_messages and self.is_over else {}),
        }

    def _messages(self) -> dict[str, Any]:
        """Prompt and output under vLLM's names."""

        def raw(ids: list[int]) -> list[dict[str, Any]]:
            text = self.service.tokenizer.decode(ids, skip_special=False)
            return [{"type": "raw_message_tokens", "message": text, "tokens": ids}]

        prompt = self.generation.prompts[0].ids
        return {"input_messages": raw(prompt), "output_messages": raw(self._output_ids)}

    def _usage(self) -> dict[str, Any]:
        figures = self.generation.figures
        num_written = max(figures.num_held - figures.num_cached, 0)
        return {
            "input_tokens": figures.num_prompt,
            "input_tokens_details": {
                "cached_tokens": figures.num_cached,
                "cache_write_tokens": num_written,
            },
            "output_tokens": figures.num_output,
            "output_tokens_details": {"reasoning_tokens": figures.num_reasoning},
            "total_tokens": figures.num_prompt + figures.num_output,
        }

    def _timings(self) -> dict[str, Any]:
        """The times so far, if they are asked for."""
        if not self.body.timings_per_token:
            return {}
        return {"timings": self.generation.figures.llamacpp_timings()}

    async def whole(self) -> dict[str, Any]:
        return self.response() | self._timings()

    def keep(self, output: Output) -> None:
        for _ in self._take(output):
            pass

    # ---- a stream

    def start(self) -> Iterable[bytes]:
        return (named_event(self._event("response.created", response=self.response())),)

    def event(self, output: Output) -> Iterable[bytes]:
        if not self._has_begun:
            self.status, self._has_begun = "in_progress", True
            yield named_event(self._event("response.in_progress", response=self.response()))
        if (progress := output.delta.progress) is not None:
            progress_fields = self.generation.figures.llamacpp_progress(progress)
            response = self.response()
            yield named_event(
                self._event(
                    "response.in_progress", response=response, prompt_progress=progress_fields
                )
            )
            return
        for event in self._take(output):
            yield named_event(event)

    def end(self) -> Iterable[bytes]:
        response = self.response()
        kind = f"response.{self.status}"
        return (named_event(self._event(kind, response=response, **self._timings())),)

    def error(self, error: TidemillError) -> Iterable[bytes]:
        return (named_event(self._event("response.failed", response=self.response())),)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _take(self, output: Output) -> Iterable[dict[str, Any]]:
        """New output, as events. A new item begins where the kind of output changes."""
        body, choice = self.body, output.choice
        if body.enable_response_messages:
            self._output_ids += output.token_ids
        if body.wants_logprobs:
            self._logprobs += [
                msgspec.Raw(_json(self._entry(logprobs))) for logprobs in output.logprobs
            ]
        is_cut = choice.finish_reason == "length"
        for event in output.events:
            is_last = choice.reader is not None and event.part is choice.reader.parts[-1]
            status = "incomplete" if is_cut and is_last else "completed"
            for item_event in self._item_events(event, status):
                yield item_event | (
                    self._timings() if item_event["type"].endswith(".delta") else {}
                )
        if output.is_last:
            self._finish("incomplete" if is_cut else "completed")
            self._why = "max_output_tokens" if is_cut else None

    def _item_events(self, event: PartEvent, status: str) -> Iterable[dict[str, Any]]:
        stage, part, text = event
        if stage == "begin" and part.kind == "call":
            yield self._begin_item(self._call_item(part))
        elif stage == "begin":
            yield from self._begin_text(part)
        elif stage == "end":
            yield from self._end_item(part, status)
        elif part.kind != "call":
            yield self._text_delta(part, text)
        elif (
            self.output[part.number]["type"] == "function_call"
        ):  # a custom tool's input is decoded at its end
            self.output[part.number]["arguments"] += text
            yield self._of_item(part, "response.function_call_arguments.delta", delta=text)

    def _call_item(self, part: Part) -> dict[str, Any]:
        callee = self._callable_tools.get(part.name)
        is_custom = callee is not None and callee.custom is not None
        item: dict[str, Any] = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": make_id("ctc" if is_custom else "fc"),
            "call_id": part.call_id,
            "name": callee.name if callee else part.name,
            "input" if is_custom else "arguments": "",
        }
        if callee is not None and callee.namespace is not None:
            item["namespace"] = callee.namespace
        return item

    def _begin_item(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] != "message":
            self._logprobs = []  # they are reported of messages only
        self.output.append(item | {"status": "in_progress"})
        added = self.output[-1] | ({"content": []} if "content" in item else {})
        return self._event(
            "response.output_item.added", output_index=len(self.output) - 1, item=added
        )

    def _begin_text(self, part: Part) -> Iterable[dict[str, Any]]:
        is_reasoning = part.kind == "reasoning"
        if self.output and self.output[-1]["type"] == "reasoning":
            self._logprobs = self._logprobs[
                -1:
            ]  # the tokens before are the reasoning's, and its mark
        item: dict[str, Any] = {
            "type": "message",
            "id": make_id("msg"),
            "content": [],
            "role": "assistant",
        }
        content: dict[str, Any] = {
            "type": "output_text",
            "text": "",
            "annotations": [],
            "logprobs": [],
        }
        if is_reasoning:
            item = {"type": "reasoning", "id": make_id("rs"), "content": [], "summary": []}
            content = {"type": "reasoning_text", "text": ""}
        yield self._begin_item(item)
        self.output[-1]["content"].append(content)
        yield self._of_item(
            part, "response.content_part.added", content_index=0, part=_copy(content)
        )

    def _text_delta(self, part: Part, text: str) -> dict[str, Any]:
        content = self.output[part.number]["content"][0]
        content["text"] += text
        more: dict[str, Any] = {}
        if part.kind == "text":
            more["logprobs"], self._logprobs = self._logprobs, []
            content["logprobs"] += more["logprobs"]
        return self._of_item(
            part, f"response.{content['type']}.delta", content_index=0, delta=text, **more
        )

    def _of_item(self, part: Part, kind: str, /, **fields: Any) -> dict[str, Any]:
        item_id = self.output[part.number]["id"]
        return self._event(kind, item_id=item_id, output_index=part.number, **fields)

    def _end_item(self, part: Part, status: str) -> Iterable[dict[str, Any]]:
        item = self.output[part.number]
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments.done"
            yield self._of_item(part, kind, arguments=arguments, name=name)
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(part.text)
            yield self._of_item(part, "response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item(part, "response.custom_tool_call_input.done", input=item["input"])
        else:
            content = item["content"][0]
            more = {"logprobs": content["logprobs"]} if "logprobs" in content else {}
            kind, text = f"response.{content['type']}.done", content["text"]
            yield self._of_item(part, kind, content_index=0, text=text, **more)
            yield self._of_item(
                part, "response.content_part.done", content_index=0, part=_copy(content)
            )
        yield self._event("response.output_item.done", output_index=part.number, item=dict(item))

    # ---- its end

    def _finish(self, status: str) -> None:
        self.status, self._completed_s = status, int(time.time())
        for item in self.output:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"

    def fail(self, error: TidemillError) -> None:
        is_cancelled = isinstance(error, Cancelled)
        self._finish("cancelled" if is_cancelled else "failed")
        code = error.code or _CODES.get(error.kind, "server_error")
        self._error = {"code": code, "message": str(error)}
        if self.task is None and not (self._has_begun or is_cancelled):
            self.is_deleted = True  # the client gets the error, not a response

    def close(self) -> None:
        if self.task is None:
            self.keep_in_store()

    def keep_in_store(self) -> None:
        """Stores the response, once."""
        if not self.is_over:
            self._finish("cancelled")  # the client has left
        tenant = self.caller.tenant
        is_stored = self.store.running.pop((tenant, self.response_id), None) is not None
        if is_stored and not self.is_deleted:
            events = b"".join(self._events)
            stored = Stored.of((*self.before, *self.new), self.response(), events)
            self.store.put(tenant, self.response_id, stored)
        if self.body.conversation_id is not None and self.status in ("completed", "incomplete"):
            items = (*self.new, *map(Item.of, self.output))
            self.store.append_to_conversation(tenant, self.body.conversation_id, items)

    # ---- in the background

    async def respond(self, request: Request) -> Response:
        if not self.body.background:
            return await super().respond(request)
        self._may_wait = True
        outputs = await until_disconnect(request, self.begin())
        self.task = asyncio.create_task(self._run(outputs))
        _TASKS.add(self.task)
        self.task.add_done_callback(_TASKS.discard)
        self.task.add_done_callback(lambda _: self._has_more.set())  # also if it never began
        if not self.body.stream:
            return json_response(self.response())
        events = self.follow()
        return EventStream(events, also_close=events)

    async def _run(self, outputs: Outputs) -> None:
        try:
            async with aclosing(self.stream([], outputs)) as events:
                async for event in events:
                    self._add(event)
        except Exception as error:
            _log.exception("unexpected error in a background response", exc_info=error)
            internal = TidemillError("An internal error occurred.")
            self.fail(internal)
            for event in self.error(internal):
                self._add(event)
        finally:
            if not self.is_over:
                self._finish("cancelled")
                self._add(named_event(self._event("response.failed", response=self.response())))
            self.keep_in_store()

    def _add(self, event: bytes) -> None:
        if self.body.stream:
            self._events.append(event)
            self._has_more.set()

    async def follow(self, num_known: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from the start or after so many. It goes on if nobody follows."""
        assert self.task is not None, "only of one in the background"
        while True:
            self._has_more.clear()
            while num_known < len(self._events):
                num_known += 1
                yield self._events[num_known - 1]
            if self.task.done():
                return
            await self._has_more.wait()

    async def cancel(self) -> None:
        if self.task is None:
            self.models.cancel(self.caller.call.request_id, self.caller.tenant)
            return
        self.task.cancel()
        await asyncio.wait([self.task])
        self.keep_in_store()  # a task that had not started has not done it


def _copy(content: dict[str, Any]) -> dict[str, Any]:
    return content | ({"logprobs": list(content["logprobs"])} if "logprobs" in content else {})
