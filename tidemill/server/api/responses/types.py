"""Request bodies of the Responses API: parameters, tools, and input items as the messages of a chat
template."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import call_grammar
from tidemill.server.generation.custom_tools import check_forced, custom_function
from tidemill.server.generation.retention import MAX_KEY_CHARS, Retention
from tidemill.server.generation.sampling import biases
from tidemill.server.http.access import LEAST_URGENT, MOST_URGENT
from tidemill.server.http.body import Body
from tidemill.server.http.context import ID_PATTERN
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.types.sampling import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOPS,
    Grammar,
    SamplingParams,
    closed,
)

MAX_REFERENCES = 128  # to stored items, in one request
# Tools that run at OpenAI or in a client's program, and that a model may do without.
_MERELY_OFFERED = frozenset(
    {"web_search", "web_search_preview", "local_shell", "image_generation", "tool_search"}
)
_DEFAULT_NAMESPACE = "functions"
_LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # of reasoning items, which carry their text here
    # Of items that do not occur here.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
Metadata = Annotated[dict[str, str], Field(max_length=16)]


def make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# ---- tools


class FunctionTool(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "defer_loading", "output_schema"}
    )
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "defer_loading"})
    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> tuple[str | None, str | None]:
        """Its syntax and its text, if it has one."""
        has_one = self.format is not None and self.format.type == "grammar"
        return (
            (self.format.syntax, self.format.definition)
            if self.format and has_one
            else (None, None)
        )


class NamespaceTool(Body):
    """Functions of one source, such as an MCP server that the client is connected to."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(
        max_length=256
    )


class OfferedTool(Body):
    """A tool that cannot run here: without effect if the model merely cannot use it, else
    refused."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str

    @field_validator("type")
    @classmethod
    def _may_be_left_out(cls, kind: str, info: ValidationInfo) -> str:
        name = "web_search_preview" if kind.startswith("web_search_preview_") else kind
        if name not in _MERELY_OFFERED:
            raise ValueError(f"a tool of type {kind[:40]!r} cannot run here")
        if info.context is not None:
            info.context.ignored.add(f"tools.{name}")
        return name


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "other"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OfferedTool, Tag("other")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model may call, and how the client calls it."""

    seen_name: str  # by the model
    name: str
    namespace: str | None
    description: str | None
    parameters: dict[str, Any] | None
    custom: CustomTool | None = None

    def function(self) -> dict[str, Any]:
        function = {
            "name": self.seen_name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {name: value for name, value in function.items() if value is not None}


def seen_name(name: str, namespace: str | None) -> str:
    return name if namespace in (None, "", _DEFAULT_NAMESPACE) else f"{namespace}__{name}"


def _callable_tool(tool: FunctionTool | CustomTool, namespace: str | None = None) -> CallableTool:
    seen = seen_name(tool.name, namespace)
    if isinstance(tool, FunctionTool):
        return CallableTool(seen, tool.name, namespace, tool.description, tool.parameters)
    function = custom_function(seen, tool.description, *tool.grammar)
    return CallableTool(
        seen, tool.name, namespace, function.get("description"), function["parameters"], tool
    )


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(max_length=256)

    def names(self) -> set[str]:
        return {name for tool in self.tools if isinstance(name := tool.get("name"), str)}


# ---- the request


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    format: TextFormat | None = None


class Reasoning(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ConversationName(Body):
    id: str = Field(max_length=128)


class ResponsePrompt(Body):
    """The parts of a request that the prompt is made of."""

    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    conversation: Annotated[str, Field(max_length=128)] | ConversationName | None = None
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationName)
            else self.conversation
        )

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        return (
            choice == "required"
            or isinstance(choice, NamedTool)
            or (isinstance(choice, AllowedTools) and choice.mode == "required")
        )

    def callable_tools(self) -> list[CallableTool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        tools: list[CallableTool] = []
        for tool in self.tools or []:
            if isinstance(tool, FunctionTool | CustomTool):
                tools.append(_callable_tool(tool))
            elif isinstance(tool, NamespaceTool):
                tools += [_callable_tool(member, tool.name) for member in tool.tools]
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.names()
            tools = [
                member for member in tools if member.name in allowed or member.seen_name in allowed
            ]
        return tools

    def new_items(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []


class ResponseRequest(ResponsePrompt):
    without_effect: ClassVar[frozenset[str]] = frozenset({
        "client_metadata", "max_tool_calls", "prompt_cache_options", "safety_identifier",
        "service_tier", "session_id",
        "stream_options", "user",
    })  # fmt: skip
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = Field(default=None, max_length=64)
    stream: bool | None = False
    background: bool | None = None
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_KEY_CHARS)
    prompt_cache_retention: Retention | None = None
    store: bool | None = True
    metadata: Metadata | None = None
    # Beyond OpenAI's, under the names other engines use.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIASES)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(
        default=None, max_length=256
    )  # the prefix cache is separate for each salt
    priority: int | None = Field(default=None, ge=MOST_URGENT, le=LEAST_URGENT)  # None: the key's
    request_id: str | None = Field(default=None, pattern=ID_PATTERN)  # a label, as X-Request-Id
    kv_policy: str | dict[str, Any] | None = (
        None  # which tokens stay in the KV cache, such as {"kind": "streaming"}
    )
    timings_per_token: bool = False  # llama.cpp's times, in each delta and at the end
    return_progress: bool = (
        False  # llama.cpp's: events that tell how much of the prompt is computed
    )
    enable_response_messages: bool = False  # vLLM's: return prompt and output as texts and tokens

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def params(self) -> SamplingParams:
        params: dict[str, Any] = {"max_tokens": self.max_output_tokens}
        names = (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed",
            "stop", "kv_policy", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        )  # fmt: skip
        params |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            params["logit_bias"] = biases(self.logit_bias)
        if self.wants_logprobs:
            params["logprobs"] = self.top_logprobs or 0
        wanted = self.text.format if self.text else None
        if self.must_call:
            params["grammar"] = self._call_grammar()
        elif wanted is not None and wanted.type == "json_object":
            params["grammar"] = Grammar("json_schema", '{"type": "object"}')
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise InvalidRequest("A text format json_schema needs a schema.", param="text")
            schema = closed(wanted.schema_) if wanted.strict else wanted.schema_
            params["grammar"] = Grammar("json_schema", json.dumps(schema))
        return SamplingParams(**params)

    def _call_grammar(self) -> Grammar:
        choice = self.tool_choice
        name = seen_name(choice.name, choice.namespace) if isinstance(choice, NamedTool) else None
        callable_tools = self.callable_tools()
        for tool in callable_tools:
            if tool.custom is not None and name in (None, tool.seen_name):
                check_forced(tool.name, *tool.custom.grammar)
        several = name is None and self.parallel_tool_calls is not False
        return call_grammar([tool.function() for tool in callable_tools], name, several)


