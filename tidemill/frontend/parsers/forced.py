"""The grammar of an output that must be tool calls."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from tidemill.errors import InvalidRequest
from tidemill.types.sampling import Grammar, closed

MAX_FORCED_CALLS = 16  # in one output, if several are allowed
# maps from names to schemas
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas
_ROOTED = ("/$defs/", "/definitions/")  # as litellm refers to definitions of the document


def call_grammar(tools: list[dict[str, Any]], name: str | None, several: bool) -> Grammar:
    """The grammar of an output that must call one of the tools, or the named one: `several` allows
    a list of calls.

    The parameters of each tool become one definition, with the tool's own definitions inside it:
    their names cannot clash, and references still resolve. Objects that do not say whether they
    have other properties than those they name have none, and a tool without parameters takes none.
    """
    chosen = [tool for tool in tools if name is None or tool["name"] == name]
    if not chosen:
        what = (
            "tool_choice requires a tool call, but there are no tools."
            if name is None
            else f"Tool {name[:100]!r} not found in tools list, but tool_choice names it."
        )
        raise InvalidRequest(
            what, fix="Send the tool in tools, or another tool_choice.", param="tool_choice"
        )
    definitions, calls = {}, []
    for i, tool in enumerate(chosen):
        own = tool.get("parameters")
        parameters = closed(
            deepcopy(
                {"type": "object", "properties": {}} if own is None else own or {"type": "object"}
            )
        )
        definitions[str(i)] = _relocated(parameters, f"#/$defs/{i}")
        call = {"name": {"const": tool["name"]}, "arguments": {"$ref": f"#/$defs/{i}"}}
        calls.append(
            {
                "type": "object",
                "properties": call,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            },
        )
    call_schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = (
        {"type": "array", "items": call_schema, "minItems": 1, "maxItems": MAX_FORCED_CALLS}
        if several
        else call_schema
    )
    return Grammar("json_schema", json.dumps({"$defs": definitions, **schema}))


def _relocated(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema document as a part of another: its references to itself point to its new `place`."""
    own_id = schema.get("$id")
    prefixes = ["#"] if not isinstance(own_id, str) else ["#", own_id.rstrip("#") + "#"]

    def reference(target: str) -> str:
        for prefix in prefixes:
            if target == prefix or target.startswith(prefix + "/"):
                return place + target[len(prefix) :]
        if own_id is None and target.startswith(_ROOTED):
            return place + target
        return target

    def schemas(value: Any) -> Any:
        if isinstance(value, list):
            return [schemas(item) for item in value]
        if not isinstance(value, dict) or "$id" in value:  # a document of its own
            return value
        relocated: dict[str, Any] = {}
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str):
                relocated[key] = reference(inner)
            elif key in _NAMED_SCHEMAS and isinstance(inner, dict):
                relocated[key] = {name: schemas(child) for name, child in inner.items()}
            else:
                relocated[key] = inner if key in _VALUES else schemas(inner)
        return relocated

    return schemas({key: value for key, value in schema.items() if key not in ("$id", "$schema")})
