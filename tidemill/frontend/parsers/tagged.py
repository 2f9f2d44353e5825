"""The parser of every family whose calls stand in the text, with or without marks around them."""

from __future__ import annotations

from enum import Enum, auto

from tidemill.frontend.parsers.families import Family
from tidemill.frontend.parsers.pieces import (
    CallArguments,
    CallReader,
    CallStart,
    Functions,
    OutputParser,
    Piece,
    Status,
    TextPiece,
    joined,
    until,
)
from tidemill.frontend.parsers.reasoning import Markers

_SEPARATORS = " \n\t\r,;[]"
_MAX_SPACE = 4096  # at the start; then it is text


class _State(Enum):
    OPENED = auto()  # the prompt opened the reasoning, and the output may open it again
    REASONING = auto()
    LINES = auto()  # empty ones after the reasoning
    START = auto()  # nothing but whitespace so far
    TEXT = auto()
    BETWEEN = auto()  # after an opening or a call
    CALL = auto()
    OVER = auto()


class TaggedParser(OutputParser):
    """`family` None: no calls. `only_calls`: the whole output is one or more calls."""

    def __init__(
        self,
        family: Family | None,
        functions: Functions,
        reasoning: Markers | None = None,
        is_open: bool = False,
        only_calls: bool = False,
    ) -> None:
        self._family, self._functions, self._reasoning, self._only_calls = (
            family,
            functions,
            reasoning,
            only_calls,
        )
        self._state = _State.OPENED if reasoning and is_open else _State.START
        self._marks = (*family.openings, *family.starts) if family else ()
        self._held = ""
        self._raw: list[str] = []  # what may belong to a call; emitted as text if it does not
        self._has_opening = False  # in `_raw`
        self._reader: CallReader | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and _STEPS[self._state](self, pieces):
            pass
        return joined(pieces)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state in (_State.OPENED, _State.REASONING):
            return joined([TextPiece(held, True)])
        if self._state is _State.CALL:
            assert self._reader is not None
            is_text = self._reader.status is Status.READING
        else:
            is_text = self._state is not _State.BETWEEN or self._has_opening or not self._num_calls
        return joined([TextPiece(self._take_raw() + held)]) if is_text else []

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    # Each step takes some of the held text. False: more text is needed first.

    def _opened(self, pieces: list[Piece]) -> bool:
        assert self._reasoning is not None
        stripped = self._held.lstrip()
        if (
            self._reasoning.opening != stripped
            and self._reasoning.opening.startswith(stripped)
            and self._is_short(stripped)
        ):
            return False
        if stripped.startswith(self._reasoning.opening):
            self._held = stripped[len(self._reasoning.opening) :]
        self._state = _State.REASONING
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        assert self._reasoning is not None
        text, mark, self._held = until(self._held, (self._reasoning.ending,))
        pieces.append(TextPiece(text, True))
        if mark:
            self._state, self._reasoning = _State.LINES, None
        return bool(mark)

    def _lines(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = _State.START
        return bool(self._held)

    def _start(self, pieces: list[Piece]) -> bool:
        stripped = self._held.lstrip()
        marks = (self._reasoning.opening, *self._marks) if self._reasoning else self._marks
        if any(mark != stripped and mark.startswith(stripped) for mark in marks) and self._is_short(
            stripped
        ):
            return False
        if self._reasoning and stripped.startswith(self._reasoning.opening):
            self._held, self._state = stripped[len(self._reasoning.opening) :], _State.REASONING
            return True
        self._state, self._reasoning = _State.TEXT, None
        if (
            self._family
            and stripped
            and stripped[0] in self._family.bare
            and not stripped.startswith(self._marks)
        ):
            self._raw = [self._held[: len(self._held) - len(stripped)]]
            self._held, self._state = stripped, _State.BETWEEN
        return True

    def _is_short(self, stripped: str) -> bool:
        return len(self._held) - len(stripped) < _MAX_SPACE

    def _text(self, pieces: list[Piece]) -> bool:
        text, mark, self._held = until(self._held, self._marks)
        pieces.append(TextPiece(text))
        if not mark:
            return False
        assert self._family is not None
        self._open(mark)
        self._state = _State.BETWEEN
        return True

    def _open(self, mark: str) -> None:
        """An opening is passed over; what a call starts with is its reader's."""
        assert self._family is not None
        if mark in self._family.openings:
            self._raw.append(mark)
            self._has_opening = True
        else:
            self._held = mark + self._held

    def _between(self, pieces: list[Piece]) -> bool:
        assert self._family is not None
        for mark in (*self._family.closings, *self._family.openings):
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                if mark in self._family.openings:
                    self._open(mark)
                elif self._num_calls and not self._has_opening:
                    self._raw = []
                else:
                    self._raw.append(mark)
                return True
            if mark.startswith(self._held):
                return False
        char = self._held[0]
        if char in _SEPARATORS:
            self._raw.append(char)
            self._held = self._held[1:]
            return True
        if self._num_calls and not self._has_opening:
            self._take_raw()  # what separated it from the last call
        self._reader = self._family.begin(char, self._functions)
        if self._reader is not None:
            self._state = _State.CALL
            return True
        pieces.append(TextPiece(self._take_raw()))
        self._state = _State.OVER if self._only_calls and self._num_calls else _State.TEXT
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        assert self._reader is not None
        assert self._family is not None
        reader, was = self._reader, self._reader.status
        used, arguments = reader.push(self._held)
        taken, self._held = self._held[:used], self._held[used:]
        if reader.status is Status.READING:
            self._raw.append(taken)
            return False
        if reader.status is Status.FAILED:
            pieces.append(TextPiece(self._take_raw() + taken))
            self._state = _State.TEXT
            return True
        if was is Status.READING:
            self._take_raw()
            pieces.append(CallStart(self._num_calls, reader.name, self._family.new_id()))
        pieces.append(CallArguments(self._num_calls, arguments))
        if reader.status is Status.DONE:
            self._num_calls += 1
            self._state = _State.BETWEEN
        return reader.status is Status.DONE

    def _over(self, pieces: list[Piece]) -> bool:
        self._held = ""
        return False

    def _take_raw(self) -> str:
        raw, self._raw, self._has_opening = "".join(self._raw), [], False
        return raw


_STEPS = {
    _State.OPENED: TaggedParser._opened,
    _State.REASONING: TaggedParser._reason,
    _State.LINES: TaggedParser._lines,
    _State.START: TaggedParser._start,
    _State.TEXT: TaggedParser._text,
    _State.BETWEEN: TaggedParser._between,
    _State.CALL: TaggedParser._call,
    _State.OVER: TaggedParser._over,
}
