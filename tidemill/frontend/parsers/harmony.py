"""The channels of gpt-oss: <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..."""

from __future__ import annotations

import re
from enum import Enum, auto

from tidemill.frontend.parsers.families import HARMONY, JSON
from tidemill.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Functions,
    OutputParser,
    Piece,
    TextPiece,
    joined,
    until,
)
from tidemill.frontend.parsers.tagged import TaggedParser

_MESSAGE = "<|message|>"
_ENDS = ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.:/-]+?)(?=\s|<|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEAD_CHARS = 1024


class _State(Enum):
    START = auto()
    HEAD = auto()
    REASONING = auto()
    CALL = auto()
    TEXT = auto()


class HarmonyParser(OutputParser):
    """A message for a function of the request is a call, one on the analysis channel is reasoning,
    all others are text."""

    def __init__(
        self, functions: Functions, with_reasoning: bool = True, only_calls: bool = False
    ) -> None:
        self._functions, self._with_reasoning = functions, with_reasoning
        self._content = TaggedParser(JSON, functions, only_calls=True) if only_calls else None
        self._state = _State.START
        self._held = self._head = ""
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        rest = self._head + self._held
        is_mark = self._state is _State.CALL or (
            self._state in (_State.HEAD, _State.START) and rest.startswith("<|")
        )
        if not is_mark:  # one that broke off is neither text nor an argument
            self._emit(rest, pieces)
        self._held = self._head = ""
        if self._content is not None:
            pieces += self._content.finish()
        return joined(pieces)

    @property
    def has_called(self) -> bool:
        # what ends a call is not part of the text
        is_called = self._num_calls > 0 or self._state is _State.CALL
        return is_called or (self._content is not None and self._content.has_called)

    def _step(self, pieces: list[Piece]) -> bool:
        if self._state is _State.START:
            if any(mark != self._held and mark.startswith(self._held) for mark in _ENDS):
                return False
            self._state = _State.HEAD if self._held.startswith(_ENDS) else _State.TEXT
        if self._state is _State.HEAD:
            return self._read_head(pieces)
        text, mark, self._held = until(self._held, _ENDS)
        self._emit(text, pieces)
        if mark:
            self._num_calls += self._state is _State.CALL
            self._state, self._head = _State.HEAD, mark
        return bool(mark)

    def _read_head(self, pieces: list[Piece]) -> bool:
        text, mark, self._held = until(self._held, (_MESSAGE,))
        self._head += text
        if not mark and len(self._head) <= _HEAD_CHARS:
            return False
        head, self._head = self._head, ""
        if len(head) > _HEAD_CHARS:
            self._state, self._held = _State.TEXT, head[_HEAD_CHARS:] + mark + self._held
            self._emit(head[:_HEAD_CHARS], pieces)
            return True
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.findall(head)
        if recipient and recipient[1] in self._functions:
            self._state = _State.CALL
            pieces.append(CallStart(self._num_calls, recipient[1], HARMONY.new_id()))
        else:
            self._state = (
                _State.REASONING
                if self._with_reasoning and channel[-1:] == ["analysis"]
                else _State.TEXT
            )
        return True

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if self._state is _State.CALL:
            pieces.append(CallArguments(self._num_calls, text))
        elif self._state is _State.REASONING:
            pieces.append(TextPiece(text, True))
        elif self._content is not None:
            pieces += self._content.push(text)
        else:
            pieces.append(TextPiece(text))
