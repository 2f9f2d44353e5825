"""Request bodies: JSON whatever the content type says, checked against a model, refused in words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from tidemill.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)


def body_of(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as `model`."""

    async def read(request: Request) -> M:
        try:
            return model.model_validate_json(await request.body())
        except ValidationError as error:
            raise _explain(error) from None

    return read


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route adds to the API's description."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def _explain(error: ValidationError) -> InvalidRequest:
    """The first problem. Of a union's complaints there is one per member; the parameter's name is what matters."""
    first = error.errors(include_url=False, include_context=True)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not JSON: {first['ctx'].get('error', 'malformed')}.")
    path = [str(part) for part in first["loc"]]
    if not path:
        return InvalidRequest("The body must be a JSON object.")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"The parameter {'.'.join(path)!r} is not supported.", param=path[0])
    if first["type"] == "missing":
        return InvalidRequest(f"The parameter {'.'.join(path)!r} is required.", param=path[0])
    return InvalidRequest(f"The parameter {path[0]!r} is not valid: {first['msg']}.", param=path[0])
