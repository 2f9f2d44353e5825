"""Request bodies of Google's generateContent, with names in camel case or in snake case."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from json import dumps
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import call_grammar
from tidemill.server.generation.prompts import MAX_CHOICES
from tidemill.server.generation.sampling import grammar_of
from tidemill.server.http.body import Body
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.types.sampling import MAX_LOGPROBS, MAX_STOPS, Grammar, SamplingParams, closed

_OBJECT = {"type": "object"}
_SCHEMAS = ("items", "additionalProperties", "anyOf")  # members that are schemas, or lists of them
_NO_SCHEMA = ("propertyOrdering", "nullable", "example")  # members that JSON Schema has not
# Formats of strings that can be enforced. Google's API accepts any other without effect.
_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip
_LISTS = ("contents", "parts", "tools", "function_declarations")
# Google's API takes names of an enumeration in any case, and its examples have both.
_AnyCase = BeforeValidator(lambda name: name.upper() if isinstance(name, str) else name)


class GeminiBody(Body):
    @model_validator(mode="before")
    @classmethod
    def _as_google_reads(cls, body: Any) -> Any:
        """Names in snake case. A single object instead of a list is a list of one."""
        if not isinstance(body, dict):
            return body
        fields, names = dict[str, Any](), _names_of(cls)
        for key, value in body.items():
            name = names.get(str(key), str(key))
            if value is not None:
                fields[name] = [value] if name in _LISTS and isinstance(value, dict) else value
        return fields


@cache
def _names_of(body: type[GeminiBody]) -> dict[str, str]:
    """The names of fields by those in camel case. There may be thousands of small objects."""
    return {to_camel(name): name for name in (*body.model_fields, *body.without_effect)}


class FunctionCall(GeminiBody):
    """A call of a function, or its response."""

    id: str | None = Field(default=None, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    args: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)


class Part(GeminiBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"thought_signature"})
    text: str = ""
    thought: bool = False
    function_call: FunctionCall | None = None
    function_response: FunctionCall | None = None
    inline_data: dict[str, Any] | None = None
    file_data: dict[str, Any] | None = None

    @field_validator("inline_data", "file_data")
    @classmethod
    def _is_text(cls, data: dict[str, Any]) -> None:
        kind = str(data.get("mimeType", data.get("mime_type")))[:60]
        what = f"Pictures, sound and files are not supported (a part of type {kind})."
        raise InvalidRequest(what, fix="Send text.", param="contents")


class Parts(GeminiBody):
    parts: Annotated[list[Part], Field(max_length=MAX_MESSAGES)]

    def text(self, is_thought: bool = False) -> str:
        return "".join(part.text for part in self.parts if part.thought == is_thought)


class Content(Parts):
    role: Literal["user", "model", "function"] = "user"


class SystemInstruction(Parts):
    role: str = "system"  # clients send several


class FunctionDeclaration(GeminiBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"response", "response_json_schema"})
    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _as_json_schema(cls, schema: dict[str, Any]) -> Any:
        return json_schema(schema)  # here, since large bodies are read beside the event loop

    def as_function(self) -> dict[str, Any]:
        parameters = self.parameters_json_schema or self.parameters or {}
        return {"name": self.name, "description": self.description, "parameters": parameters}


class Tool(GeminiBody):
    """Functions, or a tool that runs at Google: refused, unless a model may do without it."""

    without_effect: ClassVar[frozenset[str]] = frozenset({
        "google_search", "google_search_retrieval", "url_context",
    })  # fmt: skip
    function_declarations: list[FunctionDeclaration] = Field(default_factory=list, max_length=256)


class CallingConfig(GeminiBody):
    mode: Annotated[Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"], _AnyCase] = (
        "AUTO"
    )
    allowed_function_names: list[str] | None = Field(default=None, max_length=256)


class ToolConfig(GeminiBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"retrieval_config"})
    function_calling_config: CallingConfig = Field(default_factory=CallingConfig)


class ThinkingConfig(GeminiBody):
    include_thoughts: bool = False
    thinking_budget: int | None = Field(default=None, ge=-1, lt=2**31)  # 0: none; -1: no limit
    thinking_level: Annotated[Literal["MINIMAL", "LOW", "MEDIUM", "HIGH"], _AnyCase] | None = None


class GenerationConfig(GeminiBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"media_resolution"})
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = Field(default=None, allow_inf_nan=False)
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    candidate_count: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_output_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] = Field(default_factory=list, max_length=MAX_STOPS)
    response_logprobs: bool = False
    logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    response_modalities: list[Annotated[Literal["TEXT"], _AnyCase]] | None = Field(
        default=None, max_length=1
    )
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] = "text/plain"
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: ThinkingConfig = Field(default_factory=ThinkingConfig)

    @field_validator("response_schema")
    @classmethod
    def _as_json_schema(cls, schema: dict[str, Any]) -> Any:
        return closed(json_schema(schema))  # here for the same reason

    def grammar(self) -> Grammar | None:
        mime_type = self.response_mime_type
        schema = self.response_json_schema or self.response_schema or {}
        if mime_type == "application/json":
            return grammar_of("json_schema", schema or _OBJECT)
        if mime_type == "text/x.enum":
            return grammar_of("choice", schema.get("enum", []))
        if schema:
            what = "A response schema is without effect on a response of type text/plain."
            fix = "Set responseMimeType to application/json."
            raise InvalidRequest(what, fix=fix, param="response_mime_type")
        return None


class GenerateRequest(GeminiBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"safety_settings", "labels"})
    model: str | None = None  # in the path; some clients repeat it
    contents: list[Content] = Field(min_length=1, max_length=MAX_MESSAGES)
    system_instruction: SystemInstruction | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=256)
    tool_config: ToolConfig = Field(default_factory=ToolConfig)
    generation_config: GenerationConfig = Field(default_factory=GenerationConfig)
    stream: bool = False  # by the path

    def functions(self) -> list[dict[str, Any]]:
        """The functions that the model may call."""
        config = self.tool_config.function_calling_config
        if config.mode == "NONE":
            return []
        declared = [
            declaration.as_function()
            for tool in self.tools
            for declaration in tool.function_declarations
        ]
        allowed = config.allowed_function_names  # without any, all are allowed
        return [function for function in declared if not allowed or function["name"] in allowed]

    @property
    def must_call(self) -> bool:
        return self.tool_config.function_calling_config.mode == "ANY"

    def params(self) -> SamplingParams:
        config, names = self.generation_config, ("temperature", "top_p", "seed")
        values: dict[str, Any] = {
            name: value
            for name in (*names, "presence_penalty", "frequency_penalty")
            if (value := getattr(config, name)) is not None
        }
        if config.top_k is not None:
            values["top_k"] = int(config.top_k)
        if config.response_logprobs:
            values["logprobs"] = config.logprobs
        grammar = config.grammar()
        if self.must_call:
            grammar = call_grammar(self.functions(), None, True)
        limit, stop, num = config.max_output_tokens, config.stop_sequences, config.candidate_count
        return SamplingParams(max_tokens=limit, stop=tuple(stop), n=num, grammar=grammar, **values)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them."""
        system = self.system_instruction.text() if self.system_instruction else ""
        messages = [{"role": "system", "content": system}] if system else []
        open_calls: dict[str, list[str]] = {}  # ids of calls without a response, by the function
        for content in self.contents:
            messages += _turns(content, open_calls, len(messages))
        return messages


