"""What a step changed for a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.sched.request import HANDED_OVER, Request


class Progress(msgspec.Struct, frozen=True):
    """What a step changed for one request: tokens that it has now, at least one."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    num_drafts: int = 0  # that the step verified


def append(request: Request, tokens: Sequence[int]) -> tuple[list[int], str | None]:
    """The tokens up to the one that ends the request, and why it does."""
    kept = []
    for token in tokens:
        request.tokens.append(token)
        kept.append(token)
        if reason := _finish_reason(request, token):
            return kept, reason
    return kept, None


def _finish_reason(request: Request, token: int) -> str | None:
    if request.is_held:
        return None  # its latest token is not decided
    if request.num_output >= request.params.min_tokens:
        if token in request.eos_token_ids and not request.params.ignore_eos:
            return "stop"
        if token in request.params.stop_token_ids:
            return "stop"
    if request.num_output >= request.max_tokens:
        return HANDED_OVER if request.hands_over else "length"
    return None
