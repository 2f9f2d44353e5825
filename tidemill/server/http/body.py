"""Request bodies: JSON of bounded size, validated by a model; errors name the parameter.

Three rules: null means absent; a standard field that cannot change the output is accepted and named
in the response header x-tidemill-ignored; a field that would change the output and is not supported
is refused by name. Where an API's own server ignores fields that it does not know, they are ignored
and named here, too (`Body.ignores_unknown`).
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections import UserDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from starlette.requests import ClientDisconnect

from tidemill.errors import InvalidRequest, RequestTooLarge
from tidemill.server.http import stopwatch
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestContext
from tidemill.server.http.limits import (
    BODY_WITHIN_S,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    MAX_PARTS,
    PART_WITHIN_S,
)
from tidemill.server.http.responses import ClientGone
from tidemill.server.http.stopwatch import PARSING, READING
from tidemill.types.sampling import ABOVE, INTEGERS, REALS

M = TypeVar("M", bound=BaseModel)
_MAX_MISTAKES = 1000  # that are looked at one by one
_FEW_MISTAKES = 4  # of which the values are looked at, too
_MAX_SHOWN = 100  # characters of a value in an error
_NULL = {"type": "null"}
_ABOUT = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
}  # of a schema: what allows or forbids nothing
_EVENT = {  # of a stream: its schema is that of each
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
# What a response may be instead of JSON, if the request has such a field: content type and schema.
_BESIDES_JSON: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("text/event-stream", _EVENT),
    "embed_dtype": ("application/octet-stream", {"type": "string", "format": "binary"}),
}
_BY_PAGES = frozenset({"origin", "sec-fetch-site"})  # headers that browsers send for web pages


UnsignedSeed = Annotated[
    int, AfterValidator(lambda seed: -1 if seed == 2**32 - 1 else seed)
]  # llama.cpp's


class NotJSON(InvalidRequest):
    """Only JSON is accepted: a web page of another origin cannot send that content type without a
    preflight request."""

    status = 415


class TooSlow(InvalidRequest):
    """The body does not arrive in time."""

    status = 408


def _failing_fast(schema: Any) -> Any:
    for inner in (
        schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    ):
        _failing_fast(inner)
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    return schema


class Body(BaseModel):
    """An object of a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)
    without_effect: ClassVar[frozenset[str]] = frozenset()  # fields that are accepted and dropped
    ignores_unknown: ClassVar[bool] = False  # fields that it does not have are dropped, too

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Lists are read up to the first mistake: a million would take long to note."""
        return _failing_fast(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _only_what_counts(cls, fields: Any, info: ValidationInfo) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None}
        dropped = fields.keys() & cls.without_effect
        if cls.ignores_unknown:
            dropped |= fields.keys() - cls.model_fields.keys()
        if info.context is not None:
            info.context.ignored.update(dropped)
        return (
            {name: value for name, value in fields.items() if name not in dropped}
            if dropped
            else fields
        )


async def parsed(model: type[M], body: bytes, call: RequestContext | None = None) -> M:
    """The same as `parse`, but a large body is parsed beside the event loop."""
    if call is not None:
        call.num_body_bytes = len(body)
    with stopwatch.of_task().within(PARSING):
        return await aside(partial(parse, model, body, call), len(body))


def body_of(model: type[M], untyped: bool = False) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as `model`. `untyped`: of any content type, unless a web
    page sends it."""

    async def read(request: Request) -> M:
        return await parsed(model, await raw_body(request, untyped), request.scope["state"]["call"])

    return read


async def raw_body(request: Request, untyped: bool = False) -> bytes:
    """A JSON body as it is, of bounded size."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and (
        not untyped or _BY_PAGES.intersection(request.headers)
    ):
        raise NotJSON(
            f"The content type is {content_type[:100]!r}.",
            fix="Send application/json (curl: -H 'Content-Type: application/json').",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise NotJSON(
            f"The content encoding {coding[:100]!r} is not supported.",
            fix="Send the body uncompressed.",
        )
    with stopwatch.of_task().within(READING):
        parts = [part async for part in parts_of(request, MAX_BODY_BYTES, BODY_WITHIN_S)]
    return b"".join(parts)


def is_too_much(body: bytes) -> bool:
    """It has more parts than are parsed."""
    return (
        body.count(b"{") + body.count(b"[") + body.count(b":") > MAX_PARTS
        or body.count(b",") > MAX_ITEMS
    )


def parse(model: type[M], body: bytes, call: RequestContext | None = None) -> M:
    """Checks a body against its model and notes ignored fields in the call."""
    if is_too_much(body):
        raise RequestTooLarge(
            f"The body has more than {MAX_PARTS} objects, lists and members, or more than "
            f"{MAX_ITEMS} items.",
            fix="Send less at once; a longer prompt as text, not as token ids.",
        )
    try:
        return model.model_validate_json(body, context=call)
    except ValidationError as error:
        raise _explain(error, model) from None


def read(model: type[M], fields: dict[str, Any]) -> M:
    """The same as `parse`, for a body that was made from another API's."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _explain(error, model) from None


