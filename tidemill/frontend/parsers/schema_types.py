"""A value that a model wrote as plain text, as the JSON that the tool's schema asks for."""

from __future__ import annotations

import json
from typing import Any

_MAX_REFERENCES = 8
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def convert(text: str, name: str, schema: dict[str, Any]) -> str:
    """The JSON of the parameter `name`. What is not of the type that it should be stays a string."""
    properties = schema.get("properties")
    kinds = _kinds(properties.get(name), schema) if isinstance(properties, dict) else set()
    stripped = text.strip()
    for kind in ("null", "boolean", "integer", "number", "array", "object"):
        if kind in kinds:
            try:
                value = json.loads(_PYTHON.get(stripped, stripped))
            except (ValueError, RecursionError):
                break
            if _kind_of(value) == kind or (kind == "number" and _kind_of(value) == "integer"):
                return _PYTHON.get(stripped, stripped)
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows, as far as they are easy to see."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return set()
    kinds: set[str] = set()
    kind = schema.get("type")
    kinds.update(
        [kind]
        if isinstance(kind, str)
        else [name for name in kind if isinstance(name, str)]
        if kind
        else []
    )
    values = (
        schema.get("enum")
        if isinstance(schema.get("enum"), list)
        else [schema["const"]]
        if "const" in schema
        else []
    )
    if not kinds:
        kinds.update(_kind_of(value) for value in values or [])
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word) or []:
            kinds |= _kinds(part, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        kinds |= _kinds(target, root, depth + 1)
    return kinds


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names[type(value)]
