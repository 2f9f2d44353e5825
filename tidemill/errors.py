"""Errors that a user can cause. Each says what was given, what is allowed and what to do about it.

An engine invariant is an `assert`; these are for everything a person outside the engine can cause.
"""

from __future__ import annotations

from typing import Any


class TidemillError(Exception):
    """Base of all errors meant for a user. `kind` and `status` are what an API client sees."""

    kind = "internal_error"
    status = 500
    code: str | None = None  # the name API clients know it by, where there is one
    figures: dict[str, Any] | None = None  # for programs, where there are any

    def __init__(self, message: str, *, fix: str = "", param: str | None = None) -> None:
        super().__init__(f"{message} {fix}".strip())
        self.message = message
        self.fix = fix
        self.param = param


class InvalidRequest(TidemillError):
    """A request that cannot be served."""

    kind = "invalid_request_error"
    status = 400


class ProgramError(InvalidRequest):
    """A program (tidemill.programs) that makes no sense."""


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt plus output, does not fit the context."""

    code = "context_length_exceeded"


def input_too_long(num_tokens: int, context: int) -> ContextTooLong:
    """A text to embed or to score does not fit the context."""
    return ContextTooLong(
        f"The input is too large: it has {num_tokens} tokens, and this model takes {context}.",
        fix="Please reduce the length of the input prompt, or let it be truncated (truncate_prompt_tokens: -1).",
        param="input",
    )


class TruncationTooLong(InvalidRequest):
    """More tokens shall be kept of a prompt than fit. Only vLLM has the parameter, so words and
    kind are vLLM's."""

    kind = "BadRequestError"

    def __init__(self, num: int, max_context: int) -> None:
        what = "truncate_prompt_tokens value is greater than max_model_len."
        super().__init__(
            what, fix="Please request a smaller truncation size.", param="truncate_prompt_tokens"
        )
        self.figures = {"truncate_prompt_tokens": num, "max_model_len": max_context}


class NotOffered(TidemillError):
    """A route of another server that this one does not have."""

    kind = "not_offered"
    status = 501


class RequestTooLarge(InvalidRequest):
    """More bytes than a request may have."""

    status = 413


class QueueFull(TidemillError):
    """The queue has reached its limit."""

    kind = "rate_limit_error"
    status = 429


class Draining(TidemillError):
    """The server is stopping and accepts no new requests."""

    kind = "server_stopping"
    status = 503


class DeadlineExceeded(TidemillError):
    """The request's own time limit passed before it was done."""

    kind = "deadline_exceeded"
    status = 408


class Cancelled(TidemillError):
    """The request was cancelled by its client or an administrator."""

    kind = "request_cancelled"
    status = 499


class ClientTooSlow(TidemillError):
    """The client did not read its response while the backlog of it grew beyond the bound."""

    kind = "client_too_slow"
    status = 408


class ModelFailed(TidemillError):
    """The model computed NaN for this request."""

    kind = "model_error"


class ConfigError(TidemillError):
    """An option that cannot be honoured on this machine or with this model."""

    kind = "config_error"
    status = 400


class PeerMismatch(ConfigError):
    """Engines that were to exchange KV pages cannot: they have other weights, formats or versions,
    or no transport."""


class ModelNotFound(TidemillError):
    """No checkpoint under that name."""

    kind = "model_not_found"
    status = 404


class CheckpointError(TidemillError):
    """A checkpoint that is truncated, corrupt, of an unknown kind, or does not match its own
    configuration."""

    kind = "checkpoint_error"


class AdapterError(CheckpointError):
    """A LoRA adapter that cannot be read or does not fit the model."""

    kind = "invalid_request_error"
    status = 400


class DraftError(CheckpointError):
    """Draft heads that cannot be read or do not fit the model."""

    kind = "config_error"
    status = 400


class CalibrationError(CheckpointError):
    """A calibration of the KV cache that cannot be read or does not fit the model."""

    kind = "config_error"
    status = 400


class EngineDead(TidemillError):
    """The engine process has ended; no request can be served."""

    kind = "engine_unavailable"
    status = 503


class WorkerLost(EngineDead):
    """A process of a group that computes one model together has ended; the group ends with it."""


class WeightsLost(EngineDead):
    """The file that weights are streamed from is no longer what it was; the engine ends."""


class NoUpstream(TidemillError):
    """No server behind the router can take the request."""

    kind = "upstream_unavailable"
    status = 503


class UpstreamFailed(TidemillError):
    """A server behind the router ended or broke its answer, and the request cannot be sent again."""

    kind = "upstream_error"
    status = 502


ERRORS_BY_NAME: dict[str, type[TidemillError]] = {
    cls.__name__: cls
    for cls in (
        TidemillError,
        InvalidRequest,
        ContextTooLong,
        RequestTooLarge,
        QueueFull,
        Draining,
        DeadlineExceeded,
        Cancelled,
        ClientTooSlow,
        ModelFailed,
        ConfigError,
        ModelNotFound,
        CheckpointError,
        AdapterError,
        DraftError,
        CalibrationError,
        EngineDead,
        WorkerLost,
        PeerMismatch,
        WeightsLost,
    )
}
