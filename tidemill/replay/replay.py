"""replay(): computes a recording again and returns the certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from tidemill.errors import ConfigError
from tidemill.record.build import about_machine, build_name
from tidemill.record.format import ModelStart
from tidemill.record.reader import RecordedRequest, RecordedServer, Recording
from tidemill.replay.engine import ReplayEngine, options_of, unknown_options
from tidemill.replay.like_then import LikeThen, RecordedClock
from tidemill.replay.margins import with_margin
from tidemill.replay.orders import ORDERS
from tidemill.replay.outcome import Certificate, Running
from tidemill.weights.digest import fingerprint_of
from tidemill.weights.locate import locate

LIKE_THEN = "like then"
_MOST_MARGINS = 20  # differences of a model that are computed again for their margins


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    mode: str = "together"  # alone, together, like then
    requests: frozenset[str] = frozenset()  # numbers or ids; empty: all
    changed: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineOptions
    shown: Mapping[str, str] = field(default_factory=dict)  # the same as they were given
    tokens_only: bool = False  # not log-probabilities and embeddings
    # of models and adapters that were moved, by name
    paths: Mapping[str, str] = field(default_factory=dict)
    on_progress: Callable[[str, int, int], None] | None = None


def replay(
    recording: Recording, servers: Sequence[RecordedServer], options: ReplayOptions
) -> list[Certificate]:
    """A certificate of each server's life that has some of the requests."""
    names = {
        name for server in servers for request in server.requests for name in _names_of(request)
    }
    _check(options.requests, names, "request", "requests")
    adapters = (
        info.name
        for server in servers
        for infos in server.adapters.values()
        for info in infos.values()
    )
    starts = [start for server in servers for models in server.models.values() for start in models]
    loras = (
        text.partition("=")[0] for start in starts for text in start.options.get("loras") or ()
    )
    _check(
        options.paths,
        {*(start.model for start in starts), *adapters, *loras},
        "model or adapter",
        "model",
    )
    return [
        _replay_server(recording, server, chosen, options)
        for server in servers
        if (chosen := _chosen(server, options))
    ]


def _check(names: Collection[str], known: Set[str], what: str, param: str) -> None:
    if unknown := ", ".join(sorted(set(names) - known)):
        raise ConfigError(
            f"The recording has no {what} {unknown}.",
            fix="Give numbers, ids and names of it.",
            param=param,
        )


def _chosen(server: RecordedServer, options: ReplayOptions) -> list[RecordedRequest]:
    wanted = options.requests
    return [request for request in server.requests if not wanted or wanted & _names_of(request)]


def _names_of(request: RecordedRequest) -> set[str]:
    """Its number, its id, and the part of the id that a client knows."""
    return {str(request.number), request.request_id, *request.request_id.split("/")[1:2]}


def _replay_server(
    recording: Recording,
    server: RecordedServer,
    chosen: Sequence[RecordedRequest],
    options: ReplayOptions,
) -> Certificate:
    """Models are computed one after the other."""
    began = time.perf_counter()
    certificate = Certificate(
        server.start.recording,
        options.mode,
        server.start.build,
        build_name(),
        server.start.machine,
        about_machine(),
        dict(options.shown),
    )
    certificate.num_requests = len(chosen)
    for path in sorted(recording.cut.intersection(server.files)):
        certificate.notes.append(f"{path.name} ends within a record: what followed is lost")
    if server.num_lost_ends:
        certificate.leave_out("it began in a file that was dropped", server.num_lost_ends)
    wanted = {request.number for request in chosen}
    if options.mode == LIKE_THEN:  # with its company
        models = {request.begun.model: request.start for request in chosen}
        groups = [
            (start, [each for each in server.requests if each.begun.model == name])
            for name, start in models.items()
        ]
    else:
        groups = _by_engine(chosen)
    for start, requests in groups:
        _replay_model(recording, server, start, requests, wanted, options, certificate)
    certificate.took_s = time.perf_counter() - began
    return certificate


def _by_engine(
    requests: Sequence[RecordedRequest],
) -> list[tuple[ModelStart, list[RecordedRequest]]]:
    """Requests of each model, by the engine's values that they were computed with."""
    groups: list[tuple[ModelStart, list[RecordedRequest]]] = []
    for request in requests:
        for start, members in groups:
            if start is request.start or (start.model, start.options) == (
                request.start.model,
                request.start.options,
            ):
                members.append(request)
                break
        else:
            groups.append((request.start, [request]))
    return groups


def _replay_model(
    recording: Recording,
    server: RecordedServer,
    start: ModelStart,
    requests: list[RecordedRequest],
    wanted: Set[int],
    options: ReplayOptions,
    certificate: Certificate,
) -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(TemporaryDirectory(prefix="tidemill-replay-"))
        engine_options = options_of(start, options.changed, options.paths, disk)
        if unknown := unknown_options(start):
            certificate.notes.append(
                f"{start.model}: this build has no option {', '.join(unknown)}"
            )
        if fingerprint_of(locate(engine_options.model)) != start.fingerprint:
            certificate.notes.append(f"{start.model}: the weights are not those that were recorded")
        clock = RecordedClock() if options.mode == LIKE_THEN else None
        engine = ReplayEngine(engine_options, server, start.model, options.paths, clock)
        stack.callback(engine.close)
        ready = []
        for request in requests:
            if request.number not in wanted:
                continue
            if why := engine.why_not(request):
                certificate.leave_out(why)
            else:
                ready.append(request)
        if clock is None:
            ended = ORDERS[options.mode](engine, ready)
        else:
            ended = _like_then(recording, server, engine, clock, start.model, requests, certificate)
        compared = {request.number for request in ready}
        for num, running in enumerate(ended, 1):
            if running.request.number in compared:
                compared.discard(running.request.number)
                certificate.differences += certificate.add(running, options.tokens_only)
            if options.on_progress is not None:
                options.on_progress(start.model, num, len(ready))
        if compared:
            certificate.leave_out("the engine's events do not tell when it came", len(compared))
        _find_margins(engine, server, start.model, certificate)


def _find_margins(
    engine: ReplayEngine, server: RecordedServer, model: str, certificate: Certificate
) -> None:
    num_left = _MOST_MARGINS
    for number, found in enumerate(certificate.differences):
        request = server.requests[found.request]
        if num_left and found.what == "token" and request.begun.model == model:
            certificate.differences[number] = with_margin(engine, request, found)
            num_left -= 1


def _like_then(
    recording: Recording,
    server: RecordedServer,
    engine: ReplayEngine,
    clock: RecordedClock,
    model: str,
    requests: list[RecordedRequest],
    certificate: Certificate,
) -> Iterator[Running]:
    """Each engine of the model, one after the other."""
    by_replica: dict[int, list[Any]] = {}
    for name, event in recording.events(server):
        if name == model:
            by_replica.setdefault(event.replica, []).append(event)
    like_then = LikeThen(engine, clock, requests, certificate)
    for _, recorded in sorted(by_replica.items()):
        yield from like_then.run(recorded)
    yield from like_then.rest()
