"""Request bodies of the OpenAI API. Unknown parameters are refused by name; values are checked by SamplingParams."""

from __future__ import annotations

from json import dumps
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import call_grammar
from tidemill.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_N, MAX_STOPS, Grammar, SamplingParams
from tidemill.server.body import Body
from tidemill.server.call import ID_PATTERN
from tidemill.server.guard import LEAST_URGENT, MOST_URGENT

MAX_CHOICES = 256  # prompts times samples of one request
MAX_MESSAGES = 2**14
_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
PromptField = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]})]


class StreamOptions(Body):
    include_usage: bool | None = False


class StructuredOutputs(Body):
    """Exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def to_grammar(self) -> Grammar:
        given = [(kind, value) for kind in ("json_", "regex", "grammar", "choice") if (value := getattr(self, kind)) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs takes exactly one of json, regex, grammar and choice.", param="structured_outputs"
            )
        ((kind, value),) = given
        text = value if isinstance(value, str) else dumps(value)
        return Grammar("json_schema" if kind == "json_" else kind, text)


class JSONSchemaFormat(Body):
    name: str = Field(default="response", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    def to_grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_schema", '{"type": "object"}')
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequest("response_format json_schema needs a schema.", param="response_format")
        return Grammar("json_schema", dumps(self.json_schema.schema_))


class SamplingRequest(Body):
    """The parameters that completions and chat share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIASES)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    user: str | None = Field(default=None, max_length=1024)  # for the caller's own records
    # Beyond OpenAI's, under the names other engines use.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=256)  # the prefix cache is separate for each salt
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    timings: bool = False  # report where the time went
    request_id: str | None = Field(default=None, pattern=ID_PATTERN)  # as X-Request-Id
    priority: int | None = Field(default=None, ge=MOST_URGENT, le=LEAST_URGENT)  # None: the key's
    timeout: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)  # seconds until the request must be complete

    def sampling(self, **more: Any) -> SamplingParams:
        """Parameters not given keep the defaults of SamplingParams."""
        names = (
            "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p", "typical_p",
            "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        if self.prompt_logprobs is not None:
            given["prompt_logprobs"] = self.prompt_logprobs
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream.", param="stream_options")
        if self.structured_outputs is not None and self.response_format is not None:
            raise InvalidRequest(
                "structured_outputs and response_format are both given.", fix="Give one.", param="response_format"
            )
        if self.structured_outputs is not None:
            given["grammar"] = self.structured_outputs.to_grammar()
        elif self.response_format is not None:
            given["grammar"] = self.response_format.to_grammar()
        return SamplingParams(**given | more)


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise InvalidRequest(f"logit_bias is keyed by token ids; got {text[:40]!r}.", param="logit_bias")
    return int(text)


class CompletionRequest(SamplingRequest):
    prompt: PromptField  # checked below: a union would try every kind on every entry
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)

    def params(self) -> SamplingParams:
        """Of the samples that are generated: best_of, of which n are returned."""
        more: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1  # whose token is not returned
        if self.best_of is not None and self.best_of != (self.n or 1):
            if self.best_of < (self.n or 1):
                raise InvalidRequest(f"best_of is {self.best_of}, less than n.", param="best_of")
            if self.stream:
                raise InvalidRequest("best_of cannot be streamed: the best sample is known only at the end.", param="best_of")
            more |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        return self.sampling(**more)

    @field_validator("prompt")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> Any:
        return one_kind(prompt)


def one_kind(prompt: Any) -> Any:
    """A text or token ids, or a list of either. The engine checks that the model has the tokens."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > MAX_CHOICES:
        raise ValueError(f"{len(prompt)} prompts in one request; at most {MAX_CHOICES}")
    if isinstance(prompt, list) and (all(isinstance(one, str) for one in prompt) or all(map(_is_ids, prompt))):
        return prompt
    raise ValueError("it must be a text, a list of texts, a list of token ids, or a list of such lists")


def _is_ids(value: Any) -> bool:
    """There may be millions, so without a Python loop."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= -(2**63) and max(value) < 2**63)


class CalledFunction(Body):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Body):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    refusal: None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatMessages(Body):
    """What the prompt is made of."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def how(self) -> dict[str, Any]:
        """For the template."""
        given = [tool.model_dump(exclude_none=True) for tool in self.tools or []] if self.tool_choice != "none" else []
        return {
            "tools": given or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "variables": self.chat_template_kwargs,
        }


class ChatRequest(SamplingRequest, ChatMessages):
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None

    @property
    def looks_for_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def functions(self) -> list[dict[str, Any]]:
        """What the model may call."""
        return [tool.function.model_dump(exclude_none=True) for tool in self.tools or []] if self.looks_for_calls else []

    @property
    def continued(self) -> str:
        """The text that the output continues."""
        content = self.messages[-1].content if self.continue_final_message else None
        return content if isinstance(content, str) else ""

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ.", fix="Give one.", param="max_tokens")
        more: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        more["max_tokens"] = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.must_call:
            more["grammar"] = self._call_grammar()
        return self.sampling(**more)

    def _call_grammar(self) -> Grammar:
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        grammar = call_grammar(self.functions(), name, several=name is None and self.parallel_tool_calls is not False)
        if self.response_format is not None or self.structured_outputs is not None:
            raise InvalidRequest(
                "tool_choice forces a tool call, so that there can be no other structured output.",
                fix="Give one.",
                param="tool_choice",
            )
        return grammar


class EmbeddingRequest(Body):
    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] = "mean"
    user: str | None = Field(default=None, max_length=1024)

    @field_validator("input")
    @classmethod
    def _of_one_kind(cls, given: Any) -> Any:
        return one_kind(given)


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int] = Field(max_length=2**20)
