"""Request bodies: JSON of bounded size, checked against a model, refused in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from tidemill.errors import InvalidRequest, RequestTooLarge

M = TypeVar("M", bound=BaseModel)
MAX_BODY_BYTES = 8 * 2**20
MAX_UPLOAD_BYTES = 200 * 2**20  # of a file, with what wraps it
_NEXT_PART_WITHIN_S = 20.0


class NotJSON(InvalidRequest):
    """Only JSON is read. A web page of another origin cannot send that type without asking first."""

    status = 415


class TooSlow(InvalidRequest):
    """The body does not come."""

    status = 408


def body_of(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as `model`."""

    async def read(request: Request) -> M:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise NotJSON(
                f"The content type is {content_type[:100]!r}.",
                fix="Send application/json (curl: -H 'Content-Type: application/json').",
            )
        return parse(model, await _read(request))

    return read


def parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


async def _read(request: Request) -> bytes:
    return b"".join([part async for part in parts_of(request, MAX_BODY_BYTES)])


async def parts_of(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes, given up as soon as it is too large, whatever its header said."""
    num_bytes = 0
    stream = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(stream), _NEXT_PART_WITHIN_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TooSlow(f"Nothing more of the body came within {_NEXT_PART_WITHIN_S:.0f} s.") from None
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise RequestTooLarge(f"The body is larger than {max_bytes} bytes.")
        yield part


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route adds to the API's description."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def _explain(error: ValidationError) -> InvalidRequest:
    """The first problem, by the parameter's name; where something may be of several kinds, of the kind that fits best."""
    problems = error.errors(include_url=False, include_context=True, include_input=False)
    first = max((one for one in problems if one["loc"][:1] == problems[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not JSON: {first['ctx'].get('error', 'malformed')}.")
    path = [str(part) for part in first["loc"] if "[" not in str(part)]
    if not path:
        return InvalidRequest("The body must be a JSON object.")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"The parameter {'.'.join(path)!r} is not supported.", param=path[0])
    if first["type"] == "missing":
        return InvalidRequest(f"The parameter {'.'.join(path)!r} is required.", param=path[0])
    return InvalidRequest(f"The parameter {path[0]!r} is not valid: {first['msg'].removeprefix('Value error, ')}.", param=path[0])