class CountRequest(ResponseRequest):
    """Counts the tokens of a prompt. Clients send the whole request whose prompt it is."""

    without_effect: ClassVar[frozenset[str]] = ResponseRequest.without_effect | {"personality"}


# ---- items


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a conversation as chat templates expect them. What else the items carry (ids,
    status, annotations, phase) is not part of the prompt."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning += _reasoning_text(item)
            continue
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            message: dict[str, Any] = {"role": role, "content": text_of(item.get("content"))}
        elif (call := _call_of(kind, item)) is not None:
            if messages and messages[-1]["role"] == "assistant" and not reasoning:
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind in ("function_call_output", "custom_tool_call_output") and "output" in item:
            message = {
                "role": "tool",
                "tool_call_id": str(item.get("call_id") or ""),
                "content": text_of(item["output"]),
            }
        else:
            raise InvalidRequest(
                f"An input item of type {str(kind)[:40]!r} is not supported, or lacks a field.",
                param="input",
            )
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        messages.append(message)
    return messages


def _call_of(kind: Any, item: dict[str, Any]) -> dict[str, Any] | None:
    """A call of a function or of a custom tool, as part of the assistant's message."""
    name, namespace = item.get("name"), item.get("namespace")
    call_input = item.get(
        {"function_call": "arguments", "custom_tool_call": "input"}.get(str(kind), "")
    )
    if (
        not isinstance(name, str)
        or not isinstance(call_input, str)
        or not isinstance(namespace, str | None)
    ):
        return None
    arguments = (
        call_input
        if kind == "function_call"
        else json.dumps({"input": call_input}, ensure_ascii=False)
    )
    function = {"name": seen_name(name, namespace), "arguments": arguments}
    return {"id": str(item.get("call_id") or ""), "type": "function", "function": function}


def _reasoning_text(item: dict[str, Any]) -> str:
    """The reasoning that the model itself wrote. A summary is not part of the prompt."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise InvalidRequest("The content of a reasoning item is a list.", param="input")
    return "".join(
        part["text"]
        for part in content
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        name = "refusal" if kind == "refusal" else "text"
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(
            part.get(name), str
        ):
            raise InvalidRequest(
                f"A content part of type {str(kind)[:40]!r} is not supported.",
                fix="Send text.",
                param="input",
            )
        texts.append(part[name])
    return "".join(texts)


def is_reference(item: dict[str, Any]) -> bool:
    """{"type": "item_reference", "id": ...}; the type may be left out."""
    is_bare = item.get("type") is None and item.keys() <= {"id", "type"}
    return isinstance(item.get("id"), str) and (is_bare or item.get("type") == "item_reference")


_ITEM_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call":
    "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs",
}  # fmt: skip


def stored_item(item: dict[str, Any]) -> dict[str, Any]:
    """An input item as it is listed later: with an id, a status, and a list of parts."""
    kind = item.get("type") or "message"
    stored = {
        "type": kind,
        "id": make_id(_ITEM_PREFIXES.get(str(kind), "item")),
        "status": "completed",
    }
    stored |= {name: value for name, value in item.items() if value is not None}
    if kind == "message" and isinstance(stored.get("content"), str):
        part = {"type": "input_text", "text": stored["content"]}
        if stored.get("role") == "assistant":
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        stored["content"] = [part]
    return stored
