"""Recorder: what a model's requests are and get, and the events of its engine, as records of
`--record`."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config import EngineOptions, settled
from tidemill.frontend.output import TextDelta
from tidemill.record.format import (
    AdapterStart,
    Begun,
    Ended,
    Events,
    ModelStart,
    Output,
    add_values,
    bytes_of,
    digest_of,
    encode,
    has_values,
    new_digest,
)
from tidemill.record.writer import RecordingWriter
from tidemill.types.events import Event
from tidemill.types.wire import AdapterInfo, Delta, Ready, Submit
from tidemill.weights.digest import fingerprint_of

_REQUEST_BYTES, _EVENT_BYTES, _TOKEN_BYTES = 1000, 300, 8  # about, before they are encoded


@dataclass(slots=True)
class _Sample:
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    by_text: bool = False
    digest: Any = None

    def take(self, delta: Delta, text: TextDelta) -> None:
        num = text.num_tokens
        self.ids += delta.token_ids[:num]
        if text.finish_reason:
            # A stop string may be complete with the last token that the engine would give.
            by_engine = delta.finish_reason == text.finish_reason
            self.finish_reason, self.by_text = text.finish_reason, not by_engine
        if has_values(delta):
            self.digest = self.digest or new_digest()
            add_values(self.digest, delta, num)

    def output(self) -> Output:
        digest = b"" if self.digest is None else self.digest.digest()
        return Output(bytes_of(self.ids), self.finish_reason, self.by_text, digest)


class Recorder:
    """Records one model. Nothing is encoded here: the writer's thread does."""

    def __init__(
        self,
        writer: RecordingWriter,
        model: str,
        path: Path,
        options: EngineOptions,
        private_tenants: Set[str] = frozenset(),
    ) -> None:
        """`private_tenants`: whose requests are sealed."""
        self._writer, self._model, self._path, self._options = writer, model, path, options
        self._private = private_tenants
        self._fingerprint = fingerprint_of(path)
        self._template = self._tokenizer = b""
        self._ready: Ready | None = None
        self._adapters: set[tuple[int, str]] = set()
        self._under_way: dict[str, tuple[list[_Sample], str]] = {}
        self._first_s: dict[str, float] = {}

    def describe(self, template: str, vocabulary: list[tuple[str, int]]) -> None:
        """`template`: of chats. `vocabulary`: of the tokenizer."""
        self._template = digest_of(template.encode())
        self._tokenizer = digest_of(encode(vocabulary))

    def begin(self, request: Submit, ready: Ready, adapter: AdapterInfo | None, api: str) -> None:
        """It is about to be submitted to an engine."""
        if ready is not self._ready:
            self._ready = ready
            self._put_model(ready)
        if adapter is not None and (adapter.adapter_id, adapter.digest) not in self._adapters:
            self._adapters.add((adapter.adapter_id, adapter.digest))
            self._writer.put(AdapterStart(self._model, adapter), _REQUEST_BYTES)
        samples = [_Sample() for _ in range(request.params.n)]
        self._under_way[request.request_id] = samples, request.tenant
        prompt, bare = request.prompt_ids, msgspec.structs.replace(request, prompt_ids=[])
        self._writer.put(
            Begun(self._model, time.monotonic(), bare, [], len(prompt), api),
            _REQUEST_BYTES + _TOKEN_BYTES * len(prompt),
            request.tenant in self._private,
            prompt,
        )

    def take_output(self, request_id: str, delta: Delta, text: TextDelta) -> None:
        found = self._under_way.get(request_id)
        if found is None:
            return
        if text.num_tokens and request_id not in self._first_s:
            self._first_s[request_id] = time.monotonic()
        found[0][delta.index].take(delta, text)

    def end(self, request_id: str, error: str) -> None:
        """The server is done with it. `error`: its kind; empty: it ended as it should."""
        samples, tenant = self._under_way.pop(request_id, (None, ""))
        if samples is None:
            return
        outputs = [sample.output() for sample in samples]
        first_s = self._first_s.pop(request_id, None)
        self._writer.put(
            Ended(self._model, request_id, time.monotonic(), outputs, error, first_s),
            _REQUEST_BYTES + sum(len(output.ids) for output in outputs),
            tenant in self._private,
        )

    def take(self, batch: list[Event]) -> list[Event]:
        """Records events; returns those that tell of a recording that stopped."""
        self._writer.put(
            _events(self._model, batch), _EVENT_BYTES * len(batch), bool(self._private)
        )
        return self._writer.stopped()

    def _put_model(self, ready: Ready) -> None:
        config = msgspec.to_builtins(asdict(ready.config))
        start = ModelStart(
            self._model,
            str(self._path),
            self._fingerprint,
            self._template,
            self._tokenizer,
            asdict(settled(self._options, ready.config)),
            config,
            ready.config.reasons.get("kernels", ""),
        )
        self._writer.put(start, _REQUEST_BYTES)


def _events(model: str, batch: list[Event]) -> Events:
    return Events(model, msgspec.Raw(encode(batch)))
