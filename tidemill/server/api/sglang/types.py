"""Request bodies of SGLang's own API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.generation.prompts import MAX_CHOICES
from tidemill.server.generation.sampling import as_tuple, biases, grammar_of
from tidemill.server.http.body import Body
from tidemill.server.http.context import ID_PATTERN
from tidemill.types.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    Grammar,
)

_DEFAULT_TOKENS = 128


class Sampling(Body):
    """Values are checked by SamplingParams."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"stream_interval"})

    max_new_tokens: int = Field(default=_DEFAULT_TOKENS, ge=0, lt=2**31)
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_regex: str | Annotated[list[str], Field(max_length=MAX_STOP_REGEXES)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=256)
    allowed_token_ids: list[int] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED_TOKENS
    )
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIASES)
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] = True
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None

    def values(self) -> dict[str, Any]:
        """The arguments of SamplingParams that are given, but the limit of the output."""
        same = (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "n", "ignore_eos", "skip_special_tokens",
        )  # fmt: skip
        values: dict[str, Any] = {name: getattr(self, name) for name in same} | {
            "min_tokens": self.min_new_tokens,
            "seed": self.sampling_seed,
            "include_stop_str_in_output": self.no_stop_trim,
            "logit_bias": biases(self.logit_bias) if self.logit_bias else None,
            "grammar": self._grammar(),
        }
        for name in ("stop", "stop_regex", "stop_token_ids", "allowed_token_ids"):
            values[name] = as_tuple(value) if (value := getattr(self, name)) is not None else None
        return {name: value for name, value in values.items() if value is not None}

    def _grammar(self) -> Grammar | None:
        kinds = {
            "json_schema": "json_schema",
            "regex": "regex",
            "ebnf": "grammar",
            "structural_tag": "structural_tag",
        }
        names = [name for name in kinds if getattr(self, name) is not None]
        if len(names) > 1:
            what = f"{names[0]} and {names[1]} are both given."
            raise InvalidRequest(what, fix="Give one.", param=names[-1])
        return grammar_of(kinds[names[0]], getattr(self, names[0])) if names else None


_Salt = Annotated[str, Field(max_length=256)]


class Generate(Body):
    """One prompt, or a list of them. What may differ between prompts may be a list as well."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"log_metrics", "priority", "bootstrap_room", "routed_dp_rank"}
    )

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Sampling | Annotated[list[Sampling], Field(max_length=MAX_CHOICES)] | None = (
        None
    )
    rid: Annotated[str, Field(pattern=ID_PATTERN)] | None = None  # a label, as X-Request-Id
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1  # logprobs of the prompt's tokens from here; -1: none
    extra_key: _Salt | list[_Salt] | None = None  # the prefix cache is separate for each
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool = False

    def prompts(self) -> list[Any]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("Give either text or input_ids.", param="text")
        inputs = self.text if self.text is not None else self.input_ids
        prompts = inputs if self.is_list and isinstance(inputs, list) else [inputs]
        if not prompts or len(prompts) > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts in one request; 1 to {MAX_CHOICES}.", param="text"
            )
        return prompts

    @property
    def is_list(self) -> bool:
        ids = self.input_ids
        return isinstance(self.text, list) or (
            bool(ids) and isinstance(ids, list) and isinstance(ids[0], list)
        )

    def of_each(self, name: str, num: int) -> list[Any]:
        """A value for each prompt."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * num
        if len(value) != num:
            raise InvalidRequest(f"{name} has {len(value)} values for {num} prompts.", param=name)
        return value

    def named_ids(self, num: int) -> list[list[int]]:
        """Tokens whose logprobs are asked for, for each prompt."""
        value = self.token_ids_logprob
        if value is None or not any(isinstance(item, list) for item in value):
            flat = [token_id for token_id in value or () if isinstance(token_id, int)]
            return [flat] * num
        if not self.is_list:
            raise InvalidRequest(
                "token_ids_logprob of one prompt is a flat list of integers.",
                param="token_ids_logprob",
            )
        return [
            ids if isinstance(ids, list) else [] for ids in self.of_each("token_ids_logprob", num)
        ]


class AbortRequest(Body):
    rid: str = Field(max_length=256)
    abort_all: Literal[False] = False
