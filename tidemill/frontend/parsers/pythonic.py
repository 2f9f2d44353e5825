"""Calls as Python writes them: [get_weather(city="Hull"), tide(hours=6)]."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from tidemill.frontend.parsers.pieces import CallReader, Functions, Status

_MAX_CHARS = 2**16  # of a call; Python's own parser reads it
_MAX_DEPTH = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]")
_WORDS = {"true": True, "false": False, "null": None}  # as JSON writes them


class PythonReader(CallReader):
    """A call is passed on when its bracket closes: its values are Python's, and become JSON."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._chars: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> tuple[int, str]:
        for i, char in enumerate(text):
            if not self._depth:
                if not self._take_name(char):
                    self.status = Status.FAILED
                    return i, ""
            elif not self._take(char):
                self.status = Status.FAILED
                return i + 1, ""
            elif not self._depth:
                return i + 1, self._read()
        return len(text), ""

    def _take_name(self, char: str) -> bool:
        if char == "(":
            self.name, self._depth = "".join(self._chars), 1
            self._chars = []
            return self.name in self.functions
        self._chars.append(char)
        return len(self._chars) <= 256 and bool(_NAME.match(char))

    def _take(self, char: str) -> bool:
        self._chars.append(char)
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return self._depth <= _MAX_DEPTH and len(self._chars) <= _MAX_CHARS

    def _read(self) -> str:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes in strings
                call = ast.parse(f"f({''.join(self._chars)}", mode="eval").body
            assert isinstance(call, ast.Call)
            arguments = json.dumps(self._arguments(call), ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
            self.status = Status.FAILED
            return ""
        self.status = Status.DONE
        return arguments

    def _arguments(self, call: ast.Call) -> dict[str, Any]:
        """Values without a name are taken in the order of the schema's properties."""
        properties = list(self.functions[self.name].get("properties") or {})
        if len(call.args) > len(properties):
            raise ValueError("more values than parameters")
        arguments = {name: _value(node) for name, node in zip(properties, call.args, strict=False)}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError("not a name of its own")
            arguments[keyword.arg] = _value(keyword.value)
        return arguments


def _value(node: ast.expr) -> Any:
    """Literals only; nothing is evaluated."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is not a string")
        return {key: _value(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value that JSON has")
    return value
