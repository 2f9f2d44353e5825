"""Request bodies of Anthropic's Messages API, and their conversation as chat templates expect
it."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import call_grammar
from tidemill.server.generation.conversation import template_tools, with_one_system
from tidemill.server.generation.retention import ANY_MESSAGE, CacheControl
from tidemill.server.http.body import Body
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.types.sampling import Grammar, SamplingParams, closed

_BILLING = (
    "x-anthropic-billing-header:"  # Claude Code's first system block; it changes with each request
)
MAX_MARKS = 4
_MERELY_OFFERED = (
    "web_search_",
    "web_fetch_",
    "tool_search_tool_",
)  # server tools that a model may do without


# ---- content blocks


class TextBlock(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"citations"})
    cache_control: CacheControl | None = None
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: str


class PlainSource(Body):
    type: Literal["text"]
    media_type: str | None = None
    data: str


class ContentSource(Body):
    type: Literal["content"]
    content: str | list[TextBlock]


class DocumentBlock(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"citations"})
    cache_control: CacheControl | None = None
    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        inner = (
            self.source.data if isinstance(self.source, PlainSource) else _text(self.source.content)
        )
        return "\n".join(part for part in (self.title, self.context, inner) if part) + "\n"


class SearchResultBlock(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"citations"})
    cache_control: CacheControl | None = None
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return f"{self.title} ({self.source})\n{_text(self.content)}\n"


class ToolReferenceBlock(Body):
    cache_control: CacheControl | None = None
    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"{self.tool_name}\n"


class OtherBlock(Body):
    """Refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str

    @field_validator("type")
    @classmethod
    def _is_unknown(cls, kind: str) -> str:
        raise ValueError(f"a content block of type {kind[:40]!r} is not supported; send text")


class ToolUseBlock(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset({"caller"})
    cache_control: CacheControl | None = None
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


def _one_of(*kinds: str) -> Discriminator:
    def kind_of(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return kind if kind in kinds else "other"

    return Discriminator(kind_of)


Text = Annotated[TextBlock, Tag("text")]
Document = Annotated[DocumentBlock, Tag("document")]
SearchResult = Annotated[SearchResultBlock, Tag("search_result")]
Other = Annotated[OtherBlock, Tag("other")]
ResultBlock = Annotated[
    Text | Document | SearchResult | Annotated[ToolReferenceBlock, Tag("tool_reference")] | Other,
    _one_of("text", "document", "search_result", "tool_reference"),
]


class ToolResultBlock(Body):
    cache_control: CacheControl | None = None
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Text
    | Document
    | SearchResult
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Other,
    _one_of(
        "text",
        "document",
        "search_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
    ),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# ---- tools


class CustomTool(Body):
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "defer_loading", "eager_input_streaming"}
    )
    cache_control: CacheControl | None = None
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    def function(self) -> dict[str, Any]:
        examples = {"examples": self.input_examples} if self.input_examples else {}
        return {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.input_schema | examples,
        }


