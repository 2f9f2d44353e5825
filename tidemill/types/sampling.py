"""SamplingParams: the options of decoding, validated here and nowhere else."""

from __future__ import annotations

import difflib
import enum
import json
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tidemill.capabilities import check_request
from tidemill.errors import InvalidRequest
from tidemill.types.kv_policy import KVPolicy, read_policy

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BEAMS = 16
MAX_LENGTH_PENALTY = 20.0
MAX_DIVERSITY_PENALTY = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS = 4, 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 32
MAX_LOGPROB_IDS = 128
GREEDY_BELOW = 1e-5
# What says itself which other properties there are.
_OPEN = frozenset({
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "allOf", "anyOf", "oneOf", "if",
    "$ref",
})  # fmt: skip
_OBJECT_KEYS = frozenset({
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required", "minProperties",
    "maxProperties", "propertyNames", "dependentRequired",
})  # fmt: skip
# Keywords with schemas of the same value, of values in it, or of others; those that are maps from
# names to schemas.
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas"})
_OF_VALUES = frozenset(
    {"properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)

# Lowest and highest value. Checked below, and published in the server's OpenAPI description.
INTEGERS = {
    "n": (1, MAX_N),
    "top_k": (-1, 2**31 - 1),  # -1 is the other common spelling of "all"
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs_start": (1, 2**31 - 1),
    "penalty_window": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
REALS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),  # beyond it, quotients are not numbers any more
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
ABOVE = frozenset({"top_p", "typical_p"})  # the lower limit itself is not allowed
_LISTS = (
    "stop", "stop_regex", "stop_token_ids", "allowed_token_ids", "bad_word_ids", "logprob_token_ids", "prompt_logprob_token_ids",
)  # fmt: skip
_MAY_BE_NONE = frozenset({"max_tokens", "logprobs", "prompt_logprobs", "seed"})
# Names of vLLM's SamplingParams: those that cannot change the tokens, and those that would and are
# not supported.
_WITHOUT_EFFECT = frozenset({"detokenize", "spaces_between_special_tokens"})
_UNSUPPORTED = frozenset({
    "best_of", "use_beam_search", "length_penalty", "early_stopping", "logits_processors", "truncate_prompt_tokens", "bad_words",
    "allowed_token_ids", "extra_args",
})  # fmt: skip
# vLLM's names of what asks for structured output, the fields of what is given there with their
# kinds of grammar, and fields that cannot change the answer.
_STRUCTURED = ("structured_outputs", "guided_decoding")
_KINDS = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_schema",
    "structural_tag": "structural_tag",
}  # fmt: skip
_STRUCTURED_WITHOUT_EFFECT = frozenset(
    {"backend", "backend_was_auto", "disable_fallback", "disable_any_whitespace"}
)


# What changes logits or restricts tokens. Beams are ranked by the model's own log-probabilities, so
# it cannot go with them.


class UnsetReal(float):
    """A neutral value that nobody asked for: the model's default may take its place."""


class UnsetInteger(int):
    """An integer that was not given; see UnsetReal."""


class Grammar(msgspec.Struct, frozen=True):
    """A grammar that the output must match."""

    # json_schema, regex, grammar (Lark or GBNF), choice (a JSON list of strings) or structural_tag
    # (JSON)
    kind: str
    text: str

    @staticmethod
    def read(grammar: Any) -> Grammar:
        """From a JSON schema as a dict, or the text of a grammar."""
        if (
            isinstance(grammar, Grammar)
            and isinstance(grammar.kind, str)
            and isinstance(grammar.text, str)
        ):
            return grammar
        if isinstance(grammar, Mapping | str):
            return _grammar(
                "json_schema" if isinstance(grammar, Mapping) else "grammar", grammar, "grammar"
            )
        raise InvalidRequest(
            f"grammar is {str(grammar)[:100]!r} ({type(grammar).__name__}).",
            fix='Give a Grammar("regex", "[0-9]+"), a JSON schema as a dict, or the text of a Lark or GBNF grammar.',
            param="grammar",
        )

    @staticmethod
    def of_vllm(params: Any, name: str) -> Grammar:
        """From vLLM's StructuredOutputsParams or GuidedDecodingParams, or a dict with their fields:
        exactly one of them."""
        fields = params if isinstance(params, Mapping) else getattr(params, "__dict__", None)
        one_of = f"Give one of {', '.join(_KINDS)}."
        if not isinstance(fields, Mapping):
            raise InvalidRequest(
                f"{name} is {str(params)[:100]!r}; it must be a dict.", fix=one_of, param=name
            )
        chosen = {
            field: value
            for field, value in fields.items()
            if value is not None and value is not False
        }
        kinds = [field for field in chosen if field in _KINDS]
        others = [
            field for field in chosen if field not in _KINDS and not str(field).startswith("_")
        ]
        if unknown := [field for field in others if field not in _STRUCTURED_WITHOUT_EFFECT]:
            raise InvalidRequest(
                f"{name} has {unknown[0]!r}, which is not supported.", fix=one_of, param=name
            )
        if len(kinds) != 1:
            raise InvalidRequest(
                f"{name} has {' and '.join(kinds) or 'nothing that the output must match'}.",
                fix=one_of,
                param=name,
            )
        value = {"type": "object"} if kinds[0] == "json_object" else chosen[kinds[0]]
        return _grammar(_KINDS[kinds[0]], value, name)


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    if isinstance(value, str):
        return Grammar(kind, value)
    try:
        return Grammar(kind, json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"The {kind} of {param} cannot be written as JSON: {error}."
        raise InvalidRequest(
            what, fix="Give a text, or lists and dicts of texts and numbers.", param=param
        ) from None


class RequestOutputKind(enum.Enum):
    """The kind of output that AsyncLLM yields after each step, in vLLM's terms: all of the output
    so far, what is new, or only the whole."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

    @classmethod
    def read(cls, value: Any) -> Self:
        """Also from a name, a number, or vLLM's own."""
        for kind in cls:
            if (
                value is kind
                or getattr(value, "value", value) == kind.value
                or str(value).upper() == kind.name
            ):
                return kind
        names = ", ".join(kind.name for kind in cls)
        raise InvalidRequest(
            f"There is no output_kind {value!r}.", fix=f"Choose {names}.", param="output_kind"
        )


class Beams(msgspec.Struct, frozen=True):
    """Beam search: the outputs are the best that were found by keeping the `width` best of each
    length."""

    width: int
    # a score is the sum of log-probabilities / length ** length_penalty
    length_penalty: float = 1.0
    # True: at `width` outputs; False, "never": when no better one is likely, or possible
    early_stopping: bool | str = False
    groups: int = 1  # of beams, each of which is a search of its own
    # for each beam of an earlier group that has chosen the same token
    diversity_penalty: float = 0.0


def closed(schema: Any) -> Any:
    """A JSON schema whose objects have no properties but those it names, as OpenAI means by strict.
    Changed in place. A schema that is only a part of what is said about an object, as beside others
    in an allOf, is left open: its siblings name other properties."""
    left: list[tuple[Any, bool]] = [(schema, True)]  # schemas, and that each says all of its value
    found: dict[int, dict[str, Any]] = {}
    seen: set[tuple[int, bool]] = set()
    while left:
        part, is_all = left.pop()
        if not isinstance(part, dict) or (id(part), is_all) in seen:
            continue
        seen.add((id(part), is_all))
        found[id(part)] = part
        parts, target = _schemas_of(part, _IN_PLACE), _target(schema, part.get("$ref"))
        # of a choice, one counts
        num = len(parts) if part.keys() & _IN_PLACE not in ({"anyOf"}, {"oneOf"}) else 1
        is_other = bool(
            part.keys() & (_OBJECT_KEYS | {"if", "then", "else", "not", "dependentSchemas"})
        )
        is_only = is_all and not is_other and num + ("$ref" in part) == 1
        left += [(value, True) for value in _schemas_of(part, _DEFINITIONS)]
        left += [(value, is_all and not parts) for value in _schemas_of(part, _OF_VALUES)]
        left += [(part, is_only) for part in parts]
        left.append((target, is_only))
    for number, part in found.items():
        named, required = part.get("properties"), part.get("required", [])
        is_whole = (
            isinstance(named, dict)
            and isinstance(required, list)
            and all(str(name) in named for name in required)
        )
        if is_whole and (number, False) not in seen and not part.keys() & _OPEN:
            part["additionalProperties"] = False
    return schema


def _schemas_of(schema: dict[str, Any], keywords: frozenset[str]) -> list[Any]:
    parts: list[Any] = []
    for name in schema.keys() & keywords:
        value = schema[name]
        is_map = name in _NAMED_SCHEMAS and isinstance(value, dict)
        parts += value.values() if is_map else value if isinstance(value, list) else [value]
    return parts


def _target(schema: Any, reference: Any) -> Any:
    """The target of a reference within the document; None: unknown."""
    if not isinstance(reference, str) or not reference.lstrip("#").startswith("/"):
        return schema if reference == "#" else None
    for step in reference.lstrip("#")[1:].split("/"):
        schema = (
            schema.get(step.replace("~1", "/").replace("~0", "~"))
            if isinstance(schema, dict)
            else None
        )
    return schema


class Reasoning(msgspec.Struct, frozen=True):
    """An output may begin with reasoning, between these texts. The grammar applies to what follows
    it. Reasoning of `budget` tokens is ended."""

    opening: str
    ending: str
    is_open: bool  # the prompt has opened it
    budget: int | None = None


class _ByName(msgspec.StructMeta):
    """Construction from Python: None means absent, and a name that does not exist is an error with
    the nearest one that does."""

    if not TYPE_CHECKING:

        def __call__(cls, **fields: Any) -> Any:
            known = cls.__struct_fields__
            kept = {}
            for name in _STRUCTURED if "grammar" in known else ():
                if (value := fields.pop(name, None)) is not None:
                    if fields.get("grammar") is not None:
                        raise InvalidRequest(
                            f"{name} does not go with grammar.", fix="Give one of them.", param=name
                        )
                    fields["grammar"] = Grammar.of_vllm(value, name)
            for name, value in fields.items():
                if name in known:
                    if value is not None or name in _MAY_BE_NONE:
                        kept[name] = value
                elif name not in _WITHOUT_EFFECT and (name not in _UNSUPPORTED or value):
                    raise _unknown(name, known)
            return super().__call__(**kept)


def _unknown(name: str, known: tuple[str, ...]) -> InvalidRequest:
    if name in _UNSUPPORTED:
        fix = (
            "Use LLM.beam_search."
            if name in ("use_beam_search", "length_penalty", "early_stopping")
            else ""
        )
        return InvalidRequest(
            f"The sampling parameter {name} is not supported.", fix=fix, param=name
        )
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(known)}."
    return InvalidRequest(f"There is no sampling parameter {name!r}.", fix=fix, param=name)


class SamplingParams(
    msgspec.Struct, metaclass=_ByName, frozen=True, kw_only=True, omit_defaults=True
):
    """The sampling parameters of a request: how to turn logits into tokens, and when to stop.

    Logits are changed in this order: grammar, allowed tokens, logit bias, bad words, min_tokens,
    repetition / presence / frequency penalties, temperature, top-k, top-p (the token that crosses p
    is kept), min-p, typical-p. Reported logprobs are the model's own, before any of it, unless
    post_sampling_logprobs is set.

    Parameters of an `Unset...` type were not given. They are neutral here, and take the model's
    defaults in the server and in LLM (frontend/sampling_defaults.py).
    """

    n: int = 1
    temperature: float = UnsetReal(1.0)
    top_k: int = UnsetInteger(0)  # 0: all tokens
    top_p: float = UnsetReal(1.0)
    min_p: float = UnsetReal(0.0)
    typical_p: float = 1.0
    repetition_penalty: float = UnsetReal(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # of how many of the latest tokens the penalties take notice; -1: all
    penalty_window: int = UnsetInteger(-1)
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # nothing else may be generated; empty: everything may
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # no output contains one of these sequences
    max_tokens: int | None = UnsetInteger(256)  # None: up to the end of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # the output ends with the first match of one, which it keeps
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # how many alternatives to report beside the chosen token; 0 reports the chosen one alone
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # report these tokens instead of the likeliest
    # of what the token is drawn from, instead of the model's own
    post_sampling_logprobs: bool = False
    prompt_logprobs: int | None = None
    # the position of the first token they are reported of; what is before it may be cached
    prompt_logprobs_start: int = 1
    # with prompt_logprobs: report these instead of the likeliest
    prompt_logprob_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: drawn when the request is submitted
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None  # before what the grammar applies to, or with a budget
    # beam search, of which the n best are the output; temperature and seed have no effect
    beams: Beams | None = None
    # mean, last, cls, none (each token's) or score: report the prompt's states, do not generate
    pooling: str | None = None
    # with pooling: an embedding has length 1. None: as the model has it
    is_normalized: bool | None = None
    kv_policy: KVPolicy | None = (
        # which tokens stay in the KV cache; a name or a dict is taken, too. None: the engine's
        # default
        None
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of AsyncLLM

    def __post_init__(self) -> None:
        # Structs do not check types on construction from Python, so a script's mistake is caught
        # here as well as a client's.
        for field in _LISTS:
            value: Any = getattr(self, field)
            if value is None or isinstance(value, str | list):
                value = (value,) if isinstance(value, str) else tuple(value or ())
                msgspec.structs.force_setattr(self, field, value)
            if not isinstance(value, tuple):
                raise InvalidRequest(f"{field} must be a list; got {value!r}.", param=field)
        if self.logit_bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers; got {self.logit_bias!r}.",
                param="logit_bias",
            )
        for field in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "post_sampling_logprobs",
        ):
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequest(
                    f"{field} must be true or false; got {getattr(self, field)!r}.", param=field
                )
        for field in INTEGERS:
            if getattr(self, field) is not None or field not in _MAY_BE_NONE:
                _integer(self, field)
        for field in REALS:
            _real(self, field)
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        if (
            self.max_tokens is not None
            and self.min_tokens > self.max_tokens
            and self.is_given("max_tokens")
        ):
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}.",
                param="min_tokens",
            )
        if self.kv_policy is not None:
            msgspec.structs.force_setattr(self, "kv_policy", read_policy(self.kv_policy))
        if self.grammar is not None:
            msgspec.structs.force_setattr(self, "grammar", Grammar.read(self.grammar))
        msgspec.structs.force_setattr(self, "output_kind", RequestOutputKind.read(self.output_kind))
        if self.pooling not in (None, "mean", "last", "cls", "none", "score"):
            raise InvalidRequest(
                f"pooling is mean, last, cls, none or score; got {self.pooling!r}.", param="pooling"
            )
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequest("stop must be a non-empty string or a list of them.", param="stop")
        if len(self.stop) > MAX_STOPS or any(len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(
                f"stop may hold at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters.",
                param="stop",
            )
        if len(self.stop_regex) > MAX_STOP_REGEXES or not all(
            isinstance(text, str) and 0 < len(text) <= MAX_STOP_REGEX_CHARS
            for text in self.stop_regex
        ):
            what = f"stop_regex may hold at most {MAX_STOP_REGEXES} patterns of 1 to {MAX_STOP_REGEX_CHARS} characters."
            raise InvalidRequest(what, param="stop_regex")
        if len(self.stop_token_ids) > 256 or not all(
            _is_int(t) and 0 <= t < 2**31 for t in self.stop_token_ids
        ):
            raise InvalidRequest(
                "stop_token_ids must be at most 256 non-negative token ids.", param="stop_token_ids"
            )
        for field in ("allowed_token_ids", "logprob_token_ids", "prompt_logprob_token_ids"):
            ids, most = (
                getattr(self, field),
                MAX_ALLOWED_TOKENS if field == "allowed_token_ids" else MAX_LOGPROB_IDS,
            )
            if len(ids) > most or not all(_is_int(t) and 0 <= t < 2**31 for t in ids):
                raise InvalidRequest(
                    f"{field} must be at most {most} non-negative token ids.", param=field
                )
        _check_bad_words(self)
        if self.beams is not None:
            _check_beams(self, self.beams)
        check_request(self)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias may hold at most {MAX_LOGIT_BIASES} tokens.", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            if (
                not _is_int(token)
                or not 0 <= token < 2**31
                or not _is_real(bias)
                or not -100 <= bias <= 100
            ):
                raise InvalidRequest(
                    f"logit_bias maps token ids to numbers from -100 to 100; got {token!r}: {bias!r}.",
                    param="logit_bias",
                )

    def __repr__(self) -> str:
        """The parameters that were given. Others take the model's default."""
        neutral, shown = type(self)(), []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not self.is_given(name):
                shown.append(f"{name}=<the model's>")
            elif value != getattr(neutral, name) or not neutral.is_given(name):
                shown.append(f"{name}={value!r}")
        return f"SamplingParams({', '.join(shown)})"

    def is_given(self, name: str) -> bool:
        return not isinstance(getattr(self, name), UnsetReal | UnsetInteger)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Greedy, or sampled from the whole vocabulary without any change of logits but
        temperature."""
        is_restricted = not self.greedy and (
            self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0
        )
        is_masked = (
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_word_ids
            or self.min_tokens
            or self.has_masks
        )
        return not (is_restricted or self.has_penalties or is_masked)

    @property
    def num_reusable(self) -> int:
        """Prompt tokens that need not be computed if they are cached: those after them must be."""
        if self.pooling in ("mean", "none"):
            return 0
        return 2**31 - 1 if self.prompt_logprobs is None else self.prompt_logprobs_start - 1

    @property
    def has_masks(self) -> bool:
        """Tells if the tokens that may come depend on the output so far: a grammar, or a budget of
        reasoning."""
        return self.grammar is not None or self.reasoning is not None

    @property
    def waits_for_tokens(self) -> bool:
        """Tells if the computation after a token depends on the host's view of it."""
        return self.has_masks or self.beams is not None

    @property
    def has_penalties(self) -> bool:
        some = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
        return some and self.penalty_window != 0

    def seeded(self) -> SamplingParams:
        """The same parameters with a fresh seed."""
        return msgspec.structs.replace(self, seed=secrets.randbits(63))

    def sample(self, index: int) -> SamplingParams:
        """The parameters of the `index`-th of n samples: its own seed, n = 1."""
        assert self.seed is not None
        seed = sample_seed(self.seed, index)
        return (
            self
            if (self.n, self.seed) == (1, seed)
            else msgspec.structs.replace(self, n=1, seed=seed)
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Token ids named here must exist in the model."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
            "prompt_logprob_token_ids": self.prompt_logprob_token_ids,
            "bad_word_ids": tuple(token for word in self.bad_word_ids for token in word),
        }
        for field, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    there = f"the model has {vocab_size} tokens, 0 to {vocab_size - 1}"
                    raise InvalidRequest(f"{field} names token {token}; {there}.", param=field)


