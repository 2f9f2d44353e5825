"""The server's life: engine, listening socket, signals, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import uvicorn
from starlette.types import ASGIApp

from tidemill.capabilities import asked, check
from tidemill.config import settled
from tidemill.engine.budget import share
from tidemill.engine.client import STALL_S, EngineClient
from tidemill.engine.link import START_S, EngineLink
from tidemill.engine.metrics import AnyMetrics, Metrics, MetricsOfReplicas
from tidemill.engine.pool import EnginePool, Pooled
from tidemill.engine.replicas import Client, Replicas
from tidemill.engine.roles import routing_of
from tidemill.errors import EngineDead
from tidemill.frontend.sampling_defaults import SamplingDefaults, read_source, sampling_defaults
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.app import create_app
from tidemill.server.generation.models import Models, Served
from tidemill.server.generation.retention import Pins
from tidemill.server.generation.service import ResponseDefaults, Service
from tidemill.server.http.access import Access
from tidemill.server.http.aside import switch_often
from tidemill.server.http.connections import BoundedProtocol, Connections, max_connections
from tidemill.server.http.context import RequestLog
from tidemill.server.http.limits import KEEP_ALIVE_S, KEEP_ALIVE_SPARE_S
from tidemill.server.http.listen import Listen
from tidemill.server.observe.advice import Advisor
from tidemill.server.observe.explain import AnyExplainer, Explainer, ExplainerOfReplicas
from tidemill.server.observe.live import Live
from tidemill.server.observe.recorder import Recorder
from tidemill.server.observe.tracing import Tracing
from tidemill.server.store.batches import Batches
from tidemill.server.store.storage import Storage
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Loading, Pages, Ready
from tidemill.weights.locate import locate

if TYPE_CHECKING:
    from tidemill.record.writer import RecordingWriter

STOPPED_BY_SIGTERM = "SIGTERM"  # with which a server is cancelled that is still loading
DATA_QUOTA_BYTES = 10 * 2**30
_GRACE_S = 5  # for connections to close when nothing is under way any more


class _Server(uvicorn.Server):
    """Signals are handled here, so that the engine is closed before the process ends and the exit
    code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The settings by which several models share the machine's memory."""

    budget_bytes: int | None = None
    max_loaded: int | None = None
    idle_s: float | None = None  # without a request, after which a model is unloaded

    @property
    def is_asked(self) -> bool:
        return self != Sharing()


class Fleet(Protocol):
    """Engines that are not processes of this machine."""

    num_at_most: int

    def client(
        self,
        on_events: Callable[[list[Event]], None],
        stall_s: float,
        on_pages: Callable[[Pages], None],
        start_s: float,
    ) -> Client: ...


