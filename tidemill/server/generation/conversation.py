"""Shared by the Responses and Messages APIs: the system message, what a request asks of reasoning, and the tokens it took."""

from __future__ import annotations

import re
import uuid
from functools import lru_cache
from typing import Any

from tidemill.frontend.parsers.dialect import SWITCHES
from tidemill.server.http.context import Call

_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # for templates that know low, medium and high only


def own_id(call: Call, prefix: str) -> str:
    """The call's id, which has the API's own form on its own paths; in a batch, a new one."""
    return call.request_id if call.request_id.startswith(f"{prefix}_") else f"{prefix}_{uuid.uuid4().hex}"


def with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leading system messages as one: many templates know only the first."""
    num = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if num < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num] if message["content"])
    return [{"role": "system", "content": text}, *messages[num:]]


def template_variables(source: str | None, effort: str | None, thinks: bool | None) -> tuple[dict[str, Any], set[str]]:
    """Variables for a template that knows them, and which of `effort` and `thinking` it does not know."""
    known = _words(source or "")
    made: dict[str, Any] = {}
    if thinks is not None or effort == "none":
        made |= {name: bool(thinks) and effort != "none" for name in SWITCHES if name in known}
    if effort is not None and "reasoning_effort" in known:
        made["reasoning_effort"] = effort if effort in known else _NEAREST.get(effort, effort)
    has_switch = bool(known.intersection(SWITCHES))
    unknown = set()
    if effort is not None and "reasoning_effort" not in made and not (effort == "none" and has_switch):
        unknown.add("effort")
    if thinks is not None and not has_switch:
        unknown.add("thinking")
    return made, unknown


@lru_cache(maxsize=4)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))
