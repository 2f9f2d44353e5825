"""Chat templates: a model's own Jinja template, in a sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from tidemill.frontend.template_probe import TemplateProbe

MAX_CHARS = 16 * 2**20
MAX_TEMPLATE_CHARS = 2**20
_ERROR_CHARS = 300
# Variables that are the tokenizer's, not a client's.
TOKEN_VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _Generation(Extension):
    """{% generation %} delimits the assistant's text for training; here its content is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NothingComputed(CodeGenerator):
    """jinja2 computes constant expressions while it compiles, however large; here they are computed
    when they are rendered."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _NothingComputed
    # what is intercepted is not computed early
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)


class Template(Protocol):
    """Turns a conversation into a prompt: a ChatTemplate, or a Renderer, which runs one in a worker
    process."""

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
    """Compiled once; rendering can call nothing but what is given here. `control`: texts of the
    tokenizer's control tokens."""

    def __init__(self, source: str, control: Iterable[str] = ()) -> None:
        self.source, self.control = source, ControlTokens(control)
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._knows_tools = "tools" in source
        self._probe = TemplateProbe(self._write)
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"The model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}."
            )
        try:
            source.encode()
            self._template = environment.from_string(source)
        except UnicodeEncodeError as error:  # a lone surrogate
            raise CheckpointError("The model's chat template is not valid UTF-8.") from error
        # jinja2's own; of deep nesting RecursionError, MemoryError or SyntaxError
        except Exception as error:
            why = str(error)[:_ERROR_CHARS] or type(error).__name__
            raise CheckpointError(
                f"The model's chat template cannot be compiled: {why}."
            ) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        marks: bool = False,
    ) -> str:
        """If the template does not use `tools`, they are described in the system message. `marks`:
        control tokens in what the client gave are broken by marks."""
        try:
            adapted = [self._adapted(message) for message in messages]
            if (
                any(message.get("role") == "system" for message in messages)
                and self._probe.refuses_system
            ):
                adapted = _without_system(adapted)
            known = {**(variables or {}), "messages": adapted, "tools": tools or None}
            if marks:
                known = {
                    name: value if name in TOKEN_VARIABLES else self.control.mark(value)
                    for name, value in known.items()
                }
            if not self._knows_tools and self._loses_calls(messages):
                known["messages"] = _as_turns(known["messages"])
            if tools and not self._knows_tools:
                known["messages"] = self._with_tools(known["messages"], known["tools"])
            return _bounded(self._template.generate({"documents": None, **known}))
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            what = f"refuses these messages: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error
        except Exception as error:  # of the model's own code
            what = f"fails on these messages: {type(error).__name__}: {str(error)[:_ERROR_CHARS]}"
            raise InvalidRequest(f"The model's chat template {what}.", param="messages") from error

    def _write(self, messages: list[dict[str, Any]], tools: Any) -> str:
        known = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": False,
            "documents": None,
        }
        return _bounded(self._template.generate(dict.fromkeys(TOKEN_VARIABLES, "") | known))

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in the form that the template takes: content as a string or as parts, arguments
        as an object or as text."""
        content, role, calls = (
            message.get("content"),
            str(message.get("role")),
            message.get("tool_calls"),
        )
        if isinstance(content, list):
            content = _texts(content)
            if not self._probe.takes(role, parts=True):
                content = _joined(content)
            # some templates, as Gemma's, read only its first part
            elif role == "system" and content:
                content = [{"type": "text", "text": _joined(content)}]
        elif (
            content
            and not self._probe.takes(role, parts=False)
            and self._probe.takes(role, parts=True)
        ):
            content = [{"type": "text", "text": content}]
        adapted = {**message, "content": content or ""}
        if calls:
            adapted["tool_calls"] = [
                _read_arguments(call, self._probe.takes_arguments_as_text) for call in calls
            ]
            adapted["content"] = content or (None if self._probe.takes_null else "")
        if "reasoning_content" in message:  # gpt-oss reads it by the other name
            adapted.setdefault("thinking", message["reasoning_content"])
        return adapted

    def _with_tools(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Tools described in the system message, or in the first one."""
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        call = self._own_call or '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
        text = f"You may call these functions:\n{described}\nTo call one, answer with {call}"
        at = next(
            (i for i, message in enumerate(messages) if message.get("role") == "system"), None
        )
        if at is not None:
            system = messages[at]
            joined = {**system, "content": f"{_joined(system['content'])}\n\n{text}"}
            return [*messages[:at], joined, *messages[at + 1 :]]
        turns = [{"role": "system", "content": text}, *messages]
        return _without_system(turns) if self._probe.refuses_system else turns

    def _loses_calls(self, messages: Sequence[dict[str, Any]]) -> bool:
        """There are calls, or results of them, that would not be part of the prompt."""
        has_calls = any(message.get("tool_calls") for message in messages)
        has_results = any(message.get("role") == "tool" for message in messages)
        return (has_calls and not self._own_call) or (
            has_results and not self._probe.writes_results
        )

    @property
    def _own_call(self) -> str:
        """A call as the template writes it, if it writes results of calls, too: it may do so
        without knowing tools, in the way in which its model was trained to."""
        return self._probe.example_call if self._probe.writes_results else ""


