"""Lines of the input file: a request in OpenAI's batch format, or a plain prompt, chat or input."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidemill.errors import ConfigError
from tidemill.server.store import batch_lines

_URL_OF = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
_TAKE_DEFAULTS = frozenset({"/v1/completions", "/v1/chat/completions"})
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input, not parsed yet."""

    number: int  # from 1, blank lines included
    text: bytes

    @property
    def digest(self) -> int:
        """A digest of the line's content, never 0. It tells whether it is the line that a result
        was computed for."""
        return zlib.crc32(self.text.rstrip(b"\r\n")) or 1

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.number}_{self.digest:08x}"


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The request of a line."""

    result_id: str
    custom_id: str
    url: str
    body: bytes


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """Why a line asks for nothing, with the error codes of OpenAI's batches."""

    custom_id: str
    code: str
    message: str


def read(path: Path) -> Iterator[Line]:
    try:
        for number, text in batch_lines.read(path):
            yield Line(number, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", fix="Give a file of JSON lines."
        ) from error


def parse(line: Line, defaults: Mapping[str, Any]) -> Request | Problem:
    """`defaults`: fields of bodies for completions and chats that lack them."""
    custom_id = f"line-{line.number}"
    if len(line.text) > batch_lines.MAX_LINE_BYTES:
        return Problem(
            custom_id, "line_too_long", f"A line may have {batch_lines.MAX_LINE_BYTES} bytes."
        )
    try:
        fields = _decode_fields(line.text)
        if "custom_id" in fields:
            custom_id = _decode_text(fields["custom_id"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        code, message, _ = batch_lines.problem_of(line.text, None, None)
        return Problem(custom_id, code, message)
    if not fields.keys().isdisjoint(("body", "url", "method")):
        code, message, _ = batch_lines.problem_of(line.text, None, None)
        if code:
            return Problem(custom_id, code, message)
        parsed = batch_lines.parse(line.text)
        url, body = parsed.url, bytes(parsed.body)
        if not url.startswith("/") or not url.isprintable():  # it is appended to a server's address
            what = f"The url is {url[:100]!r}; it must be a path like /v1/completions."
            return Problem(custom_id, "invalid_url", what)
    else:
        kinds = [name for name in _URL_OF if name in fields]
        if len(kinds) != 1:
            what = (
                f"both {' and '.join(kinds)}"
                if kinds
                else "none of prompt, messages, input and body"
            )
            return Problem(custom_id, "invalid_request", f"The line has {what}.")
        fields.pop("custom_id", None)
        url, body = _URL_OF[kinds[0]], batch_lines.encode(fields)
        code, message, _ = batch_lines.problem_of_body(body)
        if code:
            return Problem(custom_id, code, message)
    if defaults and url in _TAKE_DEFAULTS:
        body = batch_lines.encode({**defaults, **_decode_fields(body)})
    return Request(line.result_id, custom_id, url, body)
