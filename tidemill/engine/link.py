"""EngineLink: one engine process and the socket to it, from an event loop. Loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from tidemill.config import EngineOptions
from tidemill.errors import ERRORS_BY_NAME, EngineDead, TidemillError
from tidemill.wire import FromEngine, Loading, Ready, Refused, Shutdown, Start, ToEngine, decode_from_engine, encode

_STOP_S = 5.0
_LAST_WORDS_S = 0.5
_AT_ONCE = 16  # messages


class EngineLink:
    """Started once, closed once."""

    module = "tidemill.engine.process"  # what the process runs

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._folder = tempfile.mkdtemp(prefix="tidemill-")  # mode 0700
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):
            self._socket.setsockopt(option, 0)
        self._is_ready = False
        self.last_words = ""  # of the process, before it ended

    async def start(self, options: EngineOptions, on_loading: Callable[[Loading], None] | None = None) -> Ready:
        """Spawn the process and wait until the model is loaded; raises what went wrong."""
        endpoint = f"ipc://{self._folder}/engine.sock"
        umask = os.umask(0o177)  # the socket file gets mode 0600
        try:
            self._socket.bind(endpoint)
        finally:
            os.umask(umask)
        # -P: the current folder is not searched for modules; a downloaded model's folder must not bring code of its own.
        command = [sys.executable, "-P", "-m", self.module, endpoint]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        self._process = process
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
                    self._is_ready = True
                    return message
        finally:
            for task in (died, starting, receiving):
                if task is not None:
                    task.cancel()

    def send(self, message: ToEngine) -> None:
        """Never waits: the queue has no limit of its own, and without a peer there is nobody to wait for."""
        sent: Any = self._socket.send(encode(message), flags=zmq.NOBLOCK)  # done by the time it returns
        if not sent.done() or sent.exception() is not None:
            raise EngineDead("The engine process does not listen.")

    async def read(self, take: Callable[[FromEngine], None]) -> None:
        """Hand over what it says, until it has ended and nothing more is on the way."""
        process = self._process
        assert process is not None
        died = asyncio.create_task(process.wait())
        receiving = asyncio.ensure_future(self._socket.recv())
        try:
            while True:
                await asyncio.wait([receiving, died], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    await asyncio.wait([receiving], timeout=_LAST_WORDS_S / 2)
                if not receiving.done():
                    self.last_words = self.last_words or f"The engine process ended with code {process.returncode}."
                    return
                for _ in range(_AT_ONCE):  # what is there already, before those whom it concerns get on with it
                    message = decode_from_engine(receiving.result())
                    if isinstance(message, Refused) and message.request_id is None:
                        self.last_words = message.message
                    take(message)
                    receiving = asyncio.ensure_future(self._socket.recv())
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
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        if process is not None:
            await process.wait()


def error_from(message: Refused) -> TidemillError:
    cls = ERRORS_BY_NAME.get(message.error, TidemillError)
    return cls(message.message, fix=message.fix, param=message.param)
