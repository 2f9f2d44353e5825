"""OpenAI's Batches API: a file of requests, executed in the background, across restarts of the
server.

A batch is a sequence of small steps (`Batches._steps`). Each begins with what is stored and ends by
storing its result, so resuming after a restart, or after the disk was full, is the same as
starting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field, StringConstraints

from tidemill.errors import Draining, EngineDead, InvalidRequest, QueueFull, TidemillError
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import Endpoint
from tidemill.server.http import stopwatch
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, parsed, schema_of
from tidemill.server.http.context import RequestContext, RequestLog, new_id
from tidemill.server.http.errors import error_body, format_error, internal_error
from tidemill.server.store import batch_lines
from tidemill.server.store.files import kept_s, page, read_limit, read_query
from tidemill.server.store.storage import (
    OVER,
    BatchUnknown,
    ContentLost,
    QuotaExceeded,
    Storage,
    StorageFull,
    StorageUnavailable,
)

_MAX_UNFINISHED = 100  # batches of one tenant
_MAX_WINDOW_S = 30 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TRY_AGAIN_S = 10.0  # after a fault of the disk or the engine
_QUEUE_AGAIN_S = 1.0
_NOT_EXECUTED = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
}
_log = logging.getLogger("tidemill.server")
_Short = Annotated[str, StringConstraints(max_length=64)]
_Long = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(Body):
    input_file_id: str = Field(max_length=128)
    endpoint: str = Field(max_length=128)
    completion_window: str = Field(max_length=16)
    metadata: dict[_Short, _Long] | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None

    def window_s(self) -> int:
        found = re.fullmatch(r"([0-9]{1,7})([smhd])", self.completion_window)
        seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
        if not 1 <= seconds <= _MAX_WINDOW_S:
            raise InvalidRequest(
                f"The completion_window is {self.completion_window!r}.",
                fix="Give a number and s, m, h or d, like 24h; at most 30d.",
                param="completion_window",
            )
        return seconds


class TooManyBatches(TidemillError):
    kind = "rate_limit_error"
    status = 429


class Batches:
    """Runs the batches of all tenants."""

    def __init__(
        self,
        models: Models,
        endpoints: Mapping[str, type[Endpoint]],
        storage: Storage,
        caller_of: Callable[[str], Caller | None],
        log: RequestLog | None,
    ) -> None:
        """`endpoints`: by their routes. `caller_of`: the caller behind a tenant's name, or None if
        its key is no longer accepted."""
        self._endpoints = endpoints
        self._models, self._storage, self._caller_of, self._log = models, storage, caller_of, log
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resuming: asyncio.Task[None] | None = None
        # Lines at once, of all batches: enough for a full engine.
        self._slots = asyncio.Semaphore(models.default.ready.config.max_requests)
        self._steps = {
            "validating": self._validate,
            "in_progress": self._execute,
            "finalizing": self._complete,
            "cancelling": self._end_cancelled,
        }

    async def resume(self) -> None:
        """Continue the batches of an earlier server that are for this model and for keys that are
        still accepted."""
        if not self._storage.exists:
            return
        try:
            await self._resume()
        except TidemillError as error:
            _log.error("batches cannot be resumed yet: %s", error)
            self._resuming = asyncio.create_task(self._resume_later(str(error)))

    async def _resume(self) -> None:
        for batch_id, tenant, model in await self._storage.do(self._storage.unfinished):
            is_ours = model in self._models.names and self._caller_of(tenant) is not None
            if is_ours and batch_id not in self._tasks:
                self._start(tenant, batch_id)

    async def _resume_later(self, said: str) -> None:
        while True:
            await asyncio.sleep(_TRY_AGAIN_S)
            try:
                return await self._resume()
            except TidemillError as error:
                if str(error) != said:  # once, however long it lasts
                    said = str(error)
                    _log.error("batches cannot be resumed yet: %s", error)

    async def stop(self) -> None:
        """At once: lines under way are executed again next time."""
        tasks = [*self._tasks.values(), *([self._resuming] if self._resuming else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, tenant: str, body: BatchRequest, num_lines: int = 0) -> dict[str, Any]:
        """`num_lines`: of the file, if they are known already."""
        if self._models.is_draining:
            raise Draining(
                "The server is stopping and accepts no new requests.", fix="Try again in a moment."
            )
        if body.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise InvalidRequest(
                f"The endpoint is {body.endpoint[:100]!r}.",
                fix=f"It may be {known}.",
                param="endpoint",
            )
        window_s, storage = body.window_s(), self._storage
        if body.output_expires_after is not None:
            kept_s(body.output_expires_after.seconds, "output_expires_after")
        file, _ = await storage.do(storage.file_with_path, tenant, body.input_file_id)
        if file["purpose"] != "batch":
            raise InvalidRequest(
                f"The file's purpose is {file['purpose']!r}, not 'batch'.", param="input_file_id"
            )
        if (
            sum(theirs == tenant for _, theirs, _ in await storage.do(storage.unfinished))
            >= _MAX_UNFINISHED
        ):
            raise TooManyBatches(
                f"{_MAX_UNFINISHED} batches are not finished.", fix="Wait for one, or cancel one."
            )
        record = _batch_object(body, window_s, self._models.default.model_name, num_lines)
        await storage.do(storage.add_batch, tenant, self._models.default.model_name, record)
        self._start(tenant, record["id"])
        return record

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        storage = self._storage
        if not await storage.do(
            lambda: storage.move(tenant, batch_id, ("validating", "in_progress"), "cancelling")
        ):
            status = (await storage.do(storage.batch, tenant, batch_id))["status"]
            raise InvalidRequest(
                f"The batch is {status}; it cannot be cancelled any more.", param="batch_id"
            )
        task = self._tasks.get(batch_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._start(tenant, batch_id)
        return await storage.do(storage.batch, tenant, batch_id)

    def _start(self, tenant: str, batch_id: str) -> None:
        task = self._tasks[batch_id] = asyncio.create_task(self._run(tenant, batch_id))
        task.add_done_callback(
            lambda done: self._tasks.pop(batch_id) if self._tasks.get(batch_id) is done else None
        )

    async def _run(self, tenant: str, batch_id: str) -> None:
        is_gone = False
        while not self._models.is_draining and not is_gone:
            try:
                batch = await self._storage.do(self._storage.batch, tenant, batch_id)
                if batch["status"] in OVER:
                    return
                await self._step(tenant, batch)
            except* BatchUnknown:  # set aside with a damaged database, which the log says
                is_gone = True
            except* TidemillError as group:
                _log.error("batch %s is retried later: %s", batch_id, group.exceptions[0])
                await asyncio.sleep(_TRY_AGAIN_S)
            except* Exception:
                _log.exception("batch %s is retried later", batch_id)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _step(self, tenant: str, batch: dict[str, Any]) -> None:
        try:
            await self._steps[batch["status"]](tenant, batch)
        except* ContentLost as lost:
            _log.error("batch %s fails: %s", batch["id"], lost.exceptions[0])
            problem = batch_lines.problem(
                "missing_file", str(lost.exceptions[0]), None, "input_file_id"
            )
            await self._end(tenant, batch, "failed", errors={"object": "list", "data": [problem]})

    # ---- the steps

    async def _validate(self, tenant: str, batch: dict[str, Any]) -> None:
        storage = self._storage
        path = await storage.do(storage.content_path, batch["input_file_id"])
        try:
            num_lines, problems = await asyncio.to_thread(
                batch_lines.problems_of, path, batch["endpoint"]
            )
        except OSError as error:
            raise StorageUnavailable(f"The input file cannot be read: {error.strerror}.") from error
        counts = batch["request_counts"] | {"total": num_lines}
        changes: dict[str, Any] = {"request_counts": counts}
        if problems:
            changes["errors"] = {"object": "list", "data": problems}
        status = "failed" if problems else "in_progress"
        await storage.do(
            lambda: storage.move(tenant, batch["id"], ["validating"], status, **changes)
        )

    async def _execute(self, tenant: str, batch: dict[str, Any]) -> None:
        storage = self._storage
        path = await storage.do(storage.content_path, batch["input_file_id"])
        try:
            async with (
                asyncio.timeout(batch["expires_at"] - time.time()),
                asyncio.TaskGroup() as group,
            ):
                lines = batch_lines.read(path, await storage.do(storage.lines_done, batch["id"]))
                while (found := await asyncio.to_thread(next, lines, None)) is not None:
                    begins = asyncio.Event()
                    group.create_task(self._execute_line(tenant, batch, *found, begins))
                    await begins.wait()  # so that no more is read than can be executed
        except TimeoutError:
            await self._end(tenant, batch, "expired")
        else:
            await storage.do(
                lambda: storage.move(tenant, batch["id"], ["in_progress"], "finalizing")
            )

    async def _complete(self, tenant: str, batch: dict[str, Any]) -> None:
        await self._end(tenant, batch, "completed")

    async def _end_cancelled(self, tenant: str, batch: dict[str, Any]) -> None:
        await self._end(tenant, batch, "cancelled")

    async def _end(self, tenant: str, batch: dict[str, Any], status: str, **changes: Any) -> None:
        storage = self._storage
        if status in _NOT_EXECUTED and batch["request_counts"]["total"]:
            path = await storage.do(storage.content_path, batch["input_file_id"])
            done = await storage.do(storage.lines_done, batch["id"])
            texts = (
                (
                    number,
                    batch_lines.error_line(
                        new_id("batch_req"), _parse(text).custom_id, *_NOT_EXECUTED[status]
                    ),
                )
                for number, text in batch_lines.read(path, done)
            )
            await storage.do(storage.add_skipped, batch["id"], texts)
        expire_s = (batch.get("output_expires_after") or {}).get("seconds")
        finish = partial(
            storage.finish, tenant, batch["id"], batch["status"], status, expire_s, **changes
        )
        await storage.do(finish)

    # ---- one line

    async def _execute_line(
        self, tenant: str, batch: dict[str, Any], number: int, text: bytes, begins: asyncio.Event
    ) -> None:
        async with self._slots:
            begins.set()
            line, call = (
                _parse(text),
                RequestContext(new_id("batch_req"), path=batch["endpoint"], tenant=tenant),
            )
            known = self._caller_of(tenant)
            assert known is not None, "batches are begun for accepted keys only"
            caller = replace(known, in_background=True, call=call)
            call.status, body = await respond_to_line(
                self._models, caller, self._endpoints[batch["endpoint"]], bytes(line.body)
            )
            written = batch_lines.response_line(call.request_id, line.custom_id, call.status, body)
            await self._store(batch["id"], number, call.status >= 400, written)
            if self._log is not None:
                self._log.write(call)

    async def _store(self, batch_id: str, number: int, failed: bool, text: bytes) -> None:
        """Without room, the result is kept and stored later, rather than computed again."""
        while True:
            try:
                return await self._storage.do(
                    self._storage.add_result, batch_id, number, failed, text
                )
            except (StorageFull, QuotaExceeded) as error:
                _log.error("a result of batch %s is stored later: %s", batch_id, error)
                await asyncio.sleep(_TRY_AGAIN_S)


async def respond_to_line(
    models: Models, caller: Caller, endpoint: type[Endpoint], body: bytes
) -> tuple[int, bytes]:
    """Status and body as the route would have them: a mistake in the line is its response; a fault
    of the server is not."""
    stopwatch.start(caller.call.stopwatch)
    try:
        return await _respond(models, caller, endpoint, body)
    finally:
        caller.call.stopwatch.stop()
        models.usage.take_call(caller.call)


async def _respond(
    models: Models, caller: Caller, endpoint: type[Endpoint], body: bytes
) -> tuple[int, bytes]:
    call = caller.call
    while True:
        try:
            request = await parsed(endpoint.body_type, body)
            return 200, await endpoint(models, request, caller).answer()
        except QueueFull:
            call.error, call.num_prompt = "", 0
            await asyncio.sleep(_QUEUE_AGAIN_S)
        except Draining:
            raise
        except TidemillError as error:
            if isinstance(error, EngineDead) and not models.alive:
                raise
            call.error = error.kind
            return error.status, batch_lines.encode(
                format_error(call.path, error_body(error), error.status, call.name)
            )
        except Exception:
            _log.exception("unexpected error in a line for %s", call.path)
            return 500, batch_lines.encode(
                format_error(call.path, internal_error(), 500, call.name)
            )


def _parse(text: bytes) -> batch_lines.Line:
    """A line of a validated file."""
    try:
        return batch_lines.parse(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ContentLost(
            "The input file has changed on the server's disk.", param="input_file_id"
        ) from None


def _batch_object(body: BatchRequest, window_s: int, model: str, num_lines: int) -> dict[str, Any]:
    now = int(time.time())
    times = (
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    )
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": body.endpoint,
        "model": model,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + window_s,
        "request_counts": {"total": num_lines, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "output_expires_after": body.output_expires_after.model_dump()
        if body.output_expires_after
        else None,
    } | dict.fromkeys((f"{name}_at" for name in times), None)


def make_router(batches: Batches, storage: Storage) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/batches", openapi_extra=schema_of(BatchRequest))
    async def create(
        request: Request, body: BatchRequest = Depends(body_of(BatchRequest))
    ) -> dict[str, Any]:
        return await batches.create(request.state.caller.tenant, body)

    @router.get("/v1/batches")
    async def every(request: Request) -> dict[str, Any]:
        query = read_query(request, "after", "limit")
        limit = read_limit(query.get("limit"), 20, 100)
        return page(
            *await storage.do(
                storage.batches, request.state.caller.tenant, query.get("after"), limit
            )
        )

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> dict[str, Any]:
        return await storage.do(storage.batch, request.state.caller.tenant, batch_id)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        return await batches.cancel(request.state.caller.tenant, batch_id)

    return router
