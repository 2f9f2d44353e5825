"""The changes of a step for a request."""

from __future__ import annotations

import msgspec

from tidemill.sched.request import HANDED_OVER, Request


class Progress(msgspec.Struct, frozen=True, gc=False):
    """The changes that a step made for one request: tokens that it has now, at least one."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    num_drafts: int = 0  # that the step verified


def append(request: Request, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens up to the one that ends the request, and why it does."""
    own = request.tokens
    before, num_output = len(own), len(own) - request.num_prompt
    for token in tokens:
        own.append(token)
        if request.awaiting_choice:
            continue  # its latest token is not decided
        num_output += 1
        if token in request.ends and num_output >= request.params.min_tokens:
            return own[before:], "stop"
        if num_output >= request.max_tokens:
            return own[before:], HANDED_OVER if request.hands_over else "length"
    return tokens, None
