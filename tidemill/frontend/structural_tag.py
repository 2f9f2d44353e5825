"""Structural tags: free text in which some strings begin structured parts, as SGLang, vLLM and
xgrammar describe them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_TEXT = r"/(.|\n)*/"


def lark_of(tag: Any) -> str:
    """A structural tag as a Lark grammar. Raises ValueError if it cannot be written as one."""
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is an object")
    writer = _Writer()
    if "format" in tag:
        start = writer.rule(tag["format"])
    else:  # as it was first written: tags in free text
        tags = [
            {
                "begin": structure.get("begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
                "end": structure.get("end"),
            }
            for structure in _objects(tag, "structures")
        ]
        start = writer.rule(
            {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        )
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, ""])


class _Writer:
    """Rules, one for each part."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._kinds: dict[str, Callable[[dict[str, Any]], str]] = {
            "const_string": lambda part: _quoted(_text(part, "value")),
            "json_schema": lambda part: (
                f"%json {json.dumps(_compact(part.get('json_schema', True)))}"
            ),
            "any_text": lambda part: _TEXT,
            "regex": lambda part: f"/{_text(part, 'pattern').replace('/', chr(92) + '/')}/",
            "sequence": lambda part: " ".join(map(self.rule, _objects(part, "elements"))),
            "or": lambda part: " | ".join(map(self.rule, _objects(part, "elements"))),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def rule(self, part: Any) -> str:
        """The name of a rule for it."""
        if not isinstance(part, dict):
            raise ValueError("a part of a structural tag is an object with a type")
        kind = part.get("type")
        return self._named(
            self._kinds.get(kind if isinstance(kind, str) else "", self._unknown)(part)
        )

    def _named(self, body: str, mark: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{mark}: {body}")
        return name

    def _unknown(self, part: dict[str, Any]) -> str:
        raise ValueError(
            f"a part of type {str(part.get('type'))[:40]!r} is not supported; there are {', '.join(self._kinds)}"
        )

    def _tag(self, part: dict[str, Any]) -> str:
        return f"{_quoted(_text(part, 'begin'))} {self._content(part)}"

    def _content(self, part: dict[str, Any]) -> str:
        """The content of a tag, after its beginning. Free text ends at the first end."""
        content, end = part.get("content"), _text(part, "end")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._named(f"{_TEXT} {_quoted(end)}", "[lazy]")
        return f"{self.rule(content)} {_quoted(end)}"

    def _triggered(self, part: dict[str, Any]) -> str:
        triggers, tags = part.get("triggers"), _objects(part, "tags")
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(isinstance(text, str) and text for text in triggers)
        ):
            raise ValueError("triggers is a list of texts")
        options = []
        for trigger in triggers:
            begun = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not begun:
                raise ValueError(f"no tag begins with the trigger {trigger[:40]!r}")
            after = [
                f"{_quoted(_text(tag, 'begin').removeprefix(trigger))} {self._content(tag)}"
                for tag in begun
            ]
            options.append(
                f"{self._named(f'{_TEXT} {_quoted(trigger)}', '[lazy]')} ({' | '.join(after)})"
            )
        if missing := [
            tag
            for tag in tags
            if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers)
        ]:
            raise ValueError(f"the tag {_text(missing[0], 'begin')[:40]!r} begins with no trigger")
        tag_rule = self._named(" | ".join(options))
        if part.get("stop_after_first"):
            return tag_rule if part.get("at_least_one") else f"{tag_rule} | {_TEXT}"
        return f"{tag_rule}{'+' if part.get('at_least_one') else '*'} {_TEXT}"

    def _separated(self, part: dict[str, Any]) -> str:
        tag_rule = self._named(" | ".join(self._tag(tag) for tag in _objects(part, "tags")))
        several = (
            tag_rule
            if part.get("stop_after_first")
            else f"{tag_rule} ({_quoted(_text(part, 'separator'))} {tag_rule})*"
        )
        return several if part.get("at_least_one") else f"({several})?"


def _compact(schema: Any) -> Any:
    """JSON without white space between its parts, as elsewhere."""
    return (
        {"x-guidance": {"whitespace_flexible": False}} | schema
        if isinstance(schema, dict)
        else schema
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _text(part: dict[str, Any], name: str) -> str:
    if not isinstance(part.get(name), str):
        raise ValueError(f"{name} must be a text")
    return str(part[name])


def _objects(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = part.get(name)
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(item, dict) for item in value)
    ):
        raise ValueError(f"{name} must be a list of objects")
    return value
