"""Messages and tools of a chat, as OpenAI clients send them: what a prompt is made of."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Any, Literal

from pydantic import Field, model_validator

from tidemill.errors import InvalidRequest
from tidemill.server.generation.conversation import template_tools
from tidemill.server.generation.custom_tools import custom_function
from tidemill.server.generation.retention import ANY_MESSAGE, CacheControl, read_mark
from tidemill.server.http.body import Body
from tidemill.server.http.limits import MAX_MESSAGES


class CalledFunction(Body):
    without_effect = frozenset({"parsed_arguments", "provider_specific_fields"})
    name: str = Field(min_length=1, max_length=256)
    arguments: str = "{}"


class CalledCustom(Body):
    name: str = Field(min_length=1, max_length=256)
    input: str


class ToolCall(Body):
    without_effect = frozenset({"index", "provider_specific_fields", "extra_content"})
    id: str = Field(max_length=256)
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def for_template(self) -> dict[str, Any]:
        if self.custom is not None:
            function = {
                "name": self.custom.name,
                "arguments": dumps({"input": self.custom.input}, ensure_ascii=False),
            }
        elif self.function is not None:
            function = self.function.model_dump()
        else:
            raise InvalidRequest(f"A tool call has no {self.type}.", param="messages")
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """A message that a client sends, or that was sent to the client."""

    without_effect = frozenset({
        "annotations", "id", "parsed", "provider_specific_fields", "reasoning_details",
        "thinking_blocks",
    })  # fmt: skip
    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)
    function_call: CalledFunction | None = None  # what tool_calls were before
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same
    refusal: str | None = None
    cache_control: CacheControl | None = None  # Anthropic's; also in parts of the content

    @property
    def mark(self) -> CacheControl | None:
        """The last one in it."""
        parts = (
            [part["cache_control"] for part in self.content if part.get("cache_control")]
            if isinstance(self.content, list)
            else []
        )
        return self.cache_control or (read_mark(parts[-1]) if parts else None)

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates expect. A call of a function before there
        were tools has the function's name for its id."""
        message: dict[str, Any] = {"role": self.role}
        content = (
            [_part(part) for part in self.content]
            if isinstance(self.content, list)
            else self.content
        )
        if content is None and self.refusal is not None:
            content = self.refusal
        calls = [call.for_template() for call in self.tool_calls or []]
        call_id = self.tool_call_id
        if self.function_call is not None:
            calls.append(
                {
                    "id": self.function_call.name,
                    "type": "function",
                    "function": self.function_call.model_dump(),
                }
            )
        if self.role == "function":
            message["role"], call_id = "tool", call_id or self.name
        more = {
            "content": content,
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": call_id,
            "reasoning_content": self.reasoning_content
            if self.reasoning_content is not None
            else self.reasoning,
        }
        return message | {name: value for name, value in more.items() if value is not None}


_NOT_TEXT = {
    "image_url": "Images",
    "input_audio": "Audio",
    "file": "Files",
    "video_url": "Videos",
    "audio_url": "Audio",
}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a message's content. Text and refusals are text; what else there may be is refused
    by the template."""
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    part = {name: value for name, value in part.items() if name != "cache_control"}
    if isinstance(kind, str) and kind in _NOT_TEXT:
        what = f"{_NOT_TEXT[kind]} are not supported (a content part of type {kind!r})."
        raise InvalidRequest(
            what.replace("Audio are", "Audio is"), fix="Send text.", param="messages"
        )
    return part


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _is_one(self) -> CustomFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError(
                "the format of a custom tool is of type text, or of type grammar with the "
                "member grammar"
            )
        return self


class Custom(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> tuple[str | None, str | None]:
        """Its syntax and its text, if it has one."""
        grammar = self.format.grammar if self.format is not None else None
        return (None, None) if grammar is None else (grammar.syntax, grammar.definition)


class Tool(Body):
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Tool:
        if (self.function if self.type == "function" else self.custom) is None:
            raise ValueError(f"a tool of type {self.type} needs the member {self.type}")
        return self

    def as_function(self) -> dict[str, Any]:
        """A custom tool is a function with one string, its input."""
        if self.custom is not None:
            return custom_function(self.custom.name, self.custom.description, *self.custom.grammar)
        assert self.function is not None
        return self.function.model_dump(exclude_none=True)


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function", "custom"] = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def name(self) -> str:
        named = self.function or self.custom
        if named is None:
            raise InvalidRequest("tool_choice names no tool.", param="tool_choice")
        return named.name


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=256)


class AllowedTools(Body):
    """Some of the tools: the others are left out of the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def check_ends(goes_on: bool, begins: bool) -> None:
    """A prompt ends within the last message, or with the beginning of a new one."""
    if goes_on and begins:
        what = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        fix = "The one goes on with the last message, the other begins a new one."
        raise InvalidRequest(what, fix=fix, param="continue_final_message")


