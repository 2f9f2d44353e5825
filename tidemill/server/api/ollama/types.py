"""Request bodies of Ollama's API, and what they are in the OpenAI API."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.request import UNLIMITED
from tidemill.server.generation.sampling import grammar_of
from tidemill.server.http.body import Body
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.types.sampling import MAX_LOGPROBS

_MAX_CONTEXT_IDS = 2**20
_MAX_INPUTS = 2048


class OllamaBody(Body):
    """Ollama drops fields that it does not know, and its clients send some with every call."""

    ignores_unknown = True


class Options(sampling_aliases.Options):
    ignores_unknown = True
    without_effect: ClassVar[frozenset[str]] = sampling_aliases.Options.without_effect | {
        "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
        "f16_kv", "logits_all",
        "vocab_only", "use_mmap", "use_mlock", "embedding_only", "draft_num_predict",
    }  # fmt: skip

    num_predict: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """None: the server's default."""
        num = self.num_predict
        return UNLIMITED if num is not None and num <= 0 else num


class ModelBody(OllamaBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"keep_alive", "verbose", "insecure"})

    model: str = Field(default="", max_length=1024)


class Show(ModelBody):
    name: str = Field(default="", max_length=1024)  # as older clients say


class OllamaRequest(ModelBody):
    """The fields that chat and generate share."""

    without_effect: ClassVar[frozenset[str]] = ModelBody.without_effect | {"shift", "truncate"}

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Field(default_factory=Options)
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)

    def sampling(self) -> dict[str, Any]:
        """The options that are given, as arguments of SamplingParams."""
        schema = {"type": "object"} if self.format == "json" else self.format
        grammar = {"grammar": grammar_of("json_schema", schema)} if schema else {}
        return self.options.sampling() | grammar


class CalledFunction(OllamaBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"index"})

    name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(OllamaBody):
    without_effect: ClassVar[frozenset[str]] = frozenset({"type"})

    id: str | None = Field(default=None, max_length=256)
    function: CalledFunction


class ChatMessage(OllamaBody):
    role: str = Field(min_length=1, max_length=64)
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=256)
    tool_name: str | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)


class Function(OllamaBody):
    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(OllamaBody):
    type: Literal["function"] = "function"
    function: Function

    def as_function(self) -> dict[str, Any]:
        return self.function.model_dump(exclude_none=True)


class Chat(OllamaRequest):
    messages: list[ChatMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=256)


class Generate(OllamaRequest):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        default=None, max_length=_MAX_CONTEXT_IDS
    )
    raw: bool = False
    images: list[Any] | None = None

    def check(self) -> None:
        _no_images(self.images)
        if self.template:
            raise InvalidRequest(
                "template is not supported: the model's own chat template is used.",
                fix="Send the whole prompt as it should be, with raw.",
                param="template",
            )
        if (self.raw or self.suffix) and (self.system or self.context):
            raise InvalidRequest(
                "With raw or suffix there can be no system and no context.",
                fix="Leave them out.",
                param="raw",
            )


class Embed(ModelBody):
    input: str | Annotated[list[str], Field(max_length=_MAX_INPUTS)]
    truncate: bool = True
    dimensions: int | None = None
    options: Options = Field(default_factory=Options)


class Embeddings(ModelBody):
    prompt: str = ""
    options: Options = Field(default_factory=Options)


class Pull(Show):
    stream: bool = True


def _no_images(images: list[Any] | None) -> None:
    if images:
        raise InvalidRequest(
            "images are not supported: the model reads text only.",
            fix="Leave them out.",
            param="images",
        )


def conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation in the form of the OpenAI API. Calls without an id get one, and results
    refer to them by name, or in order."""
    turns: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in messages:
        _no_images(message.images)
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls, waiting = [], []  # results come right after their calls
            for call in message.tool_calls:
                num_calls += 1
                call_id = (
                    call.id or f"call{num_calls:05d}"
                )  # nine characters, as some templates demand
                waiting.append((call_id, call.function.name))
                function = {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                }
                calls.append({"id": call_id, "type": "function", "function": function})
            turn["tool_calls"] = calls
        if message.role == "tool":
            turn |= _result_of(message, waiting)
        turns.append(turn)
    return turns


def _result_of(message: ChatMessage, waiting: list[tuple[str, str]]) -> dict[str, str]:
    """The name and id of the call that a result belongs to."""
    mine = [
        call for call in waiting if call[0] == message.tool_call_id or call[1] == message.tool_name
    ] or waiting[:1]
    if mine:
        waiting.remove(mine[0])
    reference = {
        "tool_call_id": message.tool_call_id or (mine[0][0] if mine else ""),
        "name": message.tool_name or "",
    }
    return {name: value for name, value in reference.items() if value}
