"""The expressions that a program appends to its state: texts, generations, choices, and messages
made of these."""

from __future__ import annotations

import difflib
import json as json_
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidemill.errors import ProgramError
from tidemill.types.sampling import Grammar, SamplingParams

MAX_TOKENS = 128  # of a generation without max_tokens
MAX_CHOICES = 256  # of a select: a request each
# Parameters of gen besides max_tokens and stop. They have the same names in SamplingParams and in
# the server's API.
SAMPLING = frozenset({
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "seed",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expression:
    """`a + b` is both in turn; a text may stand on either side."""

    def __add__(self, other: Appended) -> Several:
        return Several((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: Appended) -> Several:
        return Several((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True, slots=True)
class Text(Expression):
    text: str


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    name: str | None
    params: SamplingParams
    given: dict[str, Any]  # the parameters as a request of the API has them


@dataclass(frozen=True, slots=True)
class Select(Expression):
    name: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message(Expression):
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Several(Expression):
    parts: tuple[Part | Message, ...]


Part: TypeAlias = Text | Gen | Select
Appended: TypeAlias = str | Expression


def parts_of(value: Any) -> tuple[Part | Message, ...]:
    """An expression as a flat list."""
    if isinstance(value, str):
        return (Text(value),)
    if isinstance(value, Several):
        return value.parts
    if isinstance(value, Text | Gen | Select | Message):
        return (value,)
    raise ProgramError(
        f"A program appends texts and gen(), select() or messages; got {type(value).__name__}.",
        fix="Write str(value) for a text.",
    )


def gen(
    name: str | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    stop: str | Sequence[str] = (),
    regex: str | None = None,
    json: Any = None,
    **sampling: Any,
) -> Gen:
    """Text that the model generates, read as `s[name]`. `regex`: what it must match. `json`: a JSON
    schema, or a class that has one (`model_json_schema`), or True for any object. `sampling`:
    parameters of SamplingParams."""
    _check_name(name, "gen")
    for unknown in sampling.keys() - SAMPLING:
        nearest = difflib.get_close_matches(
            unknown, [*SAMPLING, "max_tokens", "stop", "regex", "json"], n=1, cutoff=0.5
        )
        raise ProgramError(
            f"gen() has no parameter {unknown!r}.",
            fix=f"Did you mean {nearest[0]}?"
            if nearest
            else f"There are {', '.join(sorted(SAMPLING))}.",
            param=unknown,
        )
    if regex is not None and json is not None:
        raise ProgramError("gen() has both regex and json.", fix="Give one.", param="json")
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": [stop] if isinstance(stop, str) else list(stop),
    }
    fields |= {key: value for key, value in sampling.items() if value is not None}
    grammar = (
        Grammar("regex", regex)
        if regex is not None
        else None
        if json is None
        else Grammar("json_schema", _schema(json))
    )
    params = SamplingParams(**fields, grammar=grammar)
    if grammar is not None:
        fields["structured_outputs"] = {"regex" if regex is not None else "json": grammar.text}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return Gen(name, params, fields)


def select(name: str | None = None, choices: Sequence[str] = ()) -> Select:
    """The likeliest of these texts: by the mean log-probability of its tokens."""
    _check_name(name, "select")
    if (
        isinstance(choices, str)
        or not isinstance(choices, Sequence)
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise ProgramError(
            f"choices is a list of texts; got {str(choices)[:60]!r}.", param="choices"
        )
    if not choices or not all(choices):
        fix = 'Give at least one text: select("name", choices=["yes", "no"]).'
        raise ProgramError(
            "select() has no choices." if not choices else "A choice is empty.",
            fix=fix,
            param="choices",
        )
    if len(choices) > MAX_CHOICES:
        raise ProgramError(
            f"select() has {len(choices)} choices; at most {MAX_CHOICES}.", param="choices"
        )
    return Select(name, tuple(choices))


def system(content: Appended) -> Message:
    return _message("system", content)


def user(content: Appended) -> Message:
    return _message("user", content)


def assistant(content: Appended) -> Message:
    """A message of the assistant, which may have generations and choices."""
    return _message("assistant", content)


def _message(role: str, content: Appended) -> Message:
    parts = []
    for part in parts_of(content):
        if isinstance(part, Message):
            raise ProgramError(
                f"A message of the {role} has another one inside.",
                fix="Append them one after the other.",
            )
        if role != "assistant" and not isinstance(part, Text):
            raise ProgramError(
                f"Only the assistant generates; this is a message of the {role}.",
                fix="Use assistant(gen(...)).",
            )
        parts.append(part)
    return Message(role, tuple(parts))


def _check_name(name: Any, what: str) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ProgramError(
            f"The name of a variable is a text; {what}() got {str(name)[:60]!r}.", param="name"
        )


def _schema(source: Any) -> str:
    if source is True:
        return '{"type": "object"}'
    if hasattr(source, "model_json_schema"):
        source = source.model_json_schema()
    try:
        schema = json_.loads(source) if isinstance(source, str) else source
        if isinstance(schema, dict):
            return json_.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"json is not a JSON schema: {error}.", param="json") from None
    raise ProgramError(
        f"json is a JSON schema (a dict), a class that has one, or True; got {str(source)[:60]!r}.",
        param="json",
    )
