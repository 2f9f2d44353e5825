"""EngineClient: starts the engine process and talks to it from an event loop. Loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from typing import Any

import zmq
import zmq.asyncio

from tidemill.config import EngineOptions
from tidemill.errors import ERRORS_BY_NAME, EngineDead, TidemillError
from tidemill.events import Event
from tidemill.wire import (
    Abort,
    Delta,
    Finish,
    FromEngine,
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
_LAST_WORDS_S = 0.5
_log = logging.getLogger("tidemill.engine")


class EngineClient:
    """One engine process. `submit` returns a stream of deltas; leaving the stream early aborts the request."""

    def __init__(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        self._on_events = on_events
        self._streams: dict[str, asyncio.Queue[Delta | TidemillError]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._death = ""  # what became of the engine, if it is gone
        self.ready: Ready | None = None

    @property
    def alive(self) -> bool:
        return not self._death and self.ready is not None

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
        try:
            self.ready = await self._spawn(endpoint, options, on_loading)
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self.ready

    async def _spawn(self, endpoint: str, options: EngineOptions, on_loading: Callable[[Loading], None] | None) -> Ready:
        # -P: the current folder is not searched for modules; a downloaded model's folder must not bring code of its own.
        command = [sys.executable, "-P", "-m", "tidemill.engine.process", endpoint]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        self._process = process
        assert self._socket is not None
        died = asyncio.create_task(process.wait())
        starting = asyncio.ensure_future(self._socket.send(encode(Start(options))))  # waits until the process connects
        receiving = None
        try:
            while True:
                receiving = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait([receiving, died], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():  # its last message may still be on the way
                    await asyncio.wait([receiving], timeout=_LAST_WORDS_S)
                if not receiving.done():
                    raise EngineDead(f"The engine process ended with code {process.returncode} while starting.")
                message = decode_from_engine(receiving.result())
                if isinstance(message, Loading) and on_loading:
                    on_loading(message)
                elif isinstance(message, Refused):
                    raise error_from(message)
                elif isinstance(message, Ready):
                    return message
        finally:
            for task in (died, starting, receiving):
                if task is not None:
                    task.cancel()

    async def submit(self, request: Submit) -> AsyncGenerator[Delta, None]:
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

    def finish(self, request_id: str, index: int) -> None:
        """A sample's text reached a stop string."""
        with contextlib.suppress(EngineDead):
            self._send(Finish(request_id, index))

    async def close(self) -> None:
        """End the process and remove the socket, whatever state they are in. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None and self.ready is not None:
                with contextlib.suppress(EngineDead, TimeoutError):
                    self._send(Shutdown())
                    await asyncio.wait_for(process.wait(), _STOP_S)
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            self._fail_all("The engine has been shut down.")
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
        if process is not None:
            await process.wait()

    def _send(self, message: ToEngine) -> None:
        """Never waits: the queue has no limit of its own, and without a peer there is nobody to wait for."""
        if self._death or self._socket is None:
            raise EngineDead(self._death or "The engine is not running.", fix="Restart the server.")
        sent: Any = self._socket.send(encode(message), flags=zmq.NOBLOCK)  # done by the time it returns
        if not sent.done() or sent.exception() is not None:
            raise EngineDead("The engine process does not listen.", fix="Restart the server.")

    async def _read(self) -> None:
        assert self._socket is not None
        try:
            while True:
                self._take(decode_from_engine(await self._socket.recv()))
        except Exception as error:
            _log.exception("the engine's messages cannot be read any more")
            self._fail_all(f"The engine's messages cannot be read: {type(error).__name__}.")

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            for delta in message.deltas:
                queue = self._streams.get(delta.request_id)
                if queue is not None:
                    queue.put_nowait(delta)
            if self._on_events and message.events:
                try:
                    self._on_events(message.events)
                except Exception:
                    _log.exception("a reader of events failed")
        elif isinstance(message, Refused):
            if message.request_id is None:
                self._last_words = message.message
            elif message.request_id in self._streams:
                self._streams[message.request_id].put_nowait(error_from(message))

    _last_words = ""  # of the engine process, before it ended

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(_LAST_WORDS_S / 2)  # what it said last is read first
        self._fail_all(self._last_words or f"The engine process ended with code {code}.")

    def _fail_all(self, why: str) -> None:
        self._death = self._death or why
        for queue in self._streams.values():
            queue.put_nowait(EngineDead(why, fix="Restart the server."))


def error_from(message: Refused) -> TidemillError:
    cls = ERRORS_BY_NAME.get(message.error, TidemillError)
    return cls(message.message, fix=message.fix, param=message.param)
