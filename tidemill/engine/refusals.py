"""Refusals of requests: errors as the frontend gets them."""

from __future__ import annotations

from tidemill.errors import InvalidRequest, ModelFailed, TidemillError
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Refused


def refusal(request_id: str | None, error: TidemillError) -> Refused:
    return Refused(request_id, type(error).__name__, error.message, error.fix, error.param)


def nothing_to_sample(params: SamplingParams) -> TidemillError:
    if params.allowed_token_ids or params.bad_word_ids:
        name = "allowed_token_ids" if params.allowed_token_ids else "bad_words"
        what = "No token is left that may be generated: the parameters exclude all, or the model's logits are not numbers."
        fix = "Change the parameter. If requests without it fail as well, the checkpoint is broken."
        return InvalidRequest(what, fix=fix, param=name)
    return ModelFailed(
        "The model's logits are not numbers: the checkpoint may hold values that are not numbers, or overflow in this dtype.",
        fix="Fetch the checkpoint again, or start with --dtype float32. If other requests succeed, change the prompt.",
    )
