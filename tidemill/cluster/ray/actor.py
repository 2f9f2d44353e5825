"""The actors that run on the nodes of a cluster: engines, and workers of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import msgspec

from tidemill.batch.lines import Request
from tidemill.batch.local import Local
from tidemill.config import EngineOptions
from tidemill.engine.link import EngineLink
from tidemill.errors import TidemillError
from tidemill.server.generation.models import Served
from tidemill.types.wire import Refused, encode
from tidemill.version import __version__
from tidemill.weights.locate import locate

HEARTBEAT_S = 1.0
_PORT_TRIES = 100


@dataclass(frozen=True)
class ActorInfo:
    """The address and resources of an actor's process."""

    version: str = __version__
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    node_id: str = ""

    @staticmethod
    def here() -> ActorInfo:
        import ray

        return ActorInfo(node_id=ray.get_runtime_context().get_node_id())


def _own_ip() -> str:
    """By which other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _here(export: str | None) -> str | None:
    """The address where pages are exported: this node's, also if the engine was on another node
    before."""
    if export is None:
        return None
    kind, _, rest = export.split(":", 2)
    return f"{kind}:{_own_ip()}:{rest}"


def free_ports(num: int) -> int:
    """The first of so many, one after the other."""
    for _ in range(_PORT_TRIES):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            first = probes.enter_context(socket.socket())
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            for at in range(1, num):
                probes.enter_context(socket.socket()).bind(("", port + at))
            return port
    raise OSError(f"no {num} free ports one after the other were found")


def _refused(error: TidemillError) -> Refused:
    return Refused(None, type(error).__name__, error.message, error.fix, error.param)


class EngineActor:
    """An engine process, which ends when the actor does. Messages are those between a client and an
    engine, encoded."""

    def __init__(self) -> None:
        self._link = EngineLink()
        self._early: dict[int, list[bytes]] = {}  # by number: calls do not always arrive in order
        self._next = 0
        self._unread: list[bytes] = []
        self._changed = asyncio.Event()

    async def info(self) -> ActorInfo:
        return ActorInfo.here()

    async def door(self, num: int = 1) -> tuple[str, int]:
        """An address of this node, and a port that is free, as are those after it."""
        return _own_ip(), free_ports(num)

    async def run(
        self, start: bytes, within_s: float, kv_key: bytes = b""
    ) -> AsyncGenerator[list[bytes], None]:
        """Start the engine, then what it sends, until it has ended; with nothing to send, an empty
        list now and then. The last message of an engine that failed is a refusal. `kv_key`: of
        engines that exchange pages with it."""
        running = asyncio.create_task(self._run(start, within_s, kv_key))
        running.add_done_callback(lambda _: self._changed.set())
        try:
            while self._unread or not running.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
                self._changed.clear()
                messages, self._unread = self._unread, []
                yield messages
        finally:
            running.cancel()
            await asyncio.wait([running])
            await self._link.close()

    async def _run(self, start: bytes, within_s: float, kv_key: bytes) -> None:
        options = msgspec.msgpack.decode(start, type=EngineOptions)
        with tempfile.NamedTemporaryFile() as kept:  # of mode 0600
            if kv_key:
                kept.write(kv_key)
                kept.flush()
                options = replace(
                    options, kv_key_file=kept.name, kv_export=_here(options.kv_export)
                )
            await self._run_engine(options, within_s)

    async def _run_engine(self, options: EngineOptions, within_s: float) -> None:
        try:
            await asyncio.to_thread(locate, options.model, fetch=True)
            ready = await self._link.start(
                options, lambda message: self._put(encode(message)), within_s
            )
            self._put(encode(ready))
            self._forward()
            await self._link.read_encoded(self._put)
            self._put(encode(Refused(None, "EngineDead", self._link.last_error)))
        except TidemillError as error:
            self._put(encode(_refused(error)))
        except OSError as error:
            self._put(
                encode(
                    Refused(None, "EngineDead", f"The engine process cannot be started: {error}.")
                )
            )

    def _put(self, message: bytes) -> None:
        self._unread.append(message)
        self._changed.set()

    async def send(self, number: int, messages: list[bytes]) -> None:
        """`number`: of the call, from 0."""
        self._early[number] = messages
        self._forward()

    def _forward(self) -> None:
        while self._next in self._early:
            for message in self._early.pop(self._next):
                self._link.send_encoded(message)
            self._next += 1

    async def close(self) -> None:
        """End the engine in order."""
        await self._link.close()


class BatchActor:
    """Executes lines of a batch with an engine of its own."""

    def __init__(self) -> None:
        self._local: Local | None = None

    async def info(self) -> ActorInfo:
        return ActorInfo.here()

    async def start(
        self, options: bytes, num_at_once: int | None, stall_s: float, start_s: float
    ) -> int | bytes:
        """Starts the engine; returns how many lines it executes at once; or a refusal, encoded."""
        engine = msgspec.msgpack.decode(options, type=EngineOptions)
        try:
            await asyncio.to_thread(locate, engine.model, fetch=True)
            self._local = Local(Served(engine), num_at_once, stall_s, start_s)
            await self._local.start()
        except TidemillError as error:
            if self._local is not None:
                await self._local.close()
            return encode(_refused(error))
        return self._local.num_at_once

    async def execute(self, requests: bytes) -> bytes:
        """The responses to requests, in their order."""
        assert self._local is not None
        batch = msgspec.msgpack.decode(requests, type=list[Request])
        return msgspec.msgpack.encode(await asyncio.gather(*map(self._local.respond, batch)))

    async def close(self) -> None:
        if self._local is not None:
            await self._local.close()
