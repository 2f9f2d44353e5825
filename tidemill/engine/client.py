"""EngineClient: starts the engine process and talks to it from an event loop. Loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tidemill.config import EngineOptions
from tidemill.errors import ERRORS_BY_NAME, EngineDead, TidemillError
from tidemill.events import Event
from tidemill.wire import (
    Abort,
    Delta,
    Loading,
    Ready,
    Refused,
    Shutdown,
    Start,
    StepOutput,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)

_STOP_S = 5.0


class EngineClient:
    """One engine process. `submit` returns a stream of deltas; leaving the stream early aborts the request."""

    def __init__(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        self._on_events = on_events
        self._streams: dict[str, asyncio.Queue[Delta | TidemillError]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._dead: EngineDead | None = None
        self.ready: Ready | None = None

    @property
    def alive(self) -> bool:
        return self._dead is None and self.ready is not None

    @property
    def num_live(self) -> int:
        return len(self._streams)

    async def start(self, options: EngineOptions, on_loading: Callable[[Loading], None] | None = None) -> Ready:
        """Spawn the process and wait until the model is loaded; raises what went wrong."""
        self._folder = tempfile.mkdtemp(prefix="tidemill-")  # mode 0700
        endpoint = f"ipc://{self._folder}/engine.sock"
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        umask = os.umask(0o177)  # the socket file gets mode 0600
        try:
            self._socket.bind(endpoint)
        finally:
            os.umask(umask)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill.engine.process", endpoint,
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        died = asyncio.create_task(self._process.wait())
        starting = asyncio.ensure_future(self._socket.send(encode(Start(options))))  # waits until the process connects
        try:
            while True:
                receiving = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait([receiving, died], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    raise EngineDead(f"The engine process ended with code {self._process.returncode} while starting.")
                message = decode_from_engine(receiving.result())
                if isinstance(message, Loading) and on_loading:
                    on_loading(message)
                elif isinstance(message, Refused):
                    raise error_from(message)
                elif isinstance(message, Ready):
                    self.ready = message
                    break
        except BaseException:
            await self.close()
            raise
        finally:
            died.cancel()
            starting.cancel()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self.ready

    async def submit(self, request: Submit) -> AsyncIterator[Delta]:
        """Deltas of all samples, until each has finished."""
        if request.request_id in self._streams:
            raise TidemillError(f"Request id {request.request_id} is in use.")
        queue: asyncio.Queue[Delta | TidemillError] = asyncio.Queue()
        self._streams[request.request_id] = queue
        num_left = request.params.n
        try:
            self._send(request)
            while num_left:
                item = await queue.get()
                if isinstance(item, TidemillError):
                    num_left = 0
                    raise item
                num_left -= item.finish_reason is not None
                yield item
        finally:
            self._streams.pop(request.request_id, None)
            if num_left:
                self.abort(request.request_id, "client left")

    def abort(self, request_id: str, reason: str, index: int | None = None) -> None:
        """End one sample, or all; the stream sees nothing more of it."""
        with contextlib.suppress(EngineDead):
            self._send(Abort(request_id, reason, index))

    async def close(self) -> None:
        """End the process and remove the socket. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(EngineDead):
                self._send(Shutdown())
            if process.stdin:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._fail_all(EngineDead("The engine has been shut down."))
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def socket_path(self) -> Path | None:
        return Path(self._folder) / "engine.sock" if self._folder else None

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    def _send(self, message: ToEngine) -> None:
        """Never waits: the queue has no limit of its own, and without a peer there is nobody to wait for."""
        if self._dead or self._socket is None:
            raise self._dead or EngineDead("The engine is not running.")
        sent: Any = self._socket.send(encode(message), flags=zmq.NOBLOCK)  # done by the time it returns
        if sent.exception() is not None:
            raise EngineDead("The engine process does not listen.", fix="Restart the server.")

    async def _read(self) -> None:
        assert self._socket is not None
        while True:
            message = decode_from_engine(await self._socket.recv())
            if isinstance(message, StepOutput):
                for delta in message.deltas:
                    queue = self._streams.get(delta.request_id)
                    if queue is not None:
                        queue.put_nowait(delta)
                if self._on_events and message.events:
                    self._on_events(message.events)
            elif isinstance(message, Refused):
                queue = self._streams.get(message.request_id or "")
                if queue is not None:
                    queue.put_nowait(error_from(message))

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self._fail_all(EngineDead(f"The engine process ended with code {code}.", fix="Restart the server."))

    def _fail_all(self, error: EngineDead) -> None:
        self._dead = self._dead or error
        for queue in self._streams.values():
            queue.put_nowait(error)


def error_from(message: Refused) -> TidemillError:
    cls = ERRORS_BY_NAME.get(message.error, TidemillError)
    return cls(message.message, fix=message.fix, param=message.param)