class OfferedTool(Body):
    """A tool that runs at Anthropic, or whose schema only its models know: without effect if a
    model may do without it, else refused."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str

    @field_validator("type")
    @classmethod
    def _may_be_left_out(cls, kind: str, info: ValidationInfo) -> str:
        name = next((name for name in _MERELY_OFFERED if kind.startswith(name)), None)
        if name is None:
            raise ValueError(f"a tool of type {kind[:40]!r} cannot run here")
        if info.context is not None:
            info.context.ignored.add(f"tools.{name.rstrip('_')}")
        return kind


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "other"


Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[OfferedTool, Tag("other")],
    Discriminator(_kind),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


# ---- the request


class ThreadUnsupported(InvalidRequest):
    """A request with a thread. On these details Anthropic's clients send the whole conversation
    without one."""

    figures = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}

    def __init__(self) -> None:
        what = (
            "The parameter 'thread' is not supported: this server stores no conversations of "
            "the Messages API."
        )
        super().__init__(what, fix="Send all messages, without thread.", param="thread")


class Thinking(Body):
    """Thinking is ended after `budget_tokens`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(Body):
    """One edit of the context, as clients ask for it. Thinking of earlier turns is left to the chat
    template, so clearing it has no effect."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str

    @field_validator("type")
    @classmethod
    def _clears_thinking(cls, kind: str, info: ValidationInfo) -> str:
        if not kind.startswith("clear_thinking_"):
            raise ValueError(f"an edit of type {kind[:40]!r} is not supported")
        if info.context is not None:
            info.context.ignored.add("context_management.clear_thinking")
        return kind


class ContextManagement(Body):
    edits: list[Edit] | None = Field(default=None, max_length=16)


class Prompt(Body):
    """The parts of a request that the prompt is made of."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"speed", "user_profile_id", "workspace_id"}
    )
    model: str | None = None
    cache_control: CacheControl | None = None  # of the last block
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # beyond Anthropic's
    thread: dict[str, Any] | None = None  # a conversation that the server stores

    @field_validator("thread")
    @classmethod
    def _has_no_threads(cls, _: dict[str, Any]) -> None:
        raise ThreadUnsupported

    @field_validator("mcp_servers")
    @classmethod
    def _none_given(cls, servers: list[Any]) -> list[Any]:
        if servers:
            raise ValueError(
                "this server does not connect to MCP servers; let the client run their tools"
            )
        return servers

    @property
    def num_parts(self) -> int:
        """Messages and blocks."""
        return sum(
            1 + (len(message.content) if isinstance(message.content, list) else 0)
            for message in self.messages
        )

    def conversation(self) -> list[dict[str, Any]]:
        """The conversation in the form that chat templates expect."""
        blocks = (
            [TextBlock(type="text", text=self.system)]
            if isinstance(self.system, str)
            else self.system or []
        )
        texts = [block.text for block in blocks if not block.text.startswith(_BILLING)]
        turns: list[dict[str, Any]] = (
            [{"role": "system", "content": "\n\n".join(texts)}] if any(texts) else []
        )
        for message in self.messages:
            turns += _turns(message)
        return with_one_system(turns)

    def marks(self) -> list[tuple[str, list[dict[str, Any]] | None]]:
        """The marks of cache_control, in the order of the prompt: a time to live, and the
        conversation up to there; None: all of it."""
        tools = [tool.cache_control for tool in self.tools or () if isinstance(tool, CustomTool)]
        system = (
            [block.cache_control for block in self.system] if isinstance(self.system, list) else []
        )
        found: list[tuple[str, int, int] | tuple[str, None, None]] = [
            (mark.ttl, 0, 0) for mark in tools + system if mark
        ]
        for i, message in enumerate(self.messages):
            for j, each in enumerate(message.content if isinstance(message.content, list) else ()):
                if (mark := _mark(each)) is not None:
                    is_last = i + 1 == len(self.messages) and j + 1 == len(message.content)
                    found.append((mark.ttl, None, None) if is_last else (mark.ttl, i, j + 1))
        if len(found) > MAX_MARKS:  # Anthropic's words
            what = (
                f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found "
                f"{len(found)}."
            )
            raise InvalidRequest(what, param="cache_control")
        if self.cache_control is not None:
            found.append((self.cache_control.ttl, None, None))
        return [(ttl, None if i is None or j is None else self._until(i, j)) for ttl, i, j in found]

    def _until(self, message: int, num_blocks: int) -> list[dict[str, Any]]:
        """The conversation up to so many blocks of a message; up to the messages if it is none."""
        if not num_blocks:
            blocks = [Message(role="user", content=ANY_MESSAGE["content"])]
        else:
            last = self.messages[message]
            blocks = [
                *self.messages[:message],
                last.model_copy(update={"content": last.content[:num_blocks]}),
            ]
        return self.model_copy(update={"messages": blocks}).conversation()

    @property
    def looks_for_calls(self) -> bool:
        return bool(self.functions()) and not (self.tool_choice and self.tool_choice.type == "none")

    @property
    def effort(self) -> str | None:
        return self.output_config.effort if self.output_config else None

    @property
    def thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.type != "disabled"

    def functions(self) -> list[dict[str, Any]]:
        return [tool.function() for tool in self.tools or [] if isinstance(tool, CustomTool)]

    def template_options(self, conversation: list[dict[str, Any]]) -> dict[str, Any]:
        """Arguments of `Service.encode_chat`."""
        tools = template_tools(self.functions()) if self.looks_for_calls else None
        return {"tools": tools, "continue_final_message": bool(_continued(conversation))}

    def continued(self) -> str:
        """The text that the output continues."""
        return _continued(_turns(self.messages[-1]))


