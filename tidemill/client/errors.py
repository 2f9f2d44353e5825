"""Errors of a request to a server."""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.errors import ContextTooLong, InvalidRequest, TidemillError

_MAX_CHARS = 500  # of a server's message
_BY_CODE = {str(ContextTooLong.code): ContextTooLong}


class Unreachable(TidemillError):
    """No server responds at the address, or the connection to it was lost."""

    kind = "server_unreachable"
    status = 503

    def __init__(self, url: str, error: Exception) -> None:
        why = str(error) or type(error).__name__
        fix = "Check that the server runs, and its address (--url)."
        if "CERTIFICATE_VERIFY_FAILED" in why:
            fix = "Name a file with the certificate of its authority in SSL_CERT_FILE."
        super().__init__(f"{url} does not respond: {why.rstrip('.')}.", fix=fix)


class WrongKey(TidemillError):
    """The server wants an API key, or another one."""

    kind = "authentication_error"
    status = 401

    def __init__(self, url: str, message: str) -> None:
        fix = "Give its key with --api-key or in TIDEMILL_API_KEY."
        super().__init__(f"{url} does not accept the API key: {message}", fix=fix)


class BadResponse(TidemillError):
    """The response is none of this API, or it ended before it was complete."""

    kind = "bad_response"
    status = 502

    def __init__(self, url: str, what: str, fix: str = "") -> None:
        fix = fix or "Check that a server with the OpenAI API has this address (--url)."
        super().__init__(f"{url} {what}.", fix=fix)


def refusal(url: str, status: int, body: bytes) -> TidemillError:
    """The error that is meant by a response with this status and body."""
    fields, message = _read(body)
    if status == 401:
        return WrongKey(url, message or "status 401.")
    if not message:
        return BadResponse(url, f"answers with status {status}")
    what = f"The server refuses it ({status}): {message}"
    return _error(fields, what, is_mistake=400 <= status < 500)


def failure(event: bytes) -> TidemillError:
    """The error that is meant by an event of a stream."""
    fields, message = _read(event)
    what = f"The server ended the response with an error: {message}"
    return _error(fields, what, is_mistake=fields.get("type") == InvalidRequest.kind)


def _read(body: bytes) -> tuple[dict[str, Any], str]:
    """The fields of an error, and its message."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        error = None
    fields = error if isinstance(error, dict) else {"message": error}
    return fields, str(fields.get("message") or "")[:_MAX_CHARS]


def _error(fields: dict[str, Any], what: str, is_mistake: bool) -> TidemillError:
    """`is_mistake`: of the request."""
    by_status = InvalidRequest if is_mistake else TidemillError
    kind = _BY_CODE.get(str(fields.get("code"))) or by_status
    return kind(what, param=fields.get("param"))
