"""Conversations as chat templates expect them, whatever API they came through."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tidemill.frontend.parsers.model_format import SWITCHES
from tidemill.server.http.context import RequestContext

# For templates that know low, medium and high only.
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def own_id(call: RequestContext, prefix: str) -> str:
    """The call's id, which has the API's own form on its own paths; in a batch, a new one."""
    if call.request_id.startswith(f"{prefix}_"):
        return call.request_id
    return f"{prefix}_{uuid.uuid4().hex}"


def template_tools(functions: Iterable[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The functions that may be called, as templates take them; None if there are none."""
    return [{"type": "function", "function": function} for function in functions] or None


def with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leading system messages as one: many templates know only the first."""
    leading = (i for i, message in enumerate(messages) if message["role"] != "system")
    num = next(leading, len(messages))
    if num < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num] if message["content"])
    return [{"role": "system", "content": text}, *messages[num:]]


def template_variables(
    source: str | None, effort: str | None, thinks: bool | None
) -> tuple[dict[str, Any], set[str]]:
    """Variables for a template that knows them, and which of `effort` and `thinking` it does not
    know."""
    known = _words(source or "")
    variables: dict[str, Any] = {}
    if thinks is not None or effort == "none":
        is_on = bool(thinks) and effort != "none"
        variables |= {name: is_on for name in SWITCHES if name in known}
    if effort is not None and "reasoning_effort" in known:
        nearest = effort if effort in known else _NEAREST.get(effort, effort)
        variables["reasoning_effort"] = nearest
    has_switch = bool(known.intersection(SWITCHES))
    unknown = set()
    is_kept = "reasoning_effort" in variables or (effort == "none" and has_switch)
    if effort is not None and not is_kept:
        unknown.add("effort")
    if thinks is not None and not has_switch:
        unknown.add("thinking")
    return variables, unknown


@lru_cache(maxsize=4)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))
