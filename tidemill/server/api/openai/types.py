"""Request bodies of the OpenAI API, with the extensions of vLLM, SGLang and llama.cpp; values are
checked by SamplingParams."""

from __future__ import annotations

from json import dumps
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import call_grammar
from tidemill.server.api.openai.messages import ChatMessages, Message, NamedTool, Tool, check_ends
from tidemill.server.generation.custom_tools import check_forced
from tidemill.server.generation.prompts import MAX_INPUTS, PromptField, one_kind
from tidemill.server.generation.retention import MAX_KEY_CHARS, Retention
from tidemill.server.generation.sampling import NEUTRAL, as_tuple, biases, grammar_of
from tidemill.server.generation.vectors import EmbedDType, Endianness
from tidemill.server.http.access import LEAST_URGENT, MOST_URGENT
from tidemill.server.http.body import Body
from tidemill.server.http.context import ID_PATTERN
from tidemill.server.http.limits import MAX_MESSAGES
from tidemill.types.sampling import (
    INTEGERS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BEAMS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    Beams,
    Grammar,
    SamplingParams,
    closed,
)

BadWord = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Body):
    without_effect = frozenset({"include_obfuscation"})
    include_usage: bool | None = False
    continuous_usage_stats: bool = False  # the usage so far in every chunk


