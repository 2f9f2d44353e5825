"""Calls as Qwen3-Coder writes them: <function=name><parameter=x>value</parameter></function>.

Values are text; the tool's schema says what they are. Arguments are passed on parameter by
parameter.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from tidemill.frontend.parsers.pieces import CallReader, Functions, Status, until
from tidemill.frontend.parsers.schema_types import convert

BEGIN, END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_CHARS = 256


class _State(Enum):
    NAME = auto()
    BETWEEN = auto()  # parameters
    KEY = auto()
    VALUE = auto()


class XMLReader(CallReader):
    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._state = _State.NAME
        self._held = ""
        self._key = ""
        self._value: list[str] = []
        self._keys: set[str] = set()

    def push(self, text: str) -> tuple[int, str]:
        used, arguments = 0, ""
        if self._state is _State.NAME:
            used = self._read_name(text)
            if self._state is _State.NAME:
                return used, ""
            arguments = "{"
        self._held += text[used:]
        while self.status is Status.STARTED:
            before = self._state, self._held
            arguments += self._step()
            if before == (self._state, self._held):
                break
        if self.status is Status.DONE:
            return len(text) - len(self._held), arguments
        return len(text), arguments

    def _read_name(self, text: str) -> int:
        """Reads the name; returns how much of the text was used."""
        for i, char in enumerate(text):
            head = self._held + char
            if len(head) > len(BEGIN) and char == ">":
                self.name, self._held = self._held[len(BEGIN) :].strip().strip("\"'"), ""
                if self.name not in self.functions:
                    self.status = Status.FAILED
                    return i
                self._state, self.status = _State.BETWEEN, Status.STARTED
                return i + 1
            if (
                not (head.startswith(BEGIN) or BEGIN.startswith(head))
                or len(head) > len(BEGIN) + _NAME_CHARS
                or char == "\n"
            ):
                self.status = Status.FAILED
                return i
            self._held = head
        return len(text)

    def _step(self) -> str:
        """New arguments."""
        if self._state is _State.BETWEEN:
            _, mark, self._held = until(self._held, (_PARAMETER, END))
            if mark == _PARAMETER:
                self._state, self._key = _State.KEY, ""
            elif mark:
                self.status = Status.DONE
                return "}"
        elif self._state is _State.KEY:
            key, mark, self._held = until(self._held, (">",))
            self._key += key if len(self._key) < _NAME_CHARS else ""
            if mark:
                self._state, self._value = _State.VALUE, []
        else:
            value, mark, rest = until(self._held, (_PARAMETER_END, END))
            self._value.append(value)
            self._held = mark + rest if mark == END else rest  # END ends the call as well
            if mark:
                self._state = _State.BETWEEN
                return self._member("".join(self._value))
        return ""

    def _member(self, value: str) -> str:
        key = self._key.strip().strip("\"'")
        if key in self._keys:
            return ""
        self._keys.add(key)
        value = value.removeprefix("\n").removesuffix("\n")
        comma = ", " if len(self._keys) > 1 else ""
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: {convert(value, key, self.functions[self.name])}"