class ModelEngine:
    """A model's engine, and the readers of its events."""

    def __init__(
        self,
        served: Served,
        stall_s: float,
        start_s: float,
        tracing: Tracing | None,
        parsers: tuple[str, str, int | None],
        fleet: Fleet | None = None,
        advises: bool = False,
        recording: RecordingWriter | None = None,
        private_tenants: Set[str] = frozenset(),
    ) -> None:
        """`parsers`: of tool calls and of reasoning, and the budget of the latter. `fleet`: what
        makes the engines, if that is not this process. `advises`: on engines with roles, also if
        there are none."""
        self.served, self._tracing, self._parsers = served, tracing, parsers
        self.path = locate(served.engine.model)
        check(asked(served.engine))
        read_source(served.engine.sampling_defaults)  # what is wrong with them is told at start
        num = served.engine.num_engines if fleet is None else fleet.num_at_most
        routing = routing_of(served.engine)
        self.metrics: AnyMetrics = Metrics() if num == 1 else MetricsOfReplicas(num, routing.names)
        self.explainer: AnyExplainer = Explainer() if num == 1 else ExplainerOfReplicas(num)
        self.pins = Pins()
        client_options = self.take, stall_s, self._take_pages, start_s
        self.client: Client = (
            fleet.client(*client_options)
            if fleet is not None
            else EngineClient(*client_options)
            if num == 1
            else Replicas(num, *client_options, routing=routing)
        )
        self.client.adapters.expect(served.engine)
        self.live = Live(self.client, self.metrics, self.explainer)
        self.pooled: Pooled | None = None
        self.recorder: Recorder | None = None
        if recording is not None:
            self.recorder = Recorder(
                recording, served.name, self.path, served.engine, private_tenants
            )
        self._advisor = Advisor(served.engine) if advises or served.engine.has_roles else None

    def _take_pages(self, pages: Pages) -> None:
        self.live.take_pages(pages)

    def take(self, batch: list[Event]) -> None:
        if self._advisor is not None:
            batch = [*batch, *self._advisor.take(batch)]
        if self.recorder is not None:
            batch = [*batch, *self.recorder.take(batch)]
        self.metrics.take(batch)
        self.explainer.take(batch)
        self.pins.take(batch)
        self.live.take(batch)
        if self._tracing is not None:
            self._tracing.take(batch)

    def take_logged(self, log: RequestLog | None, batch: list[Event]) -> None:
        self.take(batch)
        for event in batch:
            fields = msgspec.structs.asdict(event)
            if log is not None:
                log.note(
                    type(event).__name__,
                    **{name: value for name, value in fields.items() if name != "time_s"},
                )

    async def start(self, on_loading: Callable[[str, Loading], None] | None) -> None:
        began = time.monotonic()
        ready = await self.client.start(
            self.served.engine, partial(on_loading, self.served.name) if on_loading else None
        )
        now = time.monotonic()
        for number in range(self.client.num_replicas):
            self.take(
                [
                    events.ModelLoaded(
                        now,
                        self.served.name,
                        ready.config.memory_bytes,
                        now - began,
                        replica=number,
                    )
                ]
            )
        if self._advisor is not None:
            self.take([self._advisor.begin(ready.config, now)])

    async def service(self) -> Service:
        engine = self.served.engine
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, self.path, engine.chat_template, engine.chat_template_kwargs
        )
        served, options = self.served, self.served.engine
        if self.recorder is not None:
            template = tokenizer.chat_template.source if tokenizer.chat_template else ""
            self.recorder.describe(template, sorted(tokenizer.vocabulary.items()))

        def defaults_of(num_parameters: int) -> SamplingDefaults:
            return sampling_defaults(
                self.path, num_parameters, options.sampling_defaults, options.default_max_tokens
            )

        return Service(
            self.client, tokenizer, served.name, self.metrics, self.explainer, self.live,
            served.aliases, self.pooled, defaults_of, self._tracing, *self._parsers, self.pins,
            self.recorder,
        )  # fmt: skip


