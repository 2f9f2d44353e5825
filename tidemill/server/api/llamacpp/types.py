"""Request bodies of llama.cpp's own API."""

from __future__ import annotations

from json import dumps
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict, WithJsonSchema, field_validator

from tidemill.errors import InvalidRequest
from tidemill.frontend.infill import MAX_FILES
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.prompts import MAX_CHOICES, Mixed, few_texts, is_mixed
from tidemill.server.generation.request import UNLIMITED
from tidemill.server.generation.sampling import is_token_id
from tidemill.server.http.body import Body
from tidemill.types.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, Grammar

_MOST_BIASED = 100.0  # a bias that forbids a token, or forces it
_MAX_BIASED_CHARS = 256  # of a text whose tokens get a bias
_MAX_FIELDS = 64

_ID = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_MIXED = {"type": "array", "items": {"anyOf": [_ID, {"type": "string"}]}}
_TEXT = {
    "type": "object",
    "properties": {"prompt_string": {"type": "string"}},
    "required": ["prompt_string"],
}
_ONE = [{"type": "string"}, _MIXED, _TEXT]
_PROMPT = {"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}}]}
PromptField = Annotated[Any, WithJsonSchema(_PROMPT)]


def prompts_of(prompt: Any) -> list[Mixed]:
    """A text, or a list of token ids and texts, is one prompt; a list of texts or of lists is
    several. An object has the text as its prompt_string."""
    # A list may have a million items: they are looked at once.
    if isinstance(prompt, str) or is_mixed(prompt):
        return few_texts([prompt])
    if isinstance(prompt, dict):
        prompt = [prompt]
    if isinstance(prompt, list):
        prompt = [_text_of(item) if isinstance(item, dict) else item for item in prompt]
    if not isinstance(prompt, list) or not all(
        isinstance(item, str) or is_mixed(item) for item in prompt
    ):
        raise ValueError("it must be a text, a list of token ids and texts, or a list of prompts")
    if len(prompt) > MAX_CHOICES:
        raise ValueError(f"{len(prompt)} prompts in one request; at most {MAX_CHOICES}")
    return few_texts(prompt)


def _text_of(prompt: dict[str, Any]) -> Any:
    if prompt.get("multimodal_data"):
        raise ValueError("images and audio (multimodal_data) are not supported")
    return prompt.get("prompt_string")


Bias = Annotated[tuple[int | str, float | bool], Strict(False)]  # from a list


class CompletionOptions(sampling_aliases.Options):
    """The options that completion and infill share."""

    without_effect: ClassVar[frozenset[str]] = sampling_aliases.Options.without_effect | {
        "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse",
        "speculative.n_max", "speculative.n_min",
        "speculative.p_min", "backend_sampling",
    }  # fmt: skip

    model: str | None = None
    n_predict: int | None = Field(default=None, ge=-2, lt=2**31)
    max_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    stream: bool = False
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    ignore_eos: bool = False
    logit_bias: (
        Annotated[dict[str, float | bool] | list[Bias], Field(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] | None = Field(default=None, max_length=_MAX_FIELDS)
    post_sampling_probs: bool = False  # of what tokens are drawn from
    return_progress: bool = False
    samplers: Annotated[list[str], Field(max_length=0)] | None = None
    lora: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def num_predict(self) -> int | None:
        return self.n_predict if self.n_predict is not None else self.max_tokens

    @property
    def limit(self) -> int | None:
        """The most output tokens; None: the server's default. Below 0, the output may take the rest
        of the context."""
        num = self.num_predict
        return UNLIMITED if num is not None and num < 0 else num

    @property
    def is_unlimited(self) -> bool:
        return self.limit == UNLIMITED

    @property
    def says_nothing(self) -> bool:
        """Only the prompt is computed, and cached."""
        return self.limit == 0

    def sampling(self) -> dict[str, Any]:
        values = super().sampling() | {"ignore_eos": self.ignore_eos, "max_tokens": self.limit}
        if self.n_probs:
            values["logprobs"] = self.n_probs
        if self.grammar and self.json_schema is not None:
            what = "grammar and json_schema are both given."
            raise InvalidRequest(what, fix="Give one.", param="grammar")
        if self.grammar:
            values["grammar"] = Grammar("grammar", self.grammar)
        elif self.json_schema is not None:
            values["grammar"] = Grammar("json_schema", dumps(self.json_schema))
        return values

    def biases(self, tokenizer: Tokenizer) -> dict[int, float]:
        """A logit_bias by token id. A text biases each of its tokens; false forbids a token."""
        logit_bias = self.logit_bias or ()
        pairs = logit_bias.items() if isinstance(logit_bias, dict) else logit_bias
        by_id: dict[int, float] = {}
        for key, value in pairs:
            bias = -_MOST_BIASED if value is False else float(value)
            if isinstance(key, int) or is_token_id(key):
                by_id[int(key)] = bias
            elif len(key) > _MAX_BIASED_CHARS:
                what = (
                    f"A text in logit_bias has {len(key)} characters; at most {_MAX_BIASED_CHARS}."
                )
                raise InvalidRequest(what, param="logit_bias")
            else:
                by_id |= dict.fromkeys(tokenizer.encode(key, add_special=False), bias)
            if len(by_id) > MAX_LOGIT_BIASES:
                what = f"logit_bias may hold at most {MAX_LOGIT_BIASES} tokens."
                raise InvalidRequest(what, param="logit_bias")
        return by_id


class Completion(CompletionOptions):
    prompt: PromptField

    @field_validator("prompt")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> list[Mixed]:
        return prompts_of(prompt)


class ExtraFile(Body):
    filename: str = Field(default="", max_length=4096)
    text: str


class Infill(CompletionOptions):
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=MAX_FILES)
    prompt: str = ""


class Embedding(Body):
    model: str | None = None
    content: PromptField = None
    input: PromptField = None  # another name of it
    embd_normalize: Literal[2] = 2  # by the Euclidean norm

    @field_validator("content", "input")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> list[Mixed]:
        return prompts_of(prompt)