def _continued(conversation: list[dict[str, Any]]) -> str:
    last = conversation[-1]
    return last["content"] if last["role"] == "assistant" and "tool_calls" not in last else ""


class MessagesRequest(Prompt):
    without_effect: ClassVar[frozenset[str]] = Prompt.without_effect | {
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
    }
    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    cache_salt: str | None = Field(
        default=None, max_length=256
    )  # vLLM's: the prefix cache is separate for each salt

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def params(self) -> SamplingParams:
        params: dict[str, Any] = {"max_tokens": self.max_tokens}
        for field in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, field)) is not None:
                params[field] = value
        if self.stop_sequences:
            params["stop"] = tuple(self.stop_sequences)
        choice = self.tool_choice
        wanted = (self.output_config.format if self.output_config else None) or self.output_format
        if choice is not None and self.must_call:
            name = choice.name or "" if choice.type == "tool" else None
            several = name is None and not choice.disable_parallel_tool_use
            params["grammar"] = call_grammar(self.functions(), name, several)
        elif wanted is not None:
            params["grammar"] = Grammar("json_schema", json.dumps(closed(wanted.schema_)))
        return SamplingParams(**params)


class CountRequest(Prompt):
    """Counts the tokens of a prompt. Clients send the whole request whose prompt it is."""

    without_effect: ClassVar[frozenset[str]] = MessagesRequest.without_effect | (
        MessagesRequest.model_fields.keys() - Prompt.model_fields.keys()
    )


def _mark(block: Any) -> CacheControl | None:
    """The mark of a block, or of the last block inside it that has one."""
    fields = vars(block)  # there may be thousands of blocks, and few have these fields
    inner = fields.get("content")
    marks = (
        [block.cache_control for block in inner if block.cache_control]
        if isinstance(inner, list)
        else []
    )
    return fields.get("cache_control") or (marks[-1] if marks else None)


def _text(content: Any) -> str:
    return (
        content or "" if not isinstance(content, list) else "".join(block.text for block in content)
    )


def _turns(message: Message) -> list[dict[str, Any]]:
    """Tool results become messages of their own; calls and thinking are part of the assistant's
    message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turns: list[dict[str, Any]] = []
    text, thinking, calls = "", "", []
    for block in message.content:
        if message.role == "system" and not isinstance(block, TextBlock):
            raise InvalidRequest("A system message holds text blocks only.", param="messages")
        if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            thinking += block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {
                "name": block.name,
                "arguments": json.dumps(block.input, ensure_ascii=False),
            }
            calls.append({"id": _call_id(block.id), "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            result = ("Error: " if block.is_error else "") + _text(block.content)
            turns.append(
                {"role": "tool", "tool_call_id": _call_id(block.tool_use_id), "content": result}
            )
    if text or calls or not turns:
        whole: dict[str, Any] = {"role": message.role, "content": text}
        turns.append(
            whole
            | ({"reasoning_content": thinking} if thinking else {})
            | ({"tool_calls": calls} if calls else {})
        )
    return turns


def _call_id(tool_use_id: str) -> str:
    """The id of a call in the form that the model's template knows."""
    return tool_use_id.removeprefix("toolu_")
