"""The server's life: engine, listening socket, signals, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from tidemill.config import EngineOptions
from tidemill.engine.client import STALL_S, EngineClient
from tidemill.engine.link import START_S
from tidemill.errors import ConfigError, EngineDead
from tidemill.events import Event
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.app import create_app
from tidemill.server.batches import Batches
from tidemill.server.call import RequestLog
from tidemill.server.explain import Explainer
from tidemill.server.guard import Access
from tidemill.server.live import Live
from tidemill.server.metrics import Metrics
from tidemill.server.protocol import KEEP_ALIVE_S, KEEP_ALIVE_SPARE_S, MAX_CONNECTIONS, BoundedProtocol, Connections
from tidemill.server.service import Service
from tidemill.server.storage import Storage
from tidemill.weights.locate import locate
from tidemill.wire import Loading, Ready

DATA_QUOTA_BYTES = 10 * 2**30
_GRACE_S = 5  # for connections to close when nothing is under way any more
_MAX_FILES = 2**16  # that this process asks for
_RESERVED_FILES = 256  # which connections leave to engine restarts, workers and storage


class _Server(uvicorn.Server):
    """Signals are handled here, so that the engine is closed before the process ends and the exit code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    options: EngineOptions,
    host: str,
    port: int,
    on_loading: Callable[[Loading], None] | None = None,
    on_ready: Callable[[Ready, int], None] | None = None,
    drain_s: float = 30.0,
    access: Access | None = None,
    data: Storage | None = None,
    log: RequestLog | None = None,
    stall_seconds: float = STALL_S,
    start_seconds: float = START_S,
) -> None:
    """Runs until SIGINT or SIGTERM: then nothing new is taken, and what is under way has `drain_s` to end. A second signal does
    not wait. Raises EngineDead if the engine cannot be kept running. `on_ready` gets the port, too: port 0 takes any free one.
    `stall_seconds`, `start_seconds`: see EngineClient."""
    access = access or Access()
    access.check_host_is_safe(host)
    data = data or Storage(data_folder(), DATA_QUOTA_BYTES)
    path = locate(options.model)
    listening = _listen(host, port)  # before gigabytes are read
    metrics = Metrics()
    explainer = Explainer()

    def on_events(batch: list[Event]) -> None:
        metrics.take(batch)
        explainer.take(batch)
        live.take(batch)

    client = EngineClient(on_events, stall_seconds, lambda pages: live.take_pages(pages), start_seconds)
    live = Live(client, metrics, explainer)
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    server: _Server | None = None
    service: Service | None = None
    batches: Batches | None = None
    draining: asyncio.Task[None] | None = None

    def stop() -> None:
        nonlocal draining
        if server is None or service is None or batches is None or not server.started:
            assert me is not None
            me.cancel()  # still loading
        elif draining is None:
            draining = asyncio.create_task(_drain(service, batches, server, drain_s))
        else:
            server.force_exit = server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        starting = asyncio.create_task(client.start(options, on_loading))
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, path, options.chat_template)
            ready = await starting
        finally:
            starting.cancel()  # has an effect only if the tokenizer failed or the wait was interrupted
            await asyncio.wait([starting])
        name = options.served_name or options.model
        service = Service(client, tokenizer, name, metrics, explainer, live)
        batches = Batches(service, data, access.caller_of, log)
        server = _http_server(create_app(service, access, data, batches, log))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            gc.collect()
            gc.freeze()  # collections look at what requests bring, not at all that was loaded: 100 ms each time
            await batches.resume()
            if on_ready:
                on_ready(ready, listening.getsockname()[1])
        await _until_served(server, serving, client)
    finally:
        if batches is not None:
            await batches.stop()
        if service is not None:
            service.close()
        await client.close()
        data.close()
        listening.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _http_server(app: ASGIApp) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=type("Protocol", (BoundedProtocol,), {"limits": Connections(_max_connections())}),
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            headers=[("keep-alive", f"timeout={KEEP_ALIVE_S:.0f}")],
            timeout_keep_alive=int(KEEP_ALIVE_S + KEEP_ALIVE_SPARE_S),
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


async def _until_served(server: _Server, serving: asyncio.Task[None], client: EngineClient) -> None:
    """Until the server has stopped. Without an engine it stops with an error: whatever started this process starts it again."""
    giving_up = asyncio.create_task(client.gave_up.wait())
    await asyncio.wait([serving, giving_up], return_when=asyncio.FIRST_COMPLETED)
    giving_up.cancel()
    server.should_exit = True
    await serving
    if client.death:
        raise EngineDead(client.death, fix="The messages above say more. The server ends, so that it can be started again.")


async def _drain(service: Service, batches: Batches, server: _Server, seconds: float) -> None:
    """New requests are refused, and those under way may finish. Batches go on after the next start."""
    service.is_draining = True
    await batches.stop()
    end = asyncio.get_running_loop().time() + seconds
    while service.client.num_pending and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.05)
    server.should_exit = True


def _max_connections() -> int:
    """Raises the limit of open files as far as this process may, and leaves some of them in reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems have another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    num_files = _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(min(MAX_CONNECTIONS, num_files - min(_RESERVED_FILES, num_files // 2)), 1)


def data_folder() -> Path:
    """The usual place for a program's data."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tidemill"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"Cannot listen on {host}:{port}: {error}.", fix="Choose another --port or --host.") from error
    return listening