class CountRequest(GenerateRequest):
    """A prompt whose tokens are counted: contents alone, or a whole request."""

    contents: list[Content] = Field(default_factory=list, max_length=MAX_MESSAGES)
    generate_content_request: GenerateRequest | None = None


def _turns(
    content: Content, open_calls: dict[str, list[str]], number: int
) -> Iterator[dict[str, Any]]:
    """The messages of one content. Responses of functions are messages of their own. Calls without
    an id get one, and responses without one refer to calls in order."""
    calls = []
    for i, part in enumerate(content.parts):
        if (call := part.function_call) is not None:
            call_id = call.id or f"call{number:03d}{i:02d}"  # some templates want nine characters
            open_calls.setdefault(call.name, []).append(call_id)
            function = {"name": call.name, "arguments": dumps(call.args, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif (response := part.function_response) is not None:
            waiting = open_calls.get(response.name) or [response.id or ""]
            call_id = response.id if response.id in waiting else waiting[0]
            waiting.remove(call_id)
            text = dumps(response.response, ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": call_id, "name": response.name, "content": text}
    text, thought = content.text(), content.text(True)
    if calls or text or thought or not any(part.function_response for part in content.parts):
        role = "assistant" if content.role == "model" else "user"
        message: dict[str, Any] = {"role": role, "content": text}
        message |= {"reasoning_content": thought} if thought else {}
        yield message | ({"tool_calls": calls} if calls else {})


def json_schema(schema: Any) -> Any:
    """A schema of Google's, whose types are in capitals, as JSON Schema."""
    if not isinstance(schema, dict):
        return [json_schema(item) for item in schema] if isinstance(schema, list) else schema
    members = {re.sub(r"_([a-z])", lambda at: at[1].upper(), key): schema[key] for key in schema}
    converted: dict[str, Any] = {}
    for name, value in members.items():
        if name == "properties" and isinstance(value, dict):
            keys = _ordered(value, members.get("propertyOrdering"))
            converted[name] = {key: json_schema(value[key]) for key in keys}
        elif name == "type" and isinstance(value, str):
            converted[name] = value.lower()
        elif re.fullmatch(r"m(in|ax)(Items|Length|Properties)", name) and isinstance(value, str):
            is_number = re.fullmatch("[0-9]{1,19}", value)  # 64 bits are a text
            converted[name] = int(value) if is_number else value
        elif name not in _NO_SCHEMA and (name != "format" or value in _FORMATS):
            converted[name] = json_schema(value) if name in _SCHEMAS else value
    is_nullable = schema.get("nullable") is True
    return {"anyOf": [converted, {"type": "null"}]} if is_nullable else converted


def _ordered(properties: dict[str, Any], first: Any) -> list[str]:
    """The names of properties in the order in which they are written."""
    named = [name for name in first if isinstance(name, str)] if isinstance(first, list) else []
    return [name for name in dict.fromkeys([*named, *properties]) if name in properties]
