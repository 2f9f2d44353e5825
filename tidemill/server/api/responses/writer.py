"""ResponseWriter: a response of the Responses API, whole and as events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tidemill.errors import TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import CallArguments, CallStart, Piece, Reading, TextPiece
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import SamplingParams
from tidemill.server.api.responses.types import ResponseRequest, make_id
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.custom_tools import custom_input
from tidemill.wire import Delta, TokenLogprobs

_json = msgspec.json.Encoder().encode
_CODES = {"rate_limit_error": "rate_limit_exceeded"}


class ResponseWriter:
    """Output items: a new one starts where the kind of output changes."""

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        asked: ResponseRequest,
        params: SamplingParams,
        prompt: list[int],
        reading: Reading,
    ) -> None:
        num_prompt = len(prompt)
        self.response_id = response_id
        self._model, self._tokenizer, self._asked, self._params = model, tokenizer, asked, params
        self._created_s, self._completed_s = int(time.time()), 0
        callees = asked.callees()
        self._parser = reading.parser()
        self._callees = {one.seen_name: one for one in callees}
        self._one_call = asked.parallel_tool_calls is False
        self._num_events = 0
        self.output: list[dict[str, Any]] = []
        self._arguments = ""  # of the custom tool's call in the open item
        self._logprobs: list[msgspec.Raw] = []  # of tokens whose text is held back
        self._num_prompt, self._num_output, self._num_cached = num_prompt, 0, 0
        self._num_reasoning = self._num_written = 0
        self._prompt, self._output_ids = (prompt if asked.enable_response_messages else []), list[int]()
        self._progress = sampling_aliases.Progress(num_prompt)
        self.status = "queued" if asked.background else "in_progress"
        self._why: str | None = None
        self._error: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        asked = self._asked
        text_format = asked.text.format.model_dump(by_alias=True, exclude_none=True) if asked.text and asked.text.format else None
        choice = asked.tool_choice or "auto"
        effort = asked.reasoning.effort if asked.reasoning else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s or None,
            "status": self.status,
            "background": bool(asked.background),
            "error": self._error,
            "incomplete_details": {"reason": self._why} if self._why else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "conversation": {"id": asked.conversation_id} if asked.conversation_id else None,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": self._params.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True) for tool in asked.tools or []],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": self._usage() if self.is_over else None,
            "metadata": asked.metadata or {},
            "prompt_cache_key": asked.prompt_cache_key,
            "prompt_cache_retention": asked.prompt_cache_retention,
            "prompt_cache_diagnostics": None,  # which pydantic-ai reads whatever the client's version
            **(self._messages() if asked.enable_response_messages and self.is_over else {}),
        }

    def _messages(self) -> dict[str, Any]:
        """Prompt and output under vLLM's names."""

        def raw(ids: list[int]) -> list[dict[str, Any]]:
            return [{"type": "raw_message_tokens", "message": self._tokenizer.decode(ids, skip_special=False), "tokens": ids}]

        return {"input_messages": raw(self._prompt), "output_messages": raw(self._output_ids)}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": self._num_written},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": self._num_prompt + self._num_output,
        }

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        made = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return made

    def take(self, delta: Delta, text: TextDelta) -> list[dict[str, Any]]:
        """New output, as events."""
        self._progress.take(delta, text)
        if delta.progress is not None:
            told = sampling_aliases.prompt_progress(delta.progress, self._progress.begun_s)
            return [self.event("response.in_progress", response=self.body(), prompt_progress=told)]
        if self._asked.enable_response_messages:
            self._output_ids += delta.token_ids[: text.num_tokens]
        self._num_output += text.num_tokens
        self._num_cached, self._num_written = delta.num_cached, max(delta.num_held - delta.num_cached, 0)
        pieces = self._parser.push(text.text)
        if text.finish_reason:
            pieces += self._parser.finish()
        self._num_reasoning += text.num_reasoning
        if self._asked.wants_logprobs:
            self._logprobs += [msgspec.Raw(_json(self._entry(one))) for one in (delta.logprobs or [])[: text.num_tokens]]
        events = [event for piece in pieces for event in self._events(piece)]
        for event in events:
            event |= self.timings() if event["type"].endswith(".delta") else {}
        if text.finish_reason:
            is_cut = text.finish_reason == "length"
            events += self._end_item("incomplete" if is_cut else "completed")
            self.end("incomplete" if is_cut else "completed")
            self._why = "max_output_tokens" if is_cut else None
        return events

    def timings(self) -> dict[str, Any]:
        """So far, if they are asked for."""
        return {"timings": sampling_aliases.timings(self._progress)} if self._asked.timings_per_token else {}

    def end(self, status: str) -> None:
        self.status, self._completed_s = status, int(time.time())

    def fail(self, error: TidemillError) -> None:
        self.end("cancelled" if error.kind == "request_cancelled" else "failed")
        self._error = {"code": error.code or _CODES.get(error.kind, "server_error"), "message": str(error)}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        return self._cell(entry.token_id, entry.logprob) | {"top_logprobs": [self._cell(*pair) for pair in entry.top]}

    def _cell(self, token: int, value: float) -> dict[str, Any]:
        tokenizer = self._tokenizer
        return {"token": tokenizer.token_text(token), "logprob": max(value, -9999.0), "bytes": list(tokenizer.token_bytes(token))}

    @property
    def _open(self) -> dict[str, Any] | None:
        return self.output[-1] if self.output and self.output[-1]["status"] == "in_progress" else None

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            return self._text_events(piece)
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallStart):
            return self._start_call(piece)
        assert isinstance(piece, CallArguments)
        if self.output[-1]["type"] == "custom_tool_call":  # its input is decoded at its end
            self._arguments += piece.text
            return []
        self.output[-1]["arguments"] += piece.text
        return [self._of_item("response.function_call_arguments.delta", delta=piece.text)]

    def _start_call(self, piece: CallStart) -> list[dict[str, Any]]:
        callee = self._callees.get(piece.name)
        is_custom = callee is not None and callee.custom is not None
        item: dict[str, Any] = {"type": "custom_tool_call" if is_custom else "function_call"}
        item |= {"id": make_id("ctc" if is_custom else "fc"), "call_id": piece.call_id}
        item |= {"name": callee.name if callee else piece.name, "input" if is_custom else "arguments": ""}
        if callee is not None and callee.namespace is not None:
            item["namespace"] = callee.namespace
        events = self._start_item(item)
        self._arguments = ""
        return events

    def _text_events(self, piece: TextPiece) -> list[dict[str, Any]]:
        kind, part = ("reasoning", "reasoning_text") if piece.is_reasoning else ("message", "output_text")
        events: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != kind:
            if self.output and self.output[-1]["type"] == "reasoning":
                self._logprobs = self._logprobs[-1:]  # the tokens before are the reasoning's, and its mark
            item: dict[str, Any] = {"type": kind, "id": make_id("rs" if piece.is_reasoning else "msg"), "content": []}
            item["summary" if piece.is_reasoning else "role"] = [] if piece.is_reasoning else "assistant"
            events += self._start_item(item)
            empty: dict[str, Any] = {"type": part, "text": ""}
            if not piece.is_reasoning:
                empty |= {"annotations": [], "logprobs": []}
            self.output[-1]["content"].append(empty)
            events.append(self._of_item("response.content_part.added", content_index=0, part=_copy(empty)))
        self.output[-1]["content"][0]["text"] += piece.text
        more: dict[str, Any] = {}
        if not piece.is_reasoning:
            more["logprobs"], self._logprobs = self._logprobs, []
            self.output[-1]["content"][0]["logprobs"] += more["logprobs"]
        return [*events, self._of_item(f"response.{part}.delta", content_index=0, delta=piece.text, **more)]

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self.event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _start_item(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end_item("completed")
        if item["type"] != "message":
            self._logprobs = []  # they are reported of messages only
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
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            events.append(self._of_item("response.custom_tool_call_input.delta", delta=item["input"]))
            events.append(self._of_item("response.custom_tool_call_input.done", input=item["input"]))
        elif item["content"]:
            part = item["content"][0]
            more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": part["logprobs"]}
            events.append(self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **more))
            events.append(self._of_item("response.content_part.done", content_index=0, part=_copy(part)))
        return [*events, self.event("response.output_item.done", output_index=len(self.output) - 1, item=dict(item))]


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return part | ({"logprobs": list(part["logprobs"])} if "logprobs" in part else {})
