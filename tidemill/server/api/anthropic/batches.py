"""Anthropic's Message Batches: the batches of /v1/batches whose lines are requests for
/v1/messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from tidemill.errors import InvalidRequest
from tidemill.server.http.aside import aside
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.limits import MAX_PARTS
from tidemill.server.http.responses import json_response
from tidemill.server.store import batch_lines
from tidemill.server.store.batches import Batches, BatchRequest, ExpiresAfter
from tidemill.server.store.files import read_limit, read_query
from tidemill.server.store.storage import (
    OVER,
    BatchUnknown,
    ContentLost,
    FileUnknown,
    Storage,
    file_object,
)

ENDPOINT = "/v1/messages"
_BYTES_PER_ENTRY = 256  # of JSON, to estimate
_KEPT_S = 29 * 86400  # results, as at Anthropic
_STATUS = {"cancelling": "canceling"} | dict.fromkeys(OVER, "ended")  # else in_progress
_NOT_EXECUTED = {
    "batch_expired": "expired",
    "batch_cancelled": "canceled",
}  # result types by our codes
_json = msgspec.json.Encoder().encode


class BatchEntry(Body):
    custom_id: str = Field(min_length=1, max_length=64)
    params: dict[str, Any]


class MessageBatchRequest(Body):
    without_effect = frozenset({"user_profile_id", "workspace_id"})
    requests: Annotated[list[BatchEntry], Field(min_length=1, max_length=MAX_PARTS)]

    def lines(self) -> bytes:
        """The input file of the batch, checked as far as its lines can be wrong."""
        lines, seen = [], set[str]()
        for i, item in enumerate(self.requests):
            line = {
                "custom_id": item.custom_id,
                "method": "POST",
                "url": ENDPOINT,
                "body": item.params,
            }
            lines.append(_json(line))
            code, message, _ = batch_lines.problem_of(lines[-1], ENDPOINT, seen)
            if code:
                raise InvalidRequest(f"requests.{i}: {message}", param="requests")
        return b"\n".join(lines) + b"\n"


class _Error(msgspec.Struct):
    code: str = ""


class _Answer(msgspec.Struct):
    body: msgspec.Raw


class _Result(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str
    response: _Answer | None = None
    error: _Error | None = None

    @property
    def kind(self) -> str:
        """The type of a result that is not a message."""
        return _NOT_EXECUTED.get(self.error.code, "errored") if self.error else "errored"


_decode = msgspec.json.Decoder(_Result).decode


def make_router(batches: Batches, storage: Storage) -> APIRouter:
    router = APIRouter()

    async def described(tenant: str, record: dict[str, Any]) -> dict[str, Any]:
        return await storage.do(_told, storage, tenant, record)

    async def found(request: Request, batch_id: str) -> dict[str, Any]:
        record = await storage.do(storage.batch, request.state.caller.tenant, batch_id)
        if record["endpoint"] != ENDPOINT:
            raise BatchUnknown(
                f"The batch {batch_id[:100]!r} is not of messages.",
                fix="See /v1/batches.",
                param="batch_id",
            )
        return record

    @router.post("/v1/messages/batches", openapi_extra=schema_of(MessageBatchRequest))
    async def create(
        request: Request, body: MessageBatchRequest = Depends(body_of(MessageBatchRequest))
    ) -> dict[str, Any]:
        tenant = request.state.caller.tenant
        lines = await aside(body.lines, _BYTES_PER_ENTRY * len(body.requests))
        coming = storage.begin_file()
        try:
            await coming.write(lines)
            name = f"{coming.file_id}.jsonl"
            await coming.keep(
                tenant, file_object(coming.file_id, len(lines), name, "batch", _KEPT_S)
            )
        finally:
            await coming.end()
        expires = ExpiresAfter(anchor="created_at", seconds=_KEPT_S)
        batch = BatchRequest(
            input_file_id=coming.file_id,
            endpoint=ENDPOINT,
            completion_window="24h",
            output_expires_after=expires,
        )
        return await described(tenant, await batches.create(tenant, batch, len(body.requests)))

    @router.get("/v1/messages/batches")
    async def every(request: Request) -> Response:
        query, tenant = read_query(request, "after_id", "limit"), request.state.caller.tenant
        limit = read_limit(query.get("limit"), 20, 1000)
        records, has_more = await storage.do(
            storage.batches, tenant, query.get("after_id"), limit, ENDPOINT
        )
        data = [await described(tenant, record) for record in records]
        ends = (
            {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            if data
            else {"first_id": None, "last_id": None}
        )
        return json_response({"data": data, "has_more": has_more, **ends})

    @router.get("/v1/messages/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> dict[str, Any]:
        return await described(request.state.caller.tenant, await found(request, batch_id))

    @router.get("/v1/messages/batches/{batch_id}/results")
    async def results(request: Request, batch_id: str) -> Response:
        record = await found(request, batch_id)
        if record["status"] not in OVER:
            raise InvalidRequest(
                "The batch has not ended.", fix="Retrieve it until it has.", param="batch_id"
            )
        paths = await storage.do(_paths, storage, request.state.caller.tenant, record)
        return StreamingResponse(_results(paths), media_type="application/x-jsonl")

    @router.post("/v1/messages/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        await found(request, batch_id)
        tenant = request.state.caller.tenant
        return await described(tenant, await batches.cancel(tenant, batch_id))

    @router.delete("/v1/messages/batches/{batch_id}")
    async def delete(request: Request, batch_id: str) -> dict[str, Any]:
        await found(request, batch_id)
        await storage.do(storage.delete_batch, request.state.caller.tenant, batch_id)
        return {"id": batch_id, "type": "message_batch_deleted"}

    return router


def _told(storage: Storage, tenant: str, record: dict[str, Any]) -> dict[str, Any]:
    """A batch as Anthropic's API has it."""
    status = _STATUS.get(record["status"], "in_progress")
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if status != "ended":
        counts["processing"] = record["request_counts"]["total"]
    else:
        counts["succeeded"] = record["request_counts"]["completed"]
        counts["errored"] = record["request_counts"]["failed"]
        if record["status"] in (
            "cancelled",
            "expired",
        ):  # its error file tells what was not executed, while it is kept
            with suppress(FileUnknown, ContentLost):
                counts |= {"errored": 0} | _kinds(_paths(storage, tenant, record)[1:])
    return {
        "id": record["id"],
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _time(record["created_at"]),
        "expires_at": _time(record["expires_at"]),
        "ended_at": _time(record[f"{record['status']}_at"]) if status == "ended" else None,
        "cancel_initiated_at": _time(record["cancelling_at"]),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{record['id']}/results"
        if status == "ended"
        else None,
    }


def _time(seconds: int | None) -> str | None:
    return (
        None
        if seconds is None
        else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    )


def _paths(storage: Storage, tenant: str, record: dict[str, Any]) -> list[Path | None]:
    """Files of a batch's output and of its errors."""
    ids = (record["output_file_id"], record["error_file_id"])
    return [
        None if file_id is None else storage.file_with_path(tenant, file_id)[1] for file_id in ids
    ]


def _lines(path: Path | None) -> Iterator[_Result]:
    if path is not None:
        with path.open("rb") as file:
            yield from map(_decode, file)


def _kinds(paths: list[Path | None]) -> dict[str, int]:
    return dict(Counter(line.kind for path in paths for line in _lines(path)))


def _results(paths: list[Path | None]) -> Iterator[bytes]:
    output, errors = paths
    for line in _lines(output):
        assert line.response is not None
        yield (
            _json(
                {
                    "custom_id": line.custom_id,
                    "result": {"type": "succeeded", "message": line.response.body},
                }
            )
            + b"\n"
        )
    for line in _lines(errors):
        error = {"error": line.response.body} if line.response is not None else {}
        yield _json({"custom_id": line.custom_id, "result": {"type": line.kind, **error}}) + b"\n"
