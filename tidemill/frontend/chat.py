"""Chat templates: a model's own Jinja template, in a sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.errors import CheckpointError, InvalidRequest
from tidemill.frontend.control import ControlTokens

MAX_CHARS = 16 * 2**20
MAX_TEMPLATE_CHARS = 2**20
_ERROR_CHARS = 300
_TEMPLATE_TOKENS = ("bos_token", "eos_token")  # variables that are the tokenizer's, not a client's


class _Generation(Extension):
    """{% generation %} delimits the assistant's text for training; here its content is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NothingComputed(CodeGenerator):
    """jinja2 computes constant expressions while it compiles, however large; here they are computed when they are rendered."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _NothingComputed
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)  # what is intercepted is not computed early


class Template(Protocol):
    """Turns a conversation into a prompt: a ChatTemplate, or a Renderer, which runs one in a worker process."""

    source: str
    control: ControlTokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        marks: bool = False,
    ) -> str: ...


class ChatTemplate:
    """Compiled once; rendering can call nothing but what is given here. `control`: texts of the tokenizer's control tokens."""

    def __init__(self, source: str, control: Iterable[str] = ()) -> None:
        self.source, self.control = source, ControlTokens(control)
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._knows_tools = "tools" in source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(f"The model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}.")
        try:
            source.encode()
            self._template = environment.from_string(source)
        except UnicodeEncodeError as error:  # a lone surrogate
            raise CheckpointError("The model's chat template is not valid UTF-8.") from error
        except Exception as error:  # jinja2's own; of deep nesting RecursionError, MemoryError or SyntaxError
            why = str(error)[:_ERROR_CHARS] or type(error).__name__
            raise CheckpointError(f"The model's chat template cannot be compiled: {why}.") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        marks: bool = False,
    ) -> str:
        """If the template does not use `tools`, they are described in the system message. `marks`: control tokens in what the
        client gave are broken by marks."""
        try:
            known = {**(variables or {}), "messages": [_plain(message) for message in messages], "tools": tools or None}
            if marks:
                known = {name: value if name in _TEMPLATE_TOKENS else self.control.mark(value) for name, value in known.items()}
            if tools and not self._knows_tools:
                known["messages"] = _with_tools(known["messages"], known["tools"])
            return _bounded(self._template.generate({"documents": None, **known}))
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            what = f"refuses these messages: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error
        except Exception as error:  # of the model's own code
            what = f"fails on these messages: {type(error).__name__}: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error


def _bounded(parts: Iterator[str]) -> str:
    """Stops a template whose output does not end. One that loops without output is stopped only in a worker (apart.py)."""
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
    """Templates serialize arguments themselves, so they get the value, not its JSON text."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
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
