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
    own, params = request.tokens, request.params
    num_output = len(own) - request.num_prompt
    for num, token in enumerate(tokens, 1):
        own.append(token)
        if request.is_held:
            continue  # its latest token is not decided
        num_output += 1
        if num_output >= params.min_tokens and (
            (token in request.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        ):
            return list(tokens[:num]), "stop"
        if num_output >= request.max_tokens:
            return list(tokens[:num]), HANDED_OVER if request.hands_over else "length"
    return list(tokens), None
