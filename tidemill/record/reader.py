"""Reads a recording: its servers, their models, requests and events."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tidemill.errors import ConfigError
from tidemill.record.format import (
    TOKEN_BYTES,
    VERSION,
    AdapterStart,
    Begun,
    Cut,
    Ended,
    Events,
    ModelStart,
    RecordType,
    Sealed,
    Segment,
    Start,
    damaged,
    events_of,
    ids_of,
    read_blocks,
)
from tidemill.record.writer import files_of
from tidemill.types.events import Event
from tidemill.types.wire import AdapterInfo, Submit

_NO_KEY = "Give the owner's --key, which the server that recorded has made."


@dataclass(slots=True)
class RecordedRequest:
    number: int  # in the order in which they came
    begun: Begun
    prompt: list[bytes] | None  # its segments; None: the file that has them was dropped
    start: ModelStart  # of its model, by then
    ended: Ended | None = None  # None: the server stopped before

    @property
    def request_id(self) -> str:
        return self.begun.request.request_id

    @property
    def num_output(self) -> int:
        return (
            sum(len(output.ids) // TOKEN_BYTES for output in self.ended.outputs)
            if self.ended
            else 0
        )

    def output_ids(self, index: int) -> array[int]:
        return array("I") if self.ended is None else ids_of(self.ended.outputs[index].ids)

    def prompt_ids(self) -> list[int]:
        assert self.prompt is not None
        return ids_of(b"".join(self.prompt)).tolist()

    def submit(self) -> Submit:
        """The request, with its prompt."""
        return msgspec.structs.replace(self.begun.request, prompt_ids=self.prompt_ids())


@dataclass(slots=True)
class RecordedServer:
    """One server's life, from its start to its end."""

    start: Start
    files: list[Path] = field(default_factory=list)
    # each again when its engine has other values
    models: dict[str, list[ModelStart]] = field(default_factory=dict)
    adapters: dict[str, dict[int, AdapterInfo]] = field(default_factory=dict)  # by model and number
    requests: list[RecordedRequest] = field(default_factory=list)
    num_lost_ends: int = 0  # of requests whose beginning is in a file that was dropped


class Recording:
    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder.", fix="Name the folder of --record.", param="recording"
            )
        self._folder, self._key = folder, key
        self.servers: list[RecordedServer] = []
        self.cut: set[Path] = set()  # files that end within a block: what followed is not there
        files = files_of(folder)
        if not files:
            raise ConfigError(
                f"{folder} holds no recording.",
                fix="Name the folder of --record.",
                param="recording",
            )
        for path in files:
            self._read(path)

    def events(self, server: RecordedServer) -> Iterator[tuple[str, Event]]:
        """All events of a server with their models, in the order in which the server got them."""
        for path in server.files:
            for record in self._records(path):
                if isinstance(record, Events):
                    for event in events_of(record, str(path)):
                        yield record.model, event

    def _records(self, path: Path) -> Iterator[RecordType]:
        try:
            with path.open("rb") as file:
                for records in read_blocks(file, self._key, str(path)):
                    yield from records
        except Sealed:
            raise ConfigError(
                f"{path} is sealed: it was recorded with --record-text off.",
                fix=_NO_KEY,
                param="key",
            ) from None
        except Cut:
            self.cut.add(path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}.", param="recording"
            ) from error

    def _read(self, path: Path) -> None:
        segments: dict[bytes, bytes] = {}
        server: RecordedServer | None = None
        open_requests: dict[tuple[str, str], RecordedRequest] = {}
        for record in self._records(path):
            if isinstance(record, Start):
                if record.version > VERSION:
                    what = f"{path} was recorded by a newer build: its format is {record.version}, and {VERSION} is known."
                    raise ConfigError(what, fix="Replay it with that build.", param="recording")
                if not self.servers or self.servers[-1].start.recording != record.recording:
                    self.servers.append(RecordedServer(record))
                server = self.servers[-1]
                server.files.append(path)
                open_requests = {
                    (request.begun.model, request.request_id): request
                    for request in server.requests
                    if request.ended is None
                }
                continue
            if server is None:
                raise ConfigError(
                    f"{path} does not begin with the start of a server.", param="recording"
                )
            match record:
                case ModelStart():
                    starts = server.models.setdefault(record.model, [])
                    if not starts or starts[-1] != record:
                        starts.append(record)
                case AdapterStart():
                    server.adapters.setdefault(record.model, {})[record.info.adapter_id] = (
                        record.info
                    )
                case Segment():
                    if len(record.ids) % TOKEN_BYTES:
                        raise damaged(str(path))
                    segments[record.digest] = record.ids
                case Begun():
                    pieces = [segments.get(digest) for digest in record.segments]
                    prompt = (
                        None if None in pieces else [piece for piece in pieces if piece is not None]
                    )
                    if record.model not in server.models:
                        raise ConfigError(
                            f"{path} has requests of the model {record.model!r}, which it does not describe."
                        )
                    request = RecordedRequest(
                        len(server.requests), record, prompt, server.models[record.model][-1]
                    )
                    server.requests.append(request)
                    open_requests[record.model, record.request.request_id] = request
                case Ended():
                    found = open_requests.pop((record.model, record.request_id), None)
                    if found is None:
                        server.num_lost_ends += 1
                    else:
                        if not _is_of(record, found):
                            raise damaged(str(path))
                        found.ended = record


def _is_of(ended: Ended, request: RecordedRequest) -> bool:
    """It has an output of each sample."""
    is_each = len(ended.outputs) == request.begun.request.params.n
    return is_each and not any(len(output.ids) % TOKEN_BYTES for output in ended.outputs)
