"""Custom tools of OpenAI's APIs, whose input is text. To the model, each is a function with one
string."""

from __future__ import annotations

import json
import re
from typing import Any

from tidemill.errors import InvalidRequest

_WRAPPER = '{"input":"'
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STRING = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
)  # up to an escape that is cut off


def custom_function(
    name: str, description: str | None, syntax: str | None = None, definition: str | None = None
) -> dict[str, Any]:
    """The function. A regular expression that the input must match is enforced where calls are; a
    Lark grammar is described."""
    value: dict[str, Any] = {"type": "string"}
    described = description or ""
    if definition:
        if syntax == "regex":
            value["pattern"] = f"^(?:{definition})$"
        described += f"\nThe input must match this {syntax or 'lark'} grammar:\n{definition}"
    parameters = {
        "type": "object",
        "properties": {"input": value},
        "required": ["input"],
        "additionalProperties": False,
    }
    more = {"description": described.strip()} if described.strip() else {}
    return {"name": name, **more, "parameters": parameters}


def check_forced(name: str, syntax: str | None, definition: str | None) -> None:
    """Raises for a tool whose call cannot be forced."""
    if definition and syntax != "regex":
        raise InvalidRequest(
            f"A call of the custom tool {name[:100]!r} cannot be forced: its lark grammar "
            "cannot be enforced.",
            fix="Use tool_choice auto, or a regex grammar.",
            param="tool_choice",
        )


def custom_input(arguments: str) -> str:
    """The input of a call, which the model writes as {"input": ...}. Of one that is cut off, what
    there is of it; something else is passed on as it is."""
    try:
        fields = json.loads(arguments)
        text = fields.get("input") if isinstance(fields, dict) else None
    except (ValueError, RecursionError):
        text = _cut_input(arguments)
    if not isinstance(text, str):
        return arguments
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cut_input(arguments: str) -> str | None:
    begin = _BEGIN.match(arguments)
    if begin is None:
        return "" if _WRAPPER.startswith("".join(arguments.split())) else None
    body = _STRING.match(arguments, begin.end())
    assert body is not None  # it may be empty
    text = str(json.loads(f'"{body[0]}"', strict=False))
    return text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text  # the first half of a character
