"""Targets of HTTP requests: the one path that a target stands for, or a refusal.

Who may use a route is decided on its path, and something else may route the request: a server
behind the router, or a proxy. So a target that two programs could take for different paths is
refused.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from tidemill.errors import InvalidRequest

MODEL_PATH = "/v1/models/"  # and the name of a model, which may have slashes
GEMINI_PATH = "/v1beta/models/"
# Google's, after the name of a model and a colon.
GEMINI_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
# Origin form (RFC 9112), without parameters of path segments and without a fragment.
_TARGET = re.compile(rb"(/[A-Za-z0-9._~!$&'()*+,=:@%/-]*)(?:\?[!-\"$-~]*)?")
_UNCLEAN = re.compile(r"//|/\.{1,2}(?:/|$)|[\0-\x1f\x7f-\x9f\\%#?;\ufffd]")  # in a decoded path
_FIX = (
    "Send a path like /v1/models: without '#', ';', '//', dot segments, encoded slashes and "
    "what is encoded twice."
)


def path_of(target: bytes) -> str:
    """The decoded path of a request's target, without its query. Raises InvalidRequest unless there
    is one way to read it."""
    found = _TARGET.fullmatch(target)
    if found is None:
        raise InvalidRequest("The target of the request is not a plain path.", fix=_FIX)
    path = raw = found[1].decode()
    if "%" in raw:
        path = unquote(raw)
        before, _, _ = raw.lower().partition("%2f")
        names_model = MODEL_PATH in before or GEMINI_PATH in before
        if len(before) < len(raw) and not names_model:
            raise InvalidRequest("The path of the request has an encoded slash.", fix=_FIX)
    if _UNCLEAN.search(path):
        raise InvalidRequest("The path of the request can be read in more than one way.", fix=_FIX)
    return path


def model_in(path: str) -> str | None:
    """The model that a path names."""
    prefix = next((prefix for prefix in (MODEL_PATH, GEMINI_PATH) if path.startswith(prefix)), None)
    if prefix is None:
        return None
    name, _, method = path.removeprefix(prefix).rpartition(":")
    return name if method in GEMINI_METHODS else path.removeprefix(prefix)


def is_google(path: str) -> bool:
    """Tells if it is a path of Google's API, whose first version has OpenAI's prefix."""
    return path.startswith("/v1beta/") or path.rpartition(":")[2] in GEMINI_METHODS
