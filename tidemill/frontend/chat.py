"""Chat templates: a model's own Jinja template, in a sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.errors import CheckpointError, InvalidRequest

MAX_CHARS = 16 * 2**20
_ERROR_CHARS = 300


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here its content is simply text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template(Protocol):
    """What turns a conversation into a prompt: a ChatTemplate here, or one in a process of its own."""

    source: str

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str: ...


class ChatTemplate:
    """Compiled once; rendering can call nothing but what is given here."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._knows_tools = "tools" in source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The model's chat template cannot be compiled: {error}.") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """A template that knows nothing of tools finds them described in the system's message."""
        try:
            plain = [_plain(message) for message in messages]
            if tools and not self._knows_tools:
                plain = _with_tools(plain, tools)
            known = {"documents": None, **(variables or {}), "messages": plain, "tools": tools or None}
            return _bounded(self._template.generate(known))
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            what = f"refuses these messages: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error
        except Exception as error:  # of the model's own code
            what = f"fails on these messages: {type(error).__name__}: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error


def _bounded(parts: Iterator[str]) -> str:
    """A template that writes and writes is stopped. One that loops and writes nothing is, too, where it runs `apart`."""
    written, num_chars = [], 0
    for part in parts:
        written.append(part)
        num_chars += len(part)
        if num_chars > MAX_CHARS:
            raise InvalidRequest("The model's chat template does not come to an end with these messages.", param="messages")
    return "".join(written)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Content as one string: text parts joined, anything else refused."""
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise InvalidRequest(f"A content part of type {kind!r} is not supported.", fix="Send text.", param="messages")
            texts.append(part["text"])
        content = "".join(texts)
    calls = message.get("tool_calls")
    made = {**message, "content": content if content is not None else ""}
    return made if not calls else made | {"tool_calls": [_read_arguments(call) for call in calls]}


def _read_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write arguments as JSON themselves: they are given the value, not its text."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n{described}\n"
        'To call one, answer with <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    )
    made = []
    for message in messages:  # as plain turns, which every template knows
        if message.get("tool_calls"):
            calls = "\n".join(
                f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in message["tool_calls"]
            )
            message = {"role": "assistant", "content": f"{message['content']}{calls}"}
        elif message.get("role") == "tool":
            message = {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
        made.append(message)
    if made and made[0].get("role") == "system":
        return [{**made[0], "content": f"{made[0]['content']}\n\n{text}"}, *made[1:]]
    return [{"role": "system", "content": text}, *made]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
