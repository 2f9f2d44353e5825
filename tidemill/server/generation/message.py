"""MessageReader: the text of one sample as parts of a message, which are text, reasoning and calls
of functions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from tidemill.frontend.parsers import CallStart, OutputParser, Piece, TextPiece

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Part:
    """A part of a message. A new one begins where the kind of output changes, and with each
    call."""

    kind: Kind
    number: int  # among the parts of the message
    name: str = ""  # of the function that is called
    call_id: str = ""
    index: int = 0  # among the calls
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or a call's arguments as they were written."""
        return "".join(self.pieces)

    def arguments(self) -> msgspec.Raw | None:
        """A call's arguments as a JSON object on one line, with numbers of any size; None if they
        were cut off or are none."""
        try:
            value = json.loads(self.text or "{}")
            return (
                msgspec.Raw(json.dumps(value, allow_nan=False).encode())
                if isinstance(value, dict)
                else None
            )
        except (ValueError, RecursionError):
            return None


class PartEvent(NamedTuple):
    """A change of a part by new output: it begins, gets more text, or ends."""

    stage: Literal["begin", "more", "end"]
    part: Part
    text: str = ""


class MessageReader:
    """Reads the text of one sample while it streams."""

    def __init__(
        self, parser: OutputParser, one_call: bool = False, keeps_text: bool = True
    ) -> None:
        """`one_call`: calls after the first are left out. `keeps_text`: a long stream would hold
        it in vain; reasoning and calls are kept."""
        self._parser, self._one_call, self._keeps_text = parser, one_call, keeps_text
        self.parts: list[Part] = []
        self._is_open = False  # the last part

    def read(self, text: str, is_last: bool) -> list[PartEvent]:
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        events = [event for piece in pieces for event in self._events(piece)]
        return [*events, *self._end()] if is_last else events

    def _events(self, piece: Piece) -> list[PartEvent]:
        if isinstance(piece, TextPiece):
            kind: Kind = "reasoning" if piece.is_reasoning else "text"
            goes_on = self._is_open and self.parts[-1].kind == kind
            return [
                *([] if goes_on else self._begin(Part(kind, len(self.parts)))),
                self._more(piece.text),
            ]
        if self._one_call and piece.index > 0:
            return []
        if isinstance(piece, CallStart):
            part = Part("call", len(self.parts), piece.name, piece.call_id, piece.index)
            return self._begin(part)
        return [self._more(piece.text)]

    def _begin(self, part: Part) -> list[PartEvent]:
        events = self._end()
        self.parts.append(part)
        self._is_open = True
        return [*events, PartEvent("begin", part)]

    def _more(self, text: str) -> PartEvent:
        if self._keeps_text or self.parts[-1].kind != "text":
            self.parts[-1].pieces.append(text)
        return PartEvent("more", self.parts[-1], text)

    def _end(self) -> list[PartEvent]:
        was_open, self._is_open = self._is_open, False
        return [PartEvent("end", self.parts[-1])] if was_open else []

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "call"]

    def text_of(self, kind: Kind) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    def ends_with_calls(self, reason: str | None, stop: str | int | None) -> bool:
        """Tells if the client is to run calls. A call that a stop string cuts is none to run."""
        calls = self.calls
        if reason != "stop" or not calls:
            return False
        return not isinstance(stop, str) or _is_json(calls[-1].text or "{}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