async def serve(
    served: Sequence[Served],
    listen: Listen,
    on_loading: Callable[[str, Loading], None] | None = None,
    on_ready: Callable[[Models, int], None] | None = None,
    drain_s: float = 30.0,
    access: Access | None = None,
    data: Storage | None = None,
    log: RequestLog | None = None,
    stall_seconds: float = STALL_S,
    start_seconds: float = START_S,
    tracing: Tracing | None = None,
    sharing: Sharing = Sharing(),
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    thinking_budget: int | None = None,
    response_defaults: ResponseDefaults = ResponseDefaults(),
    fleet: Fleet | None = None,
    advises: bool = False,
    recording: RecordingWriter | None = None,
) -> None:
    """Runs until SIGINT or SIGTERM: then nothing new is taken, and what is under way has `drain_s`
    to end. A second signal does not wait. Raises EngineDead if the engine of a sole model cannot be
    kept running. `on_ready` gets the port, too: port 0 takes any free one. `stall_seconds`,
    `start_seconds`: see EngineClient. `fleet`, `advises`: see ModelEngine. `recording`:
    gets all that is done, and is closed at the end."""
    access = access or Access()
    if listen.unix_socket is None:
        access.check_host_is_safe(listen.host)
    Served.check_names(served)
    features = {
        name
        for name, is_used in {
            "several models": len(served) > 1,
            "unloading": sharing.is_asked,
            "ray": fleet is not None,
        }.items()
        if is_used
    }
    for model in served:
        check(features | asked(model.engine))
    tls = listen.tls()
    data = data or Storage(data_folder(), DATA_QUOTA_BYTES)
    engine_options = (
        stall_seconds,
        start_seconds,
        tracing,
        (tool_parser, reasoning_parser, thinking_budget),
        fleet,
        advises,
    )
    recorded = recording, access.private_tenants
    engines = [ModelEngine(model, *engine_options, *recorded) for model in served]
    listening = listen.open()  # before gigabytes are read
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    server: _Server | None = None
    models: Models | None = None
    batches: Batches | None = None
    draining: asyncio.Task[None] | None = None
    pool: EnginePool | None = None
    watching: asyncio.Task[None] | None = None
    link = EngineLink()  # to the first engine, where there are several

    def stop(number: int) -> None:
        nonlocal draining
        if server is None or models is None or batches is None or not server.started:
            assert me is not None
            me.cancel(STOPPED_BY_SIGTERM if number == signal.SIGTERM else None)  # still loading
        elif draining is None:
            draining = asyncio.create_task(_drain(models, batches, server, drain_s))
        else:
            server.force_exit = server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        if len(engines) > 1 or sharing.is_asked:
            pool = await _pool(engines, link, sharing, start_seconds, log)
            starting = asyncio.create_task(pool.start(on_loading, link))
        else:
            starting = asyncio.create_task(engines[0].start(on_loading))
        try:
            models = Models([await engine.service() for engine in engines])
            await starting
        finally:
            # Has an effect only if a tokenizer failed or the wait was interrupted.
            starting.cancel()
            await asyncio.wait([starting])
        for service in models:
            service.response_defaults = response_defaults
        batches = Batches(models, ENDPOINTS, data, access.caller_of, log)
        watching = asyncio.create_task(models.usage.watch(models.num_gpus))
        server = _http_server(create_app(models, access, data, batches, log, listen.root_path), tls)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            gc.collect()
            switch_often()
            # Collections look at what requests bring, not at all that was loaded: 100 ms each time.
            gc.freeze()
            await batches.resume()
            if on_ready:
                on_ready(models, 0 if listen.unix_socket else listening.getsockname()[1])
        await _until_served(server, serving, engines[0].client if pool is None else None)
    finally:
        if batches is not None:
            await batches.stop()
        if watching is not None:
            watching.cancel()
        if models is not None:
            models.close()
        if pool is not None:
            await pool.close()
        await link.close()
        await asyncio.gather(*(engine.client.close() for engine in engines))
        if recording is not None:
            await asyncio.to_thread(recording.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        data.close()
        listen.close(listening)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _pool(
    engines: list[ModelEngine],
    link: EngineLink,
    sharing: Sharing,
    start_s: float,
    log: RequestLog | None,
) -> EnginePool:
    """A pool of engines that are not started. Each model's share of the memory is settled before
    anything is loaded."""
    try:
        found = {
            engine.served.name: await link.inspect(
                engine.served.engine.model, engine.served.engine.draft_model, start_s
            )
            for engine in engines
        }
    except OSError as error:
        raise EngineDead(f"The engine process cannot be started: {error}.") from error
    options = {engine.served.name: engine.served.engine for engine in engines}
    budget, configs = share(options, found, sharing.budget_bytes, sharing.max_loaded)
    for engine in engines:
        assert isinstance(engine.client, EngineClient)
        name, config = engine.served.name, configs[engine.served.name]
        engine.client.ready = Ready(found[name].model, config)
        engine.pooled = Pooled(
            name,
            settled(options[name], config),
            engine.client,
            config,
            partial(engine.take_logged, log),
        )
    return EnginePool(
        [engine.pooled for engine in engines if engine.pooled], budget, sharing.idle_s
    )


def _http_server(app: ASGIApp, tls: dict[str, Any]) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=type("Protocol", (BoundedProtocol,), {"limits": Connections(max_connections())}),
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            headers=[("keep-alive", f"timeout={KEEP_ALIVE_S:.0f}")],
            timeout_keep_alive=int(KEEP_ALIVE_S + KEEP_ALIVE_SPARE_S),
            timeout_graceful_shutdown=_GRACE_S,
            **tls,
        )
    )


async def _until_served(
    server: _Server, serving: asyncio.Task[None], client: Client | None
) -> None:
    """Until the server has stopped. Without an engine it stops with an error: whatever started this
    process starts it again. `client`: of a sole model; in a pool, one that fails does not end the
    others."""
    if client is None:
        await serving
        return
    giving_up = asyncio.create_task(client.gave_up.wait())
    await asyncio.wait([serving, giving_up], return_when=asyncio.FIRST_COMPLETED)
    giving_up.cancel()
    death = client.death  # one of several engines may come back while the server ends
    server.should_exit = True
    await serving
    if death:
        raise EngineDead(
            death,
            fix="The messages above say more. The server ends, so that it can be started again.",
        )


async def _drain(models: Models, batches: Batches, server: _Server, seconds: float) -> None:
    """New requests are refused, and those under way may finish. Batches go on after the next
    start."""
    models.drain()
    await batches.stop()
    end = asyncio.get_running_loop().time() + seconds
    while models.num_pending and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)
    server.should_exit = True


def data_folder() -> Path:
    """The usual place for a program's data."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tidemill"
