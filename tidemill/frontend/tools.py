"""Tool calls and reasoning in a model's text, told apart from its words while they come.

One parser serves streamed and whole answers, and a call's arguments are passed on as the model wrote them: what is streamed
adds up to what is sent whole. Forms: <tool_call>{...}</tool_call> (Hermes, Qwen), [TOOL_CALLS][{...}] (Mistral), an object or
a list of them as the whole answer, perhaps after <|python_tag|> (Llama 3, plain JSON). An object is a call if it has a name, and
arguments or parameters.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CLOSING = "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class Words:
    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class CallBegins:
    index: int
    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(slots=True)
class CallArguments:
    index: int
    text: str


Piece: TypeAlias = Words | CallBegins | CallArguments


class AnswerParser:
    """`tools`: look for calls. `only_calls`: the whole answer is one or more calls."""

    def __init__(self, tools: bool, only_calls: bool = False) -> None:
        self._tools, self._only_calls = tools, only_calls
        self._held = ""  # may become an opening
        self._at_start = True
        self._thinking = False
        self._skips_lines = False  # after the reasoning
        self._object: _CallObject | None = None
        self._between = False  # after an opening or a call, where only brackets, commas and space stand
        self._raw = ""  # of what may be a call, to be given back as words if it is none
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back is words, unless it belongs to a call."""
        pieces: list[Piece] = []
        if self._object is not None:
            if not self._object.has_begun:
                pieces.append(Words(self._raw + self._held))
        elif self._held and not (self._between and self.num_calls):
            pieces.append(Words(self._raw + self._held, self._thinking))
        elif self._raw and not self.num_calls:
            pieces.append(Words(self._raw))
        self._held = self._raw = ""
        return _joined(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        """Consume some of what is held; False: more must come first."""
        if self._skips_lines:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held
            return bool(self._held)
        if self._object is not None:
            return self._take_call(pieces)
        if self._between:
            return self._take_between(pieces)
        if self._thinking:
            return self._take_words(pieces, (_THOUGHT,))
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
        return self._take_words(pieces, _OPENINGS if self._tools else ())

    def _take_words(self, pieces: list[Piece], marks: tuple[str, ...]) -> bool:
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            pieces.append(Words(self._held[:at], self._thinking))
            self._held = self._held[at + len(mark) :]
            if mark == _THOUGHT:
                self._thinking, self._at_start, self._skips_lines = False, True, True
            else:
                self._between, self._raw = True, mark
            return True
        keep = max((_overlap(self._held, mark) for mark in marks), default=0)
        cut = len(self._held) - keep
        pieces.append(Words(self._held[:cut], self._thinking))
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
            pieces.append(Words(self._raw))  # it was no call
        elif self._only_calls:
            self._held = ""
        self._raw, self._between = "", False
        return bool(self._held)

    def _take_call(self, pieces: list[Piece]) -> bool:
        assert self._object is not None
        used, said = self._object.push(self._held)
        self._raw += self._held[:used]
        self._held = self._held[used:]
        if self._object.has_begun:
            if said is not None:
                if self._object.is_new:
                    self._object.is_new = False
                    pieces.append(CallBegins(self.num_calls, self._object.name))
                pieces.append(CallArguments(self.num_calls, said))
            self._raw = ""
        if self._object.is_over:
            if self._object.has_begun:
                self.num_calls += 1
                self._between = True
            else:
                pieces.append(Words(self._raw))
                self._raw = ""
            self._object = None
            return bool(self._held)
        return False


class _CallObject:
    """{"name": ..., "arguments": {...}}, character by character."""

    def __init__(self) -> None:
        self.name = ""
        self.has_begun = False  # a name is known, and arguments have begun
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
        """How much of the text belongs to the object, and what to pass on of the arguments (None: nothing to say yet)."""
        for i, char in enumerate(text):
            self._take(char)
            if self.is_over:
                return i + 1, self._say()
        return len(text), self._say()

    def _say(self) -> str | None:
        if not self.has_begun and self.name and self._has_arguments:
            self.has_begun = True
        if not self.has_begun:
            return None
        said, self._arguments = self._arguments, ""
        return said

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
    """The longest end of the text that is a beginning of the mark."""
    return next((num for num in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-num:])), 0)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Without empty ones, and neighbours of a kind as one."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if isinstance(piece, Words) and not piece.text:
            continue
        if isinstance(piece, Words) and isinstance(last, Words) and last.is_reasoning == piece.is_reasoning:
            made[-1] = Words(last.text + piece.text, piece.is_reasoning)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            made[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            made.append(piece)
    return made


def call_schema(tools: list[dict[str, Any]], name: str | None, several: bool) -> dict[str, Any]:
    """What an answer must be that has to call one of these tools, or the named one."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "arguments": tool.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if name is None or tool["name"] == name
    ]
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": one, "minItems": 1, "maxItems": 16} if several else one