class StructuredOutputs(Body):
    """Exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: dict[str, Any] | str | None = None

    def to_grammar(self) -> Grammar:
        kinds = ("json_", "regex", "grammar", "choice", "structural_tag")
        grammars = [(kind, value) for kind in kinds if (value := getattr(self, kind)) is not None]
        if len(grammars) != 1:
            raise InvalidRequest(
                "structured_outputs takes exactly one of json, regex, grammar, choice and "
                "structural_tag.",
                param="structured_outputs",
            )
        ((kind, value),) = grammars
        return grammar_of("json_schema" if kind == "json_" else kind, value)


class JSONSchemaFormat(Body):
    name: str = Field(default="response", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag; or structures and triggers
    structures: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    triggers: list[str] | None = Field(default=None, max_length=256)
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema"
    )  # llama.cpp's place for it

    def to_grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            names = ("type", "format", "structures", "triggers")
            return grammar_of(
                "structural_tag",
                {name: value for name in names if (value := getattr(self, name)) is not None},
            )
        schema = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        if self.json_schema is not None and self.json_schema.strict:
            schema = closed(schema)
        if schema is None and self.type == "json_schema":
            raise InvalidRequest(
                "response_format json_schema needs a schema.", param="response_format"
            )
        return Grammar("json_schema", dumps({"type": "object"} if schema is None else schema))


# What else asks for structured output: the parameter and the kind of grammar. Names of vLLM, SGLang
# and llama.cpp.
_GRAMMARS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_BUDGETS = {
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
}  # a chat's may lift the server's limit
# The same parameter under names of SGLang and llama.cpp.
_ALIASES = {"rid": "request_id", "extra_key": "cache_salt", "n_cmpl": "n"}


class SamplingRequest(Body):
    """The parameters that completions and chat share."""

    without_effect = frozenset({
        # OpenAI
        "metadata", "prediction", "prompt_cache_options", "safety_identifier", "service_tier",
        "store", "user", "verbosity",
        # llama.cpp, vLLM: which slot or library does it; prefixes are always cached; contexts are
        # not shifted
        "cache_prompt", "guided_decoding_backend", "id_slot", "n_cache_reuse", "n_discard",
        "n_keep", "backend_sampling",
        "session_id", "stream_interval", "sse_ping_interval", "speculative.n_max",
        "speculative.n_min", "speculative.p_min",
        # what refines a sampler of llama.cpp that is off
        "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent",
        "mirostat_eta", "mirostat_tau", "xtc_threshold",
        # SGLang: which replica does it
        "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank",
    })  # fmt: skip

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIASES)
    seed: int | None = Field(default=None, ge=INTEGERS["seed"][0], le=INTEGERS["seed"][1])
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    # Beyond OpenAI's, under the names other engines use.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # the same
    repeat_last_n: int | None = Field(
        default=None, ge=-1
    )  # how many of the latest tokens penalties count; -1: all
    min_tokens: int | None = None
    n_predict: int | None = Field(
        default=None, ge=-1
    )  # llama.cpp's max_tokens; -1: up to the end of the context
    stop_regex: str | Annotated[list[str], Field(max_length=MAX_STOP_REGEXES)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=256)
    allowed_token_ids: list[int] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED_TOKENS
    )
    bad_words: list[BadWord] | None = Field(default=None, max_length=MAX_BAD_WORDS // 2)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1
    )  # keep this many of the prompt's last tokens
    truncation_side: Literal["left", "right"] | None = None  # which end is cut off; None: the left
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in logprobs
    cache_salt: str | None = Field(
        default=None, max_length=256
    )  # the prefix cache is separate for each salt
    kv_policy: str | dict[str, Any] | None = (
        None  # which tokens stay in the KV cache, such as {"kind": "streaming"}
    )
    prompt_cache_key: str | None = Field(
        default=None, max_length=MAX_KEY_CHARS
    )  # of the requests with it, the latest is retained
    prompt_cache_retention: Retention | None = None  # for how long
    prompt_cache: str | None = Field(
        default=None, pattern=ID_PATTERN
    )  # a named one, that the prompt continues
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = Field(
        default=None, min_length=1, max_length=MAX_LOGPROB_IDS
    )  # instead of the likeliest
    use_beam_search: bool | None = None
    best_of: int | None = Field(
        default=None, ge=1, le=MAX_N
    )  # of which n are returned: samples, or beams
    length_penalty: float | None = None  # of beam search
    early_stopping: bool | Literal["never"] | None = None  # of beam search
    num_beam_groups: int | None = None  # of beam search
    diversity_penalty: float | None = None  # of beam search
    timings: bool = False  # report where the time went
    timings_per_token: bool = False  # in each chunk
    return_progress: bool = False  # of the prompt, in chunks before the first token
    verbose: bool = False  # return the prompt as __verbose
    request_id: str | None = Field(default=None, pattern=ID_PATTERN)  # a label, as X-Request-Id
    priority: int | None = Field(default=None, ge=MOST_URGENT, le=LEAST_URGENT)  # None: the key's
    timeout: float | None = Field(
        default=None, gt=0, le=86400, allow_inf_nan=False
    )  # seconds until the request must be complete

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any, info: ValidationInfo) -> Any:
        """A parameter at a value that changes nothing is dropped."""
        if not isinstance(fields, dict):
            return fields
        neutral = NEUTRAL.keys() - (_BUDGETS & cls.model_fields.keys())
        dropped = {name for name in fields.keys() & neutral if fields[name] in NEUTRAL[name]}
        if info.context is not None:
            info.context.ignored.update(dropped)
        kept = {name: value for name, value in fields.items() if name not in dropped}
        for alias in kept.keys() & _ALIASES.keys():
            value, name = kept.pop(alias), _ALIASES[alias]
            if value is not None and kept.get(name) not in (None, value):
                raise InvalidRequest(f"{name} and {alias} differ.", fix="Give one.", param=alias)
            kept[name] = kept.get(name) if value is None else value
        return kept

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return (
            options is not None and bool(options.include_usage) and options.continuous_usage_stats
        )

    def most_tokens(self, max_tokens: int | None) -> int | None:
        """`max_tokens`: as given."""
        if self.n_predict is None or self.n_predict == max_tokens:
            return max_tokens
        if max_tokens is not None and self.model_fields_set & {
            "max_tokens",
            "max_completion_tokens",
        }:
            raise InvalidRequest(
                "max_tokens and n_predict differ.", fix="Give one.", param="n_predict"
            )
        return None if self.n_predict == -1 else self.n_predict

    def sampling(self, **more: Any) -> SamplingParams:
        """Parameters not given keep the defaults of SamplingParams."""
        names = (
            "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k",
            "min_p", "typical_p",
            "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output",
            "skip_special_tokens",
            "prompt_logprobs", "kv_policy",
        )  # fmt: skip
        params = {name: value for name in names if (value := getattr(self, name)) is not None}
        if (
            self.repeat_penalty is not None
            and params.setdefault("repetition_penalty", self.repeat_penalty) != self.repeat_penalty
        ):
            raise InvalidRequest(
                "repetition_penalty and repeat_penalty differ.",
                fix="Give one.",
                param="repeat_penalty",
            )
        if self.stop is not None:
            params["stop"] = as_tuple(self.stop)
        for name in ("stop_regex", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                params[name] = as_tuple(value)
        if self.repeat_last_n is not None:
            params["penalty_window"] = self.repeat_last_n
        if self.logprob_token_ids is not None and more.get("logprobs") is None:
            what = (
                "logprob_token_ids is only allowed with logprobs, and where tokens are generated."
            )
            raise InvalidRequest(what, param="logprob_token_ids")
        if self.logit_bias is not None:
            params["logit_bias"] = biases(self.logit_bias)
        if "grammar" not in more:
            params["grammar"] = self._asked_grammar()
        return SamplingParams(**params | more, beams=self._beams())

    def _beams(self) -> Beams | None:
        """Their number is best_of, or n."""
        if not self.use_beam_search:
            own = (
                ("length_penalty", 1),
                ("early_stopping", False),
                ("num_beam_groups", 1),
                ("diversity_penalty", 0),
            )
            for name, neutral in own:
                if getattr(self, name) not in (None, neutral):
                    raise InvalidRequest(
                        f"{name} is only allowed with use_beam_search.", param=name
                    )
            return None
        if self.stream:
            raise InvalidRequest(
                "use_beam_search cannot be streamed: the beams are known only at the end.",
                param="stream",
            )
        width, name = (self.n or 1, "n") if self.best_of is None else (self.best_of, "best_of")
        if width < (self.n or 1):
            raise InvalidRequest(f"best_of is {width}, less than n.", param="best_of")
        if width > MAX_BEAMS:
            raise InvalidRequest(
                f"{name} is {width}; a beam search has at most {MAX_BEAMS} beams.", param=name
            )
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        groups = 1 if self.num_beam_groups is None else self.num_beam_groups
        return Beams(
            width, penalty, self.early_stopping or False, groups, self.diversity_penalty or 0.0
        )

    def _asked_grammar(self) -> Grammar | None:
        names = [
            name
            for name in ("structured_outputs", "response_format", *_GRAMMARS)
            if getattr(self, name) is not None
        ]
        if (
            "response_format" in names
            and self.response_format is not None
            and self.response_format.type == "text"
        ):
            names.remove("response_format")
        if not names:
            return None
        if len(names) > 1:
            raise InvalidRequest(
                f"{names[0]} and {names[1]} are both given.", fix="Give one.", param=names[-1]
            )
        value = getattr(self, names[0])
        if isinstance(value, StructuredOutputs | ResponseFormat):
            return value.to_grammar()
        return grammar_of(_GRAMMARS[names[0]], value)


class CompletionRequest(SamplingRequest):
    prompt: PromptField  # checked below: a union would try every kind on every entry
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    suffix: str | None = None  # the output comes before it

    def params(self) -> SamplingParams:
        """The parameters of the samples that are generated: best_of, of which n are returned."""
        more: dict[str, Any] = {
            "max_tokens": self.most_tokens(self.max_tokens),
            "logprobs": self.logprobs,
        }
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1  # whose token is not returned
            more["logprobs"] = None if self.logprob_token_ids else self.logprobs
        if self.best_of is not None and self.best_of != (self.n or 1):
            if self.best_of < (self.n or 1):
                raise InvalidRequest(f"best_of is {self.best_of}, less than n.", param="best_of")
            if self.stream:
                raise InvalidRequest(
                    "best_of cannot be streamed: the best sample is known only at the end.",
                    param="best_of",
                )
            if not self.use_beam_search:
                more |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        return self.sampling(**more)

    @field_validator("prompt")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> Any:
        return one_kind(prompt)


class ChatRequest(SamplingRequest, ChatMessages):
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=1)
    include_reasoning: bool = True
    # vLLM's: reasoning is ended after so many tokens; -1: it is not, whatever the server's own
    # limit is
    thinking_token_budget: int | None = Field(default=None, ge=-1, lt=2**31)
    reasoning_budget_tokens: int | None = Field(default=None, ge=-1, lt=2**31)  # llama.cpp's names
    thinking_budget_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    echo: bool | None = None  # begin with the message that is continued
    add_special_tokens: Literal[False] | None = None  # the template writes them

    @property
    def must_call(self) -> bool:
        return self.chosen == "required" or isinstance(self.chosen, NamedTool)

    @property
    def reasoning_budget(self) -> int | None:
        budgets = (
            self.thinking_token_budget,
            self.reasoning_budget_tokens,
            self.thinking_budget_tokens,
        )
        return next((budget for budget in budgets if budget is not None), None)

    @property
    def custom_names(self) -> frozenset[str]:
        return frozenset(tool.custom.name for tool in self.tools or [] if tool.custom is not None)

    @property
    def continued(self) -> str:
        """The text that the output continues."""
        content = self.messages[-1].content if self.continue_final_message else None
        return content if isinstance(content, str) else ""

    @property
    def echoed(self) -> str:
        """The text before the output: the message that it continues, or the last one if it is the
        assistant's."""
        last = self.messages[-1]
        return (
            last.content
            if self.echo and last.role == "assistant" and isinstance(last.content, str)
            else ""
        )

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is only allowed with logprobs.", param="top_logprobs"
            )
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ.", fix="Give one.", param="max_tokens"
            )
        more: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        more["max_tokens"] = self.most_tokens(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        if not self.use_beam_search and self.best_of not in (None, self.n or 1):
            raise InvalidRequest(
                "Of a chat, best_of is only allowed with use_beam_search.",
                fix="Use n.",
                param="best_of",
            )
        if self.must_call:  # a response format, if there is one, is for answers without a call
            name = self.chosen.name if isinstance(self.chosen, NamedTool) else None
            several = name is None and self.parallel_tool_calls is not False
            called = self.called()
            for custom in [tool.custom for tool in self.tools or [] if tool.custom is not None]:
                if name in (None, custom.name) and any(
                    function["name"] == custom.name for function in called
                ):
                    check_forced(custom.name, *custom.grammar)
            more["grammar"] = call_grammar(called, name, several=several)
        return self.sampling(**more)


class EmbeddingRequest(Body):
    without_effect = frozenset({"user"})
    model: str | None = None
    input: PromptField | None = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES
    )  # instead of an input
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = True
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDType = "float32"  # of base64 and bytes
    endianness: Endianness = "native"
    use_activation: bool | None = (
        None  # False: vectors are not normalized. None: as the model has it
    )
    dimensions: int | None = Field(default=None, ge=1)  # the first of them, normalized again
    pooling: Literal["mean", "last", "cls", "none"] | None = (
        None  # None: the model's own, else the mean
    )
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None

    @field_validator("input")
    @classmethod
    def _of_one_kind(cls, inputs: Any) -> Any:
        return one_kind(inputs, MAX_INPUTS)

    def chat(self) -> ChatMessages:
        return _as_chat(self)


class PoolingRequest(EmbeddingRequest):
    """vLLM's: the same for embeddings and for the scores of a classifier."""

    task: str | None = None  # None: what the model does


class ClassifyRequest(PoolingRequest):
    """vLLM's: the label of each input."""

    task: Literal["classify"] | None = None
    encoding_format: Literal["float"] | None = None


class TokenizeRequest(Body):
    """A text (`prompt`, or llama.cpp's `content`), or a conversation."""

    model: str | None = None
    prompt: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=256)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: of a prompt
    add_special: bool | None = None  # the same, of llama.cpp
    parse_special: Literal[True] = True  # control tokens in a text are always parsed
    return_token_strs: bool = False
    with_pieces: bool = False  # tokens as objects, with their texts

    def chat(self) -> ChatMessages:
        return _as_chat(self, None if self.tool_choice == "none" else self.tools)


def _as_chat(
    body: EmbeddingRequest | TokenizeRequest, tools: list[Tool] | None = None
) -> ChatMessages:
    assert body.messages is not None
    check_ends(
        body.continue_final_message,
        body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set,
    )
    return ChatMessages.model_construct(
        messages=body.messages,
        tools=tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int] = Field(max_length=2**20)
    skip_special_tokens: bool = False
