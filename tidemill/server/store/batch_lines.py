"""The lines of a batch: requests in the input file, results in the output and error files."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

MAX_LINES = 50_000
MAX_LINE_BYTES = 2 * 2**20
_NUM_PROBLEMS = 100  # that are reported


class Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    """The part of a body that is not allowed in a batch."""

    stream: Any = None


_decode = msgspec.json.Decoder(Line).decode
_decode_body = msgspec.json.Decoder(_Streamed).decode
encode = msgspec.json.Encoder().encode


def read(path: Path, skip: Container[int] = ()) -> Iterator[tuple[int, bytes]]:
    """Lines and their numbers, from 1. One that is too long is cut, and is then not JSON."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            end = line
            while not end.endswith(b"\n") and (end := file.readline(MAX_LINE_BYTES)):
                line = line[:MAX_LINE_BYTES] + b"\0"
            if number not in skip and not line.isspace():
                yield number, line


def problems_of(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests in a file and its problems, with the error codes of OpenAI's
    batches."""
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    num_lines = 0
    for number, text in read(path):
        num_lines += 1
        if num_lines > MAX_LINES:
            problems.append(
                problem(
                    "too_many_tasks", f"The file has more than {MAX_LINES} requests.", None, None
                )
            )
            break
        code, message, param = problem_of(text, endpoint, seen)
        if code:
            problems.append(problem(code, message, number, param))
            if len(problems) == _NUM_PROBLEMS:
                break
    if num_lines == 0:
        problems.append(problem("empty_file", "The file has no requests.", None, None))
    return num_lines, problems


def problem(code: str, message: str, line: int | None, param: str | None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def problem_of(
    text: bytes, endpoint: str | None, seen: set[str] | None
) -> tuple[str, str, str | None]:
    """A code, a message and a parameter; empty if the line is valid. `endpoint`: of all lines;
    None: of any. `seen`: ids of the lines before it; None: an id may occur again."""
    if len(text) > MAX_LINE_BYTES:
        return "line_too_long", f"A line may have {MAX_LINE_BYTES} bytes.", None
    try:
        line = parse(text)
    except msgspec.ValidationError as error:
        return "invalid_request", f"The line is not a request: {_first_words(error)}.", None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"The line is not JSON: {_first_words(error)}.", None
    if not line.custom_id or len(line.custom_id) > 512:
        return "invalid_custom_id", "The custom_id has from 1 to 512 characters.", "custom_id"
    if seen is not None and line.custom_id in seen:
        return (
            "duplicate_custom_id",
            f"The custom_id {line.custom_id[:100]!r} was used before.",
            "custom_id",
        )
    if seen is not None:
        seen.add(line.custom_id)
    if line.method != "POST":
        return "invalid_method", f"The method is {line.method[:20]!r}; it must be POST.", "method"
    if endpoint is not None and line.url != endpoint:
        return "invalid_url", f"The url is {line.url[:100]!r}; the batch is for {endpoint}.", "url"
    return problem_of_body(line.body)


def problem_of_body(body: bytes | msgspec.Raw) -> tuple[str, str, str | None]:
    try:
        if _decode_body(body).stream:
            return (
                "invalid_parameter",
                "The parameter 'stream' is not supported in a batch.",
                "body.stream",
            )
    except msgspec.ValidationError:
        return "invalid_body", "The body must be an object.", "body"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"The body is not JSON: {_first_words(error)}.", "body"
    return "", "", None


def parse(text: bytes) -> Line:
    return _decode(text)


def _first_words(error: Exception) -> str:
    return str(error).splitlines()[0][:200].rstrip(".") if str(error) else type(error).__name__


def response_line(line_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    response = {"status_code": status, "request_id": line_id, "body": msgspec.Raw(body)}
    return encode({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    return encode(
        {
            "id": line_id,
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )
