"""The inputs that a chat template takes, found out by rendering small conversations with it.

Templates differ in whether content is a string or a list of parts, whether the arguments of a call
are an object or its JSON text, whether content may be null beside calls, and in which roles they
know. Each question is asked once, when a conversation needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from os.path import commonprefix
from typing import Any

Message = dict[str, Any]
Write = Callable[[list[Message], list[dict[str, Any]] | None], str]

_TEXT, _OTHER, _NAME, _KEY, _VALUE = "Qzprobe", "Yzother", "qzfunction", "qzkey", "qzvalue"
_ARGUMENTS = {_KEY: _VALUE}
_ARGUMENTS_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
_CALL_ID = "qzcall012"  # nine characters, which Mistral's templates require
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "x"}},
            "required": [_KEY],
        },
    },
}


class TemplateProbe:
    """`write` renders a conversation with tools; it may raise anything."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._takes: dict[tuple[str, bool], bool] = {}

    def _written(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """An empty text if the template cannot."""
        try:
            return self._write(messages, tools)
        except Exception:  # of the model's own code
            return ""

    # ---- content

    def takes(self, role: str, parts: bool) -> bool:
        """Content of such a message may be a list of parts, or a string."""
        if role not in _ROLES:
            return not parts
        if (role, parts) not in self._takes:
            text = self._written(self._around(role, _content(_TEXT, parts)))
            self._takes[role, parts] = _TEXT in text and not any(
                quoted in text for quoted in ("'type'", '"type": "text"')
            )
        return self._takes[role, parts]

    def _around(self, role: str, content: Any) -> list[Message]:
        if role == "user":
            return [{"role": "user", "content": content}]
        if role == "tool":
            return [
                self._user,
                self._caller,
                {"role": "tool", "name": _NAME, "tool_call_id": _CALL_ID, "content": content},
            ]
        if role == "assistant":
            return [self._user, {"role": role, "content": content}, self._user]
        return [{"role": role, "content": content}, self._user]

    @property
    def _user(self) -> Message:
        return {
            "role": "user",
            "content": _content(
                _OTHER, parts=not self.takes("user", False) and self.takes("user", True)
            ),
        }

    @property
    def _caller(self) -> Message:
        content = None if self.takes_null else ""
        return self._calling(
            _ARGUMENTS_TEXT if self.takes_arguments_as_text else _ARGUMENTS, content
        )

    @cached_property
    def refuses_system(self) -> bool:
        """A conversation with a system message cannot be rendered; one without it can."""
        return not any(self.takes("system", parts) for parts in (False, True)) and any(
            self.takes("user", parts) for parts in (False, True)
        )

    # ---- calls

    def _calling(self, arguments: Any, content: Any) -> Message:
        call = {
            "id": _CALL_ID,
            "type": "function",
            "function": {"name": _NAME, "arguments": arguments},
        }
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    def _call_text(self, arguments: Any, content: Any) -> str:
        """The text of a call after a user's message; empty if it is not there as JSON or as key and
        value."""
        text = self._written([self._user, self._calling(arguments, content)], [_TOOL])
        is_whole = _NAME in text.rpartition(_OTHER)[2] and _KEY in text and _VALUE in text
        return "" if not is_whole or f"'{_KEY}':" in text else text

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        """Arguments of calls must be JSON text: objects are not written."""
        if any(self._call_text(_ARGUMENTS, content) for content in ("", None)):
            return False
        return any(self._call_text(_ARGUMENTS_TEXT, content) for content in ("", None))

    @cached_property
    def writes_calls(self) -> bool:
        """Calls in the history are part of the prompt."""
        arguments = _ARGUMENTS_TEXT if self.takes_arguments_as_text else _ARGUMENTS
        return any(self._call_text(arguments, content) for content in ("", None))

    @cached_property
    def writes_results(self) -> bool:
        """Results of calls are part of the prompt."""
        return self.takes("tool", False) or self.takes("tool", True)

    @cached_property
    def takes_null(self) -> bool:
        """Content may be null beside calls."""
        arguments = _ARGUMENTS_TEXT if self.takes_arguments_as_text else _ARGUMENTS
        text = self._call_text(arguments, None)
        return bool(text) and "None" not in text

    @cached_property
    def example_call(self) -> str:
        """A call as the template writes it, of a function NAME; empty if it writes none."""
        if not self.writes_calls:
            return ""
        written = self._written([self._user, self._caller])
        before, _, after = self._written(
            [self._user, {"role": "assistant", "content": _TEXT}]
        ).partition(_TEXT)
        shared = commonprefix([written, before])  # noqa: RUF071 - of characters, not of paths
        call = written[len(shared) :].removesuffix(after).strip()
        return (
            call.replace(_NAME, "NAME").replace(_KEY, "key").replace(_VALUE, "value")
            if _NAME in call
            else ""
        )


def _content(text: str, parts: bool) -> Any:
    return [{"type": "text", "text": text}] if parts else text