async def parts_of(
    request: Request, max_bytes: int, within_s: float
) -> AsyncGenerator[bytes, None]:
    """The body as it arrives; refused as soon as it is too large, whatever its Content-Length."""
    num_bytes = 0
    stream, end = request.stream(), time.monotonic() + within_s
    while True:
        try:
            part = await asyncio.wait_for(anext(stream), min(PART_WITHIN_S, end - time.monotonic()))
        except StopAsyncIteration:
            return
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise TooSlow(
                f"A body must arrive within {within_s:.0f} s, and each part of it within "
                f"{PART_WITHIN_S:.0f} s."
            ) from None
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise RequestTooLarge(f"The body is larger than {max_bytes} bytes.")
        yield part


class _Schema(UserDict):
    """Made when the document is asked for: all of them would be a quarter of a server's start."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        schema = self._model.model_json_schema()
        described = {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _inlined(schema, schema)}},
            }
        }
        besides = {
            field: content
            for field, content in _BESIDES_JSON.items()
            if field in self._model.model_fields
        }
        if besides:
            described["responses"] = {
                "200": {
                    "content": {kind: {"schema": of_kind} for kind, of_kind in besides.values()}
                }
            }
        return described


def schema_of(model: type[BaseModel]) -> Any:
    """The part of the OpenAPI document that describes a route's body."""
    return _Schema(model)


def _inlined(schema: Any, root: dict[str, Any]) -> Any:
    """Without references, which would be resolved against the whole document; with the limits of
    SamplingParams, and null for whatever may be absent."""
    if isinstance(schema, list):
        return [_inlined(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    inlined = {
        name: _inlined(value, root)
        for name, value in schema.items()
        if name not in ("$defs", "discriminator")
    }
    for name, inner in inlined.get("properties", {}).items():
        for kind in inner.get("anyOf", [inner]):
            if kind.get("type") == "integer" and name in INTEGERS:
                kind["minimum"], kind["maximum"] = INTEGERS[name]
            elif kind.get("type") == "number" and name in REALS:
                low, kind["maximum"] = REALS[name]
                kind["exclusiveMinimum" if name in ABOVE else "minimum"] = low
    if inlined.get("additionalProperties") is False:
        inlined["additionalProperties"] = _NULL
        required = inlined.get("required", ())
        inlined["properties"] = {
            name: inner if name in required else _or_null(inner)
            for name, inner in inlined.get("properties", {}).items()
        }
    return inlined


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if not schema.keys() - _ABOUT:  # anything
        return schema
    about = {name: value for name, value in schema.items() if name in _ABOUT}
    kinds = schema.get("anyOf") or [
        {name: value for name, value in schema.items() if name not in _ABOUT}
    ]
    return about | {"anyOf": kinds if _NULL in kinds else [*kinds, _NULL]}


def _explain(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first error, with the parameter's name; of a union, the error of the member that fits
    best."""
    if error.error_count() > _MAX_MISTAKES:  # formatting them all would take seconds
        return InvalidRequest(
            f"The body has {error.error_count()} errors.", fix="Compare it with /openapi.json."
        )
    # Each input is a copy, and those of many mistakes may be of the same large object.
    problems = error.errors(
        include_url=False, include_context=True, include_input=error.error_count() <= _FEW_MISTAKES
    )
    of_first = (problem for problem in problems if problem["loc"][:1] == problems[0]["loc"][:1])
    first = max(
        of_first,
        key=lambda problem: (len(problem["loc"]), problem["type"] in ("too_long", "too_short")),
    )
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not JSON: {first['ctx'].get('error', 'malformed')}.")
    path = [str(part) for part in first["loc"] if "[" not in str(part)]
    if not path:
        return InvalidRequest("The body must be a JSON object.")
    if first["type"] == "extra_forbidden":
        near = (
            difflib.get_close_matches(path[0], model.model_fields, n=1, cutoff=0.75)
            if len(path) == 1
            else []
        )
        fix = f"Did you mean {near[0]}?" if near else ""
        return InvalidRequest(
            f"The parameter {'.'.join(path)!r} is not supported.", fix=fix, param=path[0]
        )
    if first["type"] == "missing":
        return InvalidRequest(f"The parameter {'.'.join(path)!r} is required.", param=path[0])
    what = first["msg"].removeprefix("Value error, ")
    if (
        first["type"] != "value_error"
    ):  # pydantic's own: with its name of the mistake, which clients of vLLM look for
        value = first.get("input")
        got = (
            f"; got {value[:_MAX_SHOWN]!r}"
            if first["type"] == "literal_error" and isinstance(value, str)
            else ""
        )
        what = f"{what}{got} ({first['type']})"
    return InvalidRequest(f"The parameter {path[0]!r} is not valid: {what}.", param=path[0])
