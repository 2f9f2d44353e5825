"""A question of a command to a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from tidemill.cli.settings import Settings
from tidemill.errors import TidemillError


def ask(
    url: str, path: str, api_key: str, *, method: str = "GET", body: dict[str, Any] | None = None, within_s: float = 10
) -> dict[str, Any]:
    """`api_key`: empty: TIDEMILL_API_KEY."""
    key = api_key or next(iter(Settings.read(["api-key"])["api-key"]), "")
    if not key.isascii() or not key.isprintable():
        raise TidemillError("The API key has characters that no header can carry.", fix="Is there a line break in it?")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    fix = "Give the server's address with --url."
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=within_s) as reply:
            made = json.load(reply)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from None
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise TidemillError(f"{url!r} does not respond: {error}.", fix=fix) from None
    if not isinstance(made, dict):
        raise TidemillError(f"{url!r} is another kind of server.", fix=fix)
    return made


def _refusal(url: str, error: urllib.error.HTTPError) -> TidemillError:
    try:
        return TidemillError("" + json.load(error)["error"]["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        fix = "Give the address of a Tidemill server with --url."
        return TidemillError(f"{url!r} answers with status {error.code}.", fix=fix)
