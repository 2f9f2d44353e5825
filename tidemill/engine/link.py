"""EngineLink: one engine process and the socket to it, from an event loop. Loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import zmq
import zmq.asyncio

from tidemill.config import EngineOptions
from tidemill.errors import ERRORS_BY_NAME, EngineDead, TidemillError
from tidemill.types.wire import (
    FromEngine,
    Inspect,
    Inspected,
    Loading,
    Ready,
    Refused,
    Shutdown,
    Start,
    ToEngine,
    decode_from_engine,
    encode,
)

T = TypeVar("T")
OnLoading: TypeAlias = Callable[[Loading], None]

START_S = 300.0  # without a sign of progress, after which a start has failed
_STOP_S = 5.0
_LAST_MESSAGES_S = 0.5  # on their way from a process that has ended
_AT_ONCE = 16  # messages


class Link(Protocol):
    """The interface of an engine that a client needs, wherever the engine runs. It is started once
    and closed once."""

    last_error: str  # why it ended
    is_blameless: bool  # it was lost with its machine or by hand, and not by what it computed

    async def start(
        self, options: EngineOptions, on_loading: OnLoading | None = None, within_s: float = START_S
    ) -> Ready:
        """Raises what the engine reports; EngineDead if it ends or makes no progress for
        `within_s`; OSError if what it takes is not there, but may be later."""
        ...

    def send(self, message: ToEngine) -> None:
        """Never waits. EngineDead: there is nobody to send it to."""
        ...

    async def read(self, take: Callable[[FromEngine], None]) -> None:
        """Hand over its messages, until it has ended and no more are on the way."""
        ...

    def kill(self) -> None: ...

    async def close(self) -> None:
        """Whatever state it is in. Safe to call twice."""
        ...


class EngineLink:
    """To a process of this machine."""

    module = "tidemill.engine"  # what the process runs
    is_blameless = False  # nobody knows

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: of the process, besides this one's."""
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""
        self._socket: zmq.asyncio.Socket | None = None
        self._is_ready = False
        self.last_error = ""  # why the process ended

    @property
    def pid(self) -> int | None:
        """The process's id; None: there is none."""
        return None if self._process is None else self._process.pid

    async def start(
        self, options: EngineOptions, on_loading: OnLoading | None = None, within_s: float = START_S
    ) -> Ready:
        """Spawn the process and wait until it is ready. Raises what the engine reports; EngineDead
        if it ends or makes no progress for `within_s`; OSError if this process lacks what it takes:
        file descriptors, a temporary folder."""
        ready = await self._ask(Start(options), Ready, on_loading, within_s)
        self._is_ready = True
        return ready

    async def inspect(
        self, model: str, draft_model: str | None = None, within_s: float = START_S
    ) -> Inspected:
        """A model's shape, from a process that is not started. May be called several times."""
        return await self._ask(Inspect(model, draft_model), Inspected, None, within_s)

    async def _ask(
        self,
        message: ToEngine,
        kind: type[T],
        on_loading: Callable[[Loading], None] | None,
        within_s: float,
    ) -> T:
        """Send a message to the process, which is spawned if there is none, and wait for its
        answer."""
        try:
            process, socket = await self._spawn()
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        died = asyncio.create_task(process.wait())
        # waits until the process connects
        starting = asyncio.ensure_future(socket.send(encode(message)))
        receiving = None
        try:
            while True:
                receiving = asyncio.ensure_future(socket.recv())
                done, _ = await asyncio.wait(
                    [receiving, died], timeout=within_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise EngineDead(
                        f"The engine process made no progress in {within_s:g} s while starting."
                    )
                if not receiving.done():
                    await asyncio.wait([receiving], timeout=_LAST_MESSAGES_S)
                if not receiving.done():
                    raise EngineDead(
                        f"The engine process ended with code {process.returncode} while starting."
                    )
                reply = decode_from_engine(receiving.result())
                if isinstance(reply, Loading) and on_loading:
                    on_loading(reply)
                elif isinstance(reply, Refused):
                    raise error_from(reply)
                elif isinstance(reply, kind):
                    return reply
        finally:
            for task in (died, starting, receiving):
                if task is not None:
                    task.cancel()

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, zmq.asyncio.Socket]:
        if self._process is not None and self._socket is not None:
            return self._process, self._socket
        self._folder = tempfile.mkdtemp(prefix="tidemill-")  # mode 0700
        self._socket = socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):
            socket.setsockopt(option, 0)
        endpoint = f"ipc://{self._folder}/engine.sock"
        umask = os.umask(0o177)  # the socket file gets mode 0600
        try:
            socket.bind(endpoint)
        finally:
            os.umask(umask)
        # -P: the current folder is not searched for modules; a downloaded model's folder must not
        # bring code of its own.
        command = [sys.executable, "-P", "-m", self.module, endpoint]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=None if self._environ is None else {**os.environ, **self._environ},
        )
        return self._process, socket

    def send(self, message: ToEngine) -> None:
        """Never waits: the queue has no limit, and without a peer EngineDead is raised."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        assert self._socket is not None
        sent: Any = self._socket.send(message, flags=zmq.NOBLOCK)  # done by the time it returns
        if not sent.done() or sent.exception() is not None:
            raise EngineDead("The engine process does not listen.")

    async def read(self, take: Callable[[FromEngine], None]) -> None:
        """Hand over its messages, until it has ended and no more are on the way."""

        def decode(frame: bytes) -> None:
            message = decode_from_engine(frame)
            if isinstance(message, Refused) and message.request_id is None:
                self.last_error = message.message
            take(message)

        await self.read_encoded(decode)

    async def read_encoded(self, take: Callable[[bytes], None]) -> None:
        process, socket = self._process, self._socket
        assert process is not None
        assert socket is not None
        died = asyncio.create_task(process.wait())
        receiving = asyncio.ensure_future(socket.recv())
        try:
            while True:
                await asyncio.wait([receiving, died], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    await asyncio.wait([receiving], timeout=_LAST_MESSAGES_S / 2)
                if not receiving.done():
                    self.last_error = (
                        self.last_error
                        or f"The engine process ended with code {process.returncode}."
                    )
                    return
                for _ in range(_AT_ONCE):  # those that have arrived, before other tasks run
                    take(receiving.result())
                    receiving = asyncio.ensure_future(socket.recv())
                    if not receiving.done():
                        break
        finally:
            died.cancel()
            receiving.cancel()

    def kill(self) -> None:
        """Whatever it is doing."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process and remove the socket, whatever state they are in. Safe to call twice."""
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None and self._is_ready:
                with contextlib.suppress(EngineDead, TimeoutError):
                    self.send(Shutdown())
                    await asyncio.wait_for(process.wait(), _STOP_S)
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            if self._socket is not None:
                self._socket.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
        if process is not None:
            await process.wait()


def error_from(message: Refused) -> TidemillError:
    cls = ERRORS_BY_NAME.get(message.error, TidemillError)
    return cls(message.message, fix=message.fix, param=message.param)
