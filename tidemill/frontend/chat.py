"""Chat templates: a model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.errors import CheckpointError, InvalidRequest


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here its content is simply text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled once; rendering can call nothing but what is given here."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"The model's chat template cannot be compiled: {error}.") from error

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        try:
            return self._template.render(
                messages=[_plain(message) for message in messages], tools=None, documents=None, **variables
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}.", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"The model's chat template fails on these messages: {type(error).__name__}: {error}.", param="messages"
            ) from error


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Content as one string: text parts joined, anything else refused."""
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise InvalidRequest(f"A content part of type {kind!r} is not supported.", fix="Send text.", param="messages")
            texts.append(part["text"])
        content = "".join(texts)
    return {**message, "content": content if content is not None else ""}


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
