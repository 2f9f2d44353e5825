"""Calls whose arguments are JSON. They are passed on exactly as the model wrote them."""

from __future__ import annotations

import json
import re
from abc import abstractmethod

from tidemill.frontend.parsers.pieces import CallReader, Functions, Status

MAX_UNDECIDED = 2**16  # characters of what may be a call, before its name is known
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]")
_NAME_CHARS = 256


class JSONScanner:
    """Follows the brackets and strings of JSON, character by character."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._is_escaped = False

    def take(self, char: str) -> None:
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ObjectReader(CallReader):
    """{"name": ..., "arguments": {...}}, or "parameters"; in any order, and among other members."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._scanner = JSONScanner()
        self._string: list[str] = []  # the one being read at the first level
        self._key: str | None = None
        self._expects_value = False
        self._arguments: list[str] = []  # not passed on yet
        self._has_begun = False  # the arguments
        self._num_chars = 0

    def push(self, text: str) -> tuple[int, str]:
        used = len(text)
        for i, char in enumerate(text):
            self._take(char)
            if self.status in (Status.DONE, Status.FAILED):
                used = i + 1
                break
        if self.status in (Status.READING, Status.FAILED):
            return used, ""
        new, self._arguments = "".join(self._arguments), []
        return used, new

    def _take(self, char: str) -> None:
        scanner, depth = self._scanner, self._scanner.depth
        in_arguments = self._expects_value and self._key in _ARGUMENTS
        was_string = scanner.in_string
        scanner.take(char)
        if depth == 1 and (was_string or scanner.in_string):
            self._string.append(char)
            if was_string and not scanner.in_string:
                self._string_ends()
        elif depth == 1 and char == ":" and not self._expects_value:
            self._expects_value = True
            return
        elif depth == 1 and char == ",":
            self._key, self._expects_value = None, False
            return
        if scanner.depth <= 0:
            self.status = Status.DONE if self.status is Status.STARTED else Status.FAILED
            return
        if (
            in_arguments
            and self.status is not Status.FAILED
            and (self._has_begun or not char.isspace())
        ):
            self._arguments.append(char)
            self._has_begun = True
            if self.name and self.status is Status.READING:
                self.status = Status.STARTED
        self._num_chars += 1
        if self._num_chars > MAX_UNDECIDED and self.status is Status.READING:
            self.status = Status.FAILED

    def _string_ends(self) -> None:
        text, self._string = "".join(self._string), []
        try:
            value = json.loads(text)
        except ValueError:
            return
        if not self._expects_value:
            self._key = value
        elif self._key == "name" and not self.name:
            self.name = value
            if value not in self.functions:
                self.status = Status.FAILED
            elif self._has_begun:
                self.status = Status.STARTED


class HeadedReader(CallReader):
    """A head that ends with the bracket of the arguments, and holds the name in the way of a
    family."""

    head_chars = _NAME_CHARS

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._scanner = JSONScanner()
        self._head = ""

    def push(self, text: str) -> tuple[int, str]:
        begin = 0
        for i, char in enumerate(text):
            if self.status is Status.READING:
                begin = i
                if char != "{":
                    self._head += char
                    if len(self._head) > self.head_chars or not self.may_be_head(self._head):
                        self.status = Status.FAILED
                        return i, ""
                    continue
                self.name = self.name_in(self._head)
                self.status = Status.STARTED if self.name in self.functions else Status.FAILED
                if self.status is Status.FAILED:
                    return i, ""
            self._scanner.take(char)
            if self._scanner.depth <= 0:
                self.status = Status.DONE
                return i + 1, text[begin : i + 1]
        return len(text), text[begin:] if self.status is Status.STARTED else ""

    @abstractmethod
    def may_be_head(self, head: str) -> bool:
        """A head may begin like this."""

    @abstractmethod
    def name_in(self, head: str) -> str:
        """The function that a whole head names."""


class MistralReader(HeadedReader):
    """name[ARGS]{...}, with [CALL_ID] and an id before [ARGS], or neither."""

    def may_be_head(self, head: str) -> bool:
        name, bracket, rest = head.partition("[")
        if not bracket:
            return bool(_NAME.match(head[-1]))
        return bool(name) and any(
            _matches(bracket + rest, mark) for mark in ("[ARGS]", "[CALL_ID]")
        )

    def name_in(self, head: str) -> str:
        return head.partition("[")[0]


class DeepSeekReader(HeadedReader):
    """<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}, or function<｜tool▁sep｜>name and the arguments in a
    fence of Markdown."""

    BEGIN, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    head_chars = 2 * _NAME_CHARS

    def may_be_head(self, head: str) -> bool:
        return _matches(head, self.BEGIN)

    def name_in(self, head: str) -> str:
        name, _, later = head.removeprefix(self.BEGIN).partition(self.SEPARATOR)
        return (later.strip().partition("\n")[0] or name).strip()


def _matches(text: str, mark: str) -> bool:
    """One is the start of the other."""
    return text.startswith(mark) or mark.startswith(text)