def _bounded(parts: Iterator[str]) -> str:
    """Stops a template whose output does not end. One that loops without output is stopped only in
    a worker (sandbox.py)."""
    written, num_chars = [], 0
    for part in parts:
        written.append(part)
        num_chars += len(part)
        if num_chars > MAX_CHARS:
            raise InvalidRequest(
                "The model's chat template does not come to an end with these messages.",
                param="messages",
            )
    return "".join(written)


def _texts(content: list[Any]) -> list[dict[str, Any]]:
    """The parts of a content, which must be text."""
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"A content part of type {kind!r} is not supported.",
                fix="Send text.",
                param="messages",
            )
    return content


def _joined(content: Any) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _read_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Most templates serialize arguments themselves, so they get the value; some take its JSON
    text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _prefixed(content: Any, text: str) -> Any:
    """Content with a text before it."""
    return (
        [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content
    )


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without system messages. Their text becomes the beginning of the first message
    of the user."""
    texts = [_joined(message["content"]) for message in messages if message.get("role") == "system"]
    turns = [message for message in messages if message.get("role") != "system"]
    first = next((i for i, message in enumerate(turns) if message.get("role") == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(texts)}, *turns]
    turns[first] = {
        **turns[first],
        "content": _prefixed(turns[first]["content"], "\n\n".join([*texts, ""])),
    }
    return turns


def _as_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and their results as turns of assistant and user, which every template knows, and which
    must alternate for some."""
    turns: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if message.get("tool_calls"):
            calls = "\n".join(
                f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
                for call in message["tool_calls"]
            )
            message = {"role": "assistant", "content": f"{_joined(message['content'])}{calls}"}
        elif is_result:
            message = {
                "role": "user",
                "content": f"<tool_response>{_joined(message['content'])}</tool_response>",
            }
        if (
            message.get("role") == "user"
            and turns
            and turns[-1].get("role") == "user"
            and (is_result or follows_result)
        ):
            message = {
                **message,
                "content": f"{_joined(turns.pop()['content'])}\n{_joined(message['content'])}",
            }
        turns.append(message)
        follows_result = is_result
    return turns


def joined_templates(by_name: Mapping[Any, Any]) -> str | None:
    """One template of several that have names: `tool_use` where there are tools, `default` where
    there are none."""
    texts = {
        name: text.removesuffix("\n") for name, text in by_name.items() if isinstance(text, str)
    }
    default, tool_use = texts.get("default"), texts.get("tool_use")
    if default is None or tool_use is None or default == tool_use:
        return default if default is not None else tool_use
    return f"{{%- if tools +%}}{tool_use}{{%+ else +%}}{default}{{%+ endif %}}"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """In place of jinja2's, which writes HTML. The order is that of Transformers, for which
    templates are written."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
