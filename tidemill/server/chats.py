"""Shared by the Responses and Messages APIs: the system message, what a request asks of reasoning, and the tokens it took."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tidemill.frontend.tools import CallStart, Piece, TextPiece
from tidemill.server.call import Call

_SWITCHES = ("enable_thinking", "thinking")  # what templates call it: Qwen, GLM; DeepSeek, Granite
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
        made |= {name: bool(thinks) and effort != "none" for name in _SWITCHES if name in known}
    if effort is not None and "reasoning_effort" in known:
        made["reasoning_effort"] = effort if effort in known else _NEAREST.get(effort, effort)
    has_switch = bool(known.intersection(_SWITCHES))
    unknown = set()
    if effort is not None and "reasoning_effort" not in made and not (effort == "none" and has_switch):
        unknown.add("effort")
    if thinks is not None and not has_switch:
        unknown.add("thinking")
    return made, unknown


@lru_cache(maxsize=4)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


class ReasoningCounter:
    """Counts the tokens of the reasoning. Tokens of markers, which give no text, belong to the text that they end or begin."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._is_reasoning: bool | None = None
        self._num_undecided = 0

    def take(self, pieces: Sequence[Piece], num_tokens: int) -> None:
        num_chars = [0, 0]
        for piece in pieces:
            is_reasoning = isinstance(piece, TextPiece) and piece.is_reasoning
            num_chars[is_reasoning] += 1 if isinstance(piece, CallStart) else len(piece.text)
            self._is_reasoning = is_reasoning
        if self._is_reasoning is None:
            self._num_undecided += num_tokens
            return
        num_tokens, self._num_undecided = num_tokens + self._num_undecided, 0
        part = num_chars[True] / total if (total := sum(num_chars)) else float(self._is_reasoning)
        self.num_tokens += round(part * num_tokens)