class ChatMessages(Body):
    """The parts of a chat request that the prompt is made of."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: Literal["auto", "none", "required"] | AllowedTools | NamedTool | None = None
    functions: list[Function] | None = Field(default=None, max_length=256)  # what tools were before
    function_call: Literal["auto", "none"] | NamedFunction | None = (
        None  # what tool_choice was before
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    chat_template: str | None = Field(default=None, max_length=2**16)  # if the server allows it
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    @model_validator(mode="after")
    def _of_one_age(self) -> ChatMessages:
        if (self.functions or self.function_call) and (self.tools or self.tool_choice):
            raise InvalidRequest(
                "functions are what tools were before.",
                fix="Send tools and tool_choice.",
                param="functions",
            )
        check_ends(
            self.continue_final_message,
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set,
        )
        return self

    @property
    def chosen(self) -> Literal["auto", "none", "required"] | NamedTool:
        """Tells what the model may, must or must not call."""
        if isinstance(self.function_call, NamedFunction):
            return NamedTool(function=self.function_call)
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or self.function_call or "auto"

    def called(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        functions = [tool.as_function() for tool in self.tools or []]
        functions += [function.model_dump(exclude_none=True) for function in self.functions or []]
        if self.chosen == "none":
            return []
        if isinstance(self.tool_choice, AllowedTools):
            names = {tool.name for tool in self.tool_choice.allowed_tools.tools}
            missing = names - {function["name"] for function in functions}
            if missing:
                what = f"tool_choice allows {min(missing)[:100]!r}, which is not among the tools."
                raise InvalidRequest(what, fix="Send it in tools.", param="tool_choice")
            functions = [function for function in functions if function["name"] in names]
        return functions

    def marks(
        self, before: Sequence[dict[str, Any]] = ()
    ) -> list[tuple[str, list[dict[str, Any]] | None]]:
        """The marks of cache_control: the last one with each time to live. `before`: messages of a
        prompt cache."""
        last = {
            tool.cache_control.ttl: 0 for tool in self.tools or () if tool.cache_control
        }  # with each time to live
        last |= {
            message.mark.ttl: i
            for i, message in enumerate(self.messages, 1)
            if message.mark is not None
        }
        return [
            (ttl, self._until(i, before) if i < len(self.messages) else None)
            for ttl, i in last.items()
        ]

    def _until(self, num: int, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first messages; those of the tools alone need some message."""
        return [
            *before,
            *([message.for_template() for message in self.messages[:num]] or [ANY_MESSAGE]),
        ]

    def variables(self) -> dict[str, Any]:
        """The variables of the template. Those that are given by name count first."""
        variables: dict[str, Any] = {}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        return variables | (self.chat_template_kwargs or {})

    def template_options(self) -> dict[str, Any]:
        """Arguments of `Service.encode_chat`."""
        return {
            "tools": template_tools(self.called()),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "variables": self.variables() or None,
            "template": self.chat_template,
        }