class BeamSearchParams(msgspec.Struct, metaclass=_ByName, frozen=True, kw_only=True):
    """Parameters of `LLM.beam_search`, under vLLM's names."""

    beam_width: int  # also the number of outputs
    max_tokens: int
    ignore_eos: bool = False
    # without effect: beams are ranked by the model's own log-probabilities
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the end-of-text token is part of an output
    early_stopping: bool | str = False
    # diverse beam search: so many searches of beam_width / num_beam_groups beams
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0  # for a token that a beam of an earlier group has just chosen
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0  # how many alternatives to report beside each token

    def __post_init__(self) -> None:
        self.sampling()  # checked

    def sampling(self) -> SamplingParams:
        width = self.beam_width if _is_int(self.beam_width) else 0
        return SamplingParams(
            n=max(min(width, MAX_BEAMS), 1),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            beams=Beams(
                self.beam_width,
                self.length_penalty,
                self.early_stopping,
                self.num_beam_groups,
                self.diversity_penalty,
            ),
        )


def sample_seed(seed: int, index: int) -> int:
    """Seed of one of n samples. The first keeps the request's seed, so n=1 and the first of n
    agree."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_word_ids
    is_valid = all(
        isinstance(word, tuple | list) and 0 < len(word) <= MAX_BAD_WORD_TOKENS for word in words
    )
    if (
        len(words) > MAX_BAD_WORDS
        or not is_valid
        or not all(_is_int(t) and 0 <= t < 2**31 for word in words for t in word)
    ):
        what = f"bad_word_ids must be at most {MAX_BAD_WORDS} lists of 1 to {MAX_BAD_WORD_TOKENS} token ids."
        raise InvalidRequest(what, param="bad_word_ids")


def _check_beams(params: SamplingParams, beams: Beams) -> None:
    if not _is_int(beams.width) or not 1 <= beams.width <= MAX_BEAMS:
        raise InvalidRequest(
            f"beam_width must be an integer from 1 to {MAX_BEAMS}; got {beams.width!r}.",
            param="beam_width",
        )
    if params.n > beams.width:
        raise InvalidRequest(f"n is {params.n}, more than beam_width, {beams.width}.", param="n")
    if not _is_real(beams.length_penalty) or abs(beams.length_penalty) > MAX_LENGTH_PENALTY:
        limits = f"from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise InvalidRequest(
            f"length_penalty must be a number {limits}; got {beams.length_penalty!r}.",
            param="length_penalty",
        )
    if not isinstance(beams.early_stopping, bool) and beams.early_stopping != "never":
        raise InvalidRequest(
            f'early_stopping is true, false or "never"; got {beams.early_stopping!r}.',
            param="early_stopping",
        )
    _check_groups(beams)


def _check_groups(beams: Beams) -> None:
    if not _is_int(beams.groups) or beams.groups < 1 or beams.width % beams.groups:
        what = f"num_beam_groups must divide the {beams.width} beams into groups of one size; got {beams.groups!r}."
        raise InvalidRequest(what, param="num_beam_groups")
    if (
        not _is_real(beams.diversity_penalty)
        or not 0 <= beams.diversity_penalty <= MAX_DIVERSITY_PENALTY
    ):
        limit = f"from 0 to {MAX_DIVERSITY_PENALTY:g}"
        what = f"diversity_penalty must be a number {limit}; got {beams.diversity_penalty!r}."
        raise InvalidRequest(what, param="diversity_penalty")
    if (beams.groups > 1) != (beams.diversity_penalty > 0):
        raise InvalidRequest(
            f"num_beam_groups is {beams.groups} and diversity_penalty {beams.diversity_penalty:g}: without a penalty all groups "
            "would be the same, and one group has none to differ from.",
            fix="Give both, or neither.",
            param="diversity_penalty",
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _integer(params: SamplingParams, field: str) -> None:
    value, (low, high) = getattr(params, field), INTEGERS[field]
    if not _is_int(value) or not low <= value <= high:
        raise InvalidRequest(
            f"{field} must be an integer from {low} to {high}; got {value!r}.", param=field
        )


def _real(params: SamplingParams, field: str) -> None:
    value, (low, high), above = getattr(params, field), REALS[field], field in ABOVE
    if not _is_real(value) or not low <= value <= high or (above and value == low):
        words = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{field} must be a number {words}; got {value!r}.", param=field)
