"""The pieces of a parsed output, and the parts that all parsers share."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

# the request's tools: the schema of the parameters by name
Functions: TypeAlias = Mapping[str, dict[str, Any]]


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


class OutputParser(ABC):
    """Parses one sample's text while it streams. However the text is cut, the pieces add up to the
    same."""

    @abstractmethod
    def push(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def finish(self) -> list[Piece]:
        """End of the output: text that was held back is emitted, unless it belongs to a call."""

    @property
    @abstractmethod
    def has_called(self) -> bool:
        """A whole call is among what was parsed."""


class Status(Enum):
    READING = auto()  # it may still turn out not to be a call
    STARTED = auto()  # the name is known, and arguments are coming
    DONE = auto()
    FAILED = auto()  # not a call


class CallReader(ABC):
    """Reads one call. Where it is done or fails depends on the text alone, not on how the text is
    cut."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.name = ""
        self.status = Status.READING

    @abstractmethod
    def push(self, text: str) -> tuple[int, str]:
        """Takes text; returns how much of it was used, and the new part of the arguments."""


def until(text: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """The text before the first of the marks, that mark, and the rest. Without a mark the rest is
    what may become one."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        at, mark = found
        return text[:at], mark, text[at + len(mark) :]
    cut = len(text) - max((_overlap(text, mark) for mark in marks), default=0)
    return text[:cut], "", text[cut:]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the mark."""
    return next(
        (
            num
            for num in range(min(len(text), len(mark) - 1), 0, -1)
            if mark.startswith(text[-num:])
        ),
        0,
    )


def joined(pieces: list[Piece]) -> list[Piece]:
    """Without empty pieces; adjacent pieces of the same kind are merged."""
    joined_pieces: list[Piece] = []
    for piece in pieces:
        last = joined_pieces[-1] if joined_pieces else None
        if not isinstance(piece, CallStart) and not piece.text:
            continue
        if (
            isinstance(piece, TextPiece)
            and isinstance(last, TextPiece)
            and last.is_reasoning == piece.is_reasoning
        ):
            joined_pieces[-1] = TextPiece(last.text + piece.text, piece.is_reasoning)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == piece.index
        ):
            joined_pieces[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            joined_pieces.append(piece)
    return joined_pieces
