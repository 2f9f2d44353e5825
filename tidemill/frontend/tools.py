"""Parses tool calls and reasoning out of a model's text while it streams.

One parser serves streamed and whole responses, and the arguments of a call are passed on exactly as the model wrote them, so the
streamed pieces add up to the whole response. Formats: <tool_call>{...}</tool_call> (Hermes, Qwen), [TOOL_CALLS][{...}] (Mistral),
an object or a list of objects as the whole output, optionally after <|python_tag|> (Llama 3, plain JSON). An object is a call if
it has a name, and arguments or parameters.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tidemill.errors import InvalidRequest
from tidemill.sampling import Grammar

MAX_FORCED_CALLS = 16  # in one output, if several are allowed
_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CLOSING = "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class TextPiece:
    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class CallStart:
    index: int
    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(slots=True)
class CallArguments:
    index: int
    text: str


Piece: TypeAlias = TextPiece | CallStart | CallArguments


class OutputParser:
    """`tools`: look for calls. `only_calls`: the whole output is one or more calls."""

    def __init__(self, tools: bool, only_calls: bool = False) -> None:
        self._tools, self._only_calls = tools, only_calls
        self._held = ""  # may become an opening tag
        self._at_start = True
        self._thinking = False
        self._skips_lines = False  # after the reasoning
        self._object: _CallObject | None = None
        self._between = False  # after an opening tag or a call: only brackets, commas and whitespace are expected
        self._raw = ""  # what may be a call so far; emitted as text if it is not one
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """End of the output: text that was held back is emitted, unless it belongs to a call."""
        pieces: list[Piece] = []
        if self._object is not None:
            if not self._object.has_started:
                pieces.append(TextPiece(self._raw + self._held))
        elif self._held and not (self._between and self.num_calls):
            pieces.append(TextPiece(self._raw + self._held, self._thinking))
        elif self._raw and not self.num_calls:
            pieces.append(TextPiece(self._raw))
        self._held = self._raw = ""
        return _joined(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        """Consumes some of the held text. False: more text is needed first."""
        if self._skips_lines:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held
            return bool(self._held)
        if self._object is not None:
            return self._take_call(pieces)
        if self._between:
            return self._take_between(pieces)
        if self._thinking:
            return self._take_text(pieces, (_THOUGHT,))
        if self._at_start:
            stripped = self._held.lstrip()
            marks = (_THINK, *_OPENINGS) if self._tools else (_THINK,)
            if not stripped or any(mark != stripped and mark.startswith(stripped) for mark in marks):
                return False
            if stripped.startswith(_THINK):
                self._held, self._thinking = stripped[len(_THINK) :], True
                return True
            self._at_start = False
            if self._tools and stripped[0] in "{[" and not stripped.startswith(_OPENINGS):
                self._raw, self._held, self._between = self._held[: len(self._held) - len(stripped)], stripped, True
                return True
        return self._take_text(pieces, _OPENINGS if self._tools else ())

    def _take_text(self, pieces: list[Piece], marks: tuple[str, ...]) -> bool:
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            pieces.append(TextPiece(self._held[:at], self._thinking))
            self._held = self._held[at + len(mark) :]
            if mark == _THOUGHT:
                self._thinking, self._at_start, self._skips_lines = False, True, True
            else:
                self._between, self._raw = True, mark
            return True
        keep = max((_overlap(self._held, mark) for mark in marks), default=0)
        cut = len(self._held) - keep
        pieces.append(TextPiece(self._held[:cut], self._thinking))
        self._held = self._held[cut:]
        return False

    def _take_between(self, pieces: list[Piece]) -> bool:
        char = self._held[0]
        if char == "{":
            self._object, self._between = _CallObject(), False
            return True
        if char in " \n\t\r,;[]":
            self._raw, self._held = self._raw + char, self._held[1:]
            return True
        for mark in (_CLOSING, *_OPENINGS):
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                self._raw = "" if self.num_calls else self._raw + mark
                return True
            if mark.startswith(self._held):
                return False
        if self.num_calls == 0:
            pieces.append(TextPiece(self._raw))  # not a call
        elif self._only_calls:
            self._held = ""
        self._raw, self._between = "", False
        return bool(self._held)

    def _take_call(self, pieces: list[Piece]) -> bool:
        assert self._object is not None
        used, arguments = self._object.push(self._held)
        self._raw += self._held[:used]
        self._held = self._held[used:]
        if self._object.has_started:
            if arguments is not None:
                if self._object.is_new:
                    self._object.is_new = False
                    pieces.append(CallStart(self.num_calls, self._object.name))
                pieces.append(CallArguments(self.num_calls, arguments))
            self._raw = ""
        if self._object.is_over:
            if self._object.has_started:
                self.num_calls += 1
                self._between = True
            else:
                pieces.append(TextPiece(self._raw))
                self._raw = ""
            self._object = None
            return bool(self._held)
        return False


class _CallObject:
    """Reads {"name": ..., "arguments": {...}} character by character."""

    def __init__(self) -> None:
        self.name = ""
        self.has_started = False  # the name is known and the arguments have started
        self.is_new = True
        self.is_over = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._text = ""  # the string being read at the first level
        self._key: str | None = None
        self._expects_value = False
        self._arguments = ""  # not passed on yet
        self._has_arguments = False

    def push(self, text: str) -> tuple[int, str | None]:
        """How much of the text belongs to the object, and the new part of the arguments (None: the call has not started)."""
        for i, char in enumerate(text):
            self._take(char)
            if self.is_over:
                return i + 1, self._new_arguments()
        return len(text), self._new_arguments()

    def _new_arguments(self) -> str | None:
        if not self.has_started and self.name and self._has_arguments:
            self.has_started = True
        if not self.has_started:
            return None
        new, self._arguments = self._arguments, ""
        return new

    def _take(self, char: str) -> None:
        in_arguments = self._expects_value and self._key in _ARGUMENTS
        if self._in_string:
            if self._depth == 1:
                self._text += char
            if in_arguments:
                self._arguments += char
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._string_ends()
            return
        if char == '"':
            self._in_string, self._text = True, '"'
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self.is_over = True
                return
        elif self._depth == 1 and char == ":" and not self._expects_value:
            self._expects_value = True
            return
        elif self._depth == 1 and char == ",":
            self._key, self._expects_value = None, False
            return
        if in_arguments and self._depth >= 1 and (self._has_arguments or not char.isspace()):
            self._has_arguments = True
            self._arguments += char

    def _string_ends(self) -> None:
        try:
            value = json.loads(self._text)
        except ValueError:
            return
        if not self._expects_value:
            self._key = value
        elif self._key == "name":
            self.name = value


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the mark."""
    return next((num for num in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-num:])), 0)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Without empty pieces; adjacent pieces of the same kind are merged."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if isinstance(piece, TextPiece) and not piece.text:
            continue
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece) and last.is_reasoning == piece.is_reasoning:
            made[-1] = TextPiece(last.text + piece.text, piece.is_reasoning)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            made[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            made.append(piece)
    return made


# ---- the grammar of forced calls

_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # maps from names to schemas
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas


def call_grammar(tools: list[dict[str, Any]], name: str | None, several: bool) -> Grammar:
    """The grammar of an output that must call one of the tools, or the named one: `several` allows a list of calls.

    The parameters of each tool become one definition, with the tool's own definitions inside it: their names cannot clash, and
    references still resolve.
    """
    chosen = [tool for tool in tools if name is None or tool["name"] == name]
    if not chosen:
        what = (
            "requires a tool call, but there are no tools"
            if name is None
            else f"names {name[:100]!r}, which is not among the tools"
        )
        raise InvalidRequest(f"tool_choice {what}.", fix="Send the tool in tools, or another tool_choice.", param="tool_choice")
    definitions, calls = {}, []
    for i, tool in enumerate(chosen):
        definitions[str(i)] = _relocated(tool.get("parameters") or {"type": "object"}, f"#/$defs/{i}")
        call = {"name": {"const": tool["name"]}, "arguments": {"$ref": f"#/$defs/{i}"}}
        calls.append(
            {"type": "object", "properties": call, "required": ["name", "arguments"], "additionalProperties": False},
        )
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_FORCED_CALLS} if several else one
    return Grammar("json_schema", json.dumps({"$defs": definitions, **schema}))


def _relocated(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema document as a part of another: its references to itself point to its new `place`."""
    own_id = schema.get("$id")
    prefixes = ["#"] if not isinstance(own_id, str) else ["#", own_id.rstrip("#") + "#"]

    def reference(target: str) -> str:
        for prefix in prefixes:
            if target == prefix or target.startswith(prefix + "/"):
                return place + target[len(prefix) :]
        return target

    def schemas(value: Any) -> Any:
        if isinstance(value, list):
            return [schemas(one) for one in value]
        if not isinstance(value, dict) or "$id" in value:  # a document of its own
            return value
        made: dict[str, Any] = {}
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str):
                made[key] = reference(inner)
            elif key in _NAMED_SCHEMAS and isinstance(inner, dict):
                made[key] = {name: schemas(one) for name, one in inner.items()}
            else:
                made[key] = inner if key in _VALUES else schemas(inner)
        return made

    return schemas({key: value for key, value in schema.items() if key not in ("$id", "$schema")})
