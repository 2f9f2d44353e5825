"""OpenAI's Files API: the inputs and outputs of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.responses import FileResponse, Response

from tidemill.errors import InvalidRequest
from tidemill.server.http.body import NotJSON, parts_of
from tidemill.server.http.limits import MAX_UPLOAD_BYTES, UPLOAD_WITHIN_S
from tidemill.server.http.responses import json_response
from tidemill.server.store.storage import Storage, Upload, file_object

MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86400  # of files that are to expire
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD_BYTES = 1024  # also of a part's headers
_WRITTEN_AT_ONCE = 2**20


def make_router(storage: Storage) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/files")
    async def upload(request: Request) -> dict[str, Any]:
        await storage.do(storage.check_room, int(request.headers.get("content-length", "0")))
        coming = storage.begin_file()
        try:
            form = await _receive(request, coming)
            record = file_object(
                coming.file_id, coming.num_bytes, form.filename, form.purpose(), form.expire_s()
            )
            await coming.keep(request.state.caller.tenant, record)
        finally:
            await coming.end()
        return record

    @router.get("/v1/files")
    async def files(request: Request) -> Response:
        query = read_query(request, "purpose", "after", "limit", "order")
        limit = read_limit(query.get("limit"), 10_000, 10_000)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order is asc or desc.", param="order")
        tenant = request.state.caller.tenant
        found = await storage.do(
            storage.files, tenant, query.get("purpose"), query.get("after"), limit, order
        )
        return json_response(page(*found))

    @router.get("/v1/files/{file_id}")
    async def file(request: Request, file_id: str) -> dict[str, Any]:
        return await storage.do(storage.file, request.state.caller.tenant, file_id)

    @router.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        record, path = await storage.do(
            storage.file_with_path, request.state.caller.tenant, file_id
        )
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(
            path,
            headers=headers,
            media_type="application/octet-stream",
            filename=record["filename"],
        )

    @router.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        await storage.do(storage.delete_file, request.state.caller.tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def read_query(request: Request, *known: str) -> dict[str, str]:
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(
                f"The parameter {name[:100]!r} is not supported.", param=name[:100]
            )
    return dict(request.query_params)


def read_limit(limit: str | None, default: int, most: int) -> int:
    if limit is None:
        return default
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:10]) <= most:
        raise InvalidRequest(f"limit is from 1 to {most}.", param="limit")
    return int(limit)


def page(found: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = (
        {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        if found
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": found, "has_more": has_more} | ends


async def _receive(request: Request, upload: Upload) -> _Form:
    """Parse the form; its file is written to the disk as it arrives."""
    form = _Form(request.headers.get("content-type", ""))
    async for part in parts_of(request, MAX_UPLOAD_BYTES, UPLOAD_WITHIN_S):
        form.feed(part)
        if len(form.data) >= _WRITTEN_AT_ONCE:
            await upload.write(form.take())
    form.end()
    if form.data:
        await upload.write(form.take())
    if upload.num_bytes == 0:
        raise InvalidRequest("The form has no file, or an empty one.", param="file")
    return form


class _Form:
    """A multipart form of one file and a few small fields, parsed incrementally."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise NotJSON(
                "A file is uploaded as multipart/form-data.",
                fix="Use a client's files.create, or curl -F file=@NAME.",
            )
        self.data = bytearray()  # of the file, not yet written
        self.filename = ""
        self._fields: dict[str, bytes] = {}
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_end": self._on_end,
        }
        self._is_over = False
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        except Exception as error:
            raise InvalidRequest("The form's boundary cannot be read.", param="file") from error

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise InvalidRequest(
                "The form cannot be read.", fix="Is its boundary right?", param="file"
            ) from error

    def end(self) -> None:
        if not self._is_over:
            raise InvalidRequest("The form is incomplete.", param="file")

    def take(self) -> bytes:
        taken = bytes(self.data)
        self.data.clear()
        return taken

    def purpose(self) -> str:
        purpose = self._fields.get("purpose", b"")
        if purpose != b"batch":
            raise InvalidRequest(
                f"The purpose is {_shown(purpose)}.",
                fix="Files are for batches: give batch.",
                param="purpose",
            )
        return "batch"

    def expire_s(self) -> int | None:
        if not any(name.startswith("expires_after") for name in self._fields):
            return None
        seconds = self._fields.get("expires_after[seconds]", b"")
        if (
            self._fields.get("expires_after[anchor]") != b"created_at"
            or not seconds.isdigit()
            or len(seconds) > 10
        ):
            raise InvalidRequest(
                "expires_after has the anchor created_at and seconds.", param="expires_after"
            )
        return kept_s(int(seconds), "expires_after")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = _grown(self._header, data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = _grown(self._value, data[start:end])

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name not in (*_FIELDS, "file"):
            raise InvalidRequest(
                f"The parameter {self._name[:100]!r} is not supported.", param=self._name[:100]
            )
        if self._name in self._fields or (self._name == "file" and self.filename):
            raise InvalidRequest(f"The parameter {self._name!r} is given twice.", param=self._name)
        if self._name == "file":
            self.filename = _plain_name(options.get(b"filename", b""))
        else:
            self._fields[self._name] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.data += data[start:end]
        else:
            self._fields[self._name] = _grown(self._fields[self._name], data[start:end])

    def _on_end(self) -> None:
        self._is_over = True


def kept_s(seconds: int, param: str) -> int:
    if not MIN_KEPT_S <= seconds <= MAX_KEPT_S:
        raise InvalidRequest(
            f"Files are kept from {MIN_KEPT_S} to {MAX_KEPT_S} seconds; got {seconds}.", param=param
        )
    return seconds


def _grown(text: bytes, more: bytes) -> bytes:
    if len(text) + len(more) > _MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"A field of the form is longer than {_MAX_FIELD_BYTES} bytes.", param="file"
        )
    return text + more


def _plain_name(name: bytes) -> str:
    """The name of a file for display only: no file on the disk has this name."""
    last = name.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:255] or "upload"


def _shown(value: bytes) -> str:
    return repr(value.decode(errors="replace")[:100]) if value else "missing"
