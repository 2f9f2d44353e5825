"""RayLink: an engine that runs in an actor of a Ray cluster, as EngineClient sees it. Loads no
torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.cluster.ray.actor import HEARTBEAT_S, EngineActor
from tidemill.cluster.ray.cluster import Cluster, Needs
from tidemill.config import EngineOptions
from tidemill.engine.link import START_S, OnLoading, error_from
from tidemill.errors import EngineDead
from tidemill.types.wire import (
    FromEngine,
    Loading,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)

_SILENT_S = 30 * HEARTBEAT_S  # after which an actor is given up
_STOP_S = 5.0


class RayLink:
    """`actor`: one that is placed already, or None: the link places one, in the room of the
    placement group if there is one. `kv_key`: of engines that exchange pages with it."""

    def __init__(
        self,
        cluster: Cluster,
        needs: Needs,
        actor: Any = None,
        group: Any = None,
        kv_key: bytes = b"",
    ) -> None:
        self._cluster, self._needs, self._actor = cluster, needs, actor
        self._group, self._kv_key = group, kv_key
        self._frames: Any = None
        self._early: list[FromEngine] = []  # that came along with Ready
        self._outbox: list[bytes] = []
        self._num_calls = 0
        self._is_ready = False
        self._is_killed = False
        self.last_error = ""
        self.is_blameless = False

    async def start(
        self, options: EngineOptions, on_loading: OnLoading | None = None, within_s: float = START_S
    ) -> Ready:
        if self._actor is None:
            (self._actor,) = await self._cluster.place(EngineActor, self._needs, group=self._group)
        run = self._actor.run.options(num_returns="streaming")
        self._frames = run.remote(msgspec.msgpack.encode(options), within_s, self._kv_key)
        end_s = asyncio.get_running_loop().time() + within_s
        while True:
            try:
                messages = await self._next(_SILENT_S)
            except EngineDead as error:
                raise EngineDead(
                    f"The engine could not be started on its node: {error.message}"
                ) from error
            if messages is None:
                raise EngineDead("The engine ended while starting.")
            for index, message in enumerate(messages):
                if isinstance(message, Ready):
                    self._is_ready = True
                    self._early = messages[index + 1 :]
                    return message
                if isinstance(message, Refused):
                    raise error_from(message)
                if isinstance(message, Loading):
                    end_s = asyncio.get_running_loop().time() + within_s
                    if on_loading:
                        on_loading(message)
            if asyncio.get_running_loop().time() > end_s:
                raise EngineDead(f"The engine made no progress in {within_s:g} s while starting.")

    async def _next(self, within_s: float) -> list[FromEngine] | None:
        """Messages that have arrived; None: there will be no more. EngineDead: the actor or its
        node is gone."""
        try:
            ref = await asyncio.wait_for(self._frames.__anext__(), within_s)
            return [decode_from_engine(frame) for frame in await ref]
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise EngineDead(f"The actor has been silent for {within_s:g} s.") from None
        except self._cluster.errors as error:
            raise EngineDead(f"The actor or its node is gone ({type(error).__name__}).") from error

    def send(self, message: ToEngine) -> None:
        """Those of one turn of the event loop travel together."""
        if self._is_killed or self._actor is None:
            raise EngineDead("The actor is gone.")
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(encode(message))

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self._actor is not None:
            self._actor.send.remote(self._num_calls, messages)
            self._num_calls += 1

    async def read(self, take: Callable[[FromEngine], None]) -> None:
        early, self._early = self._early, []
        for message in early:
            take(message)
        while True:
            try:
                messages = await self._next(_SILENT_S)
            except EngineDead as error:
                self.is_blameless = not self.last_error and not self._is_killed
                self.last_error = self.last_error or error.message
                return
            if messages is None:
                self.last_error = self.last_error or "The engine process has ended."
                return
            for message in messages:
                if isinstance(message, Refused) and message.request_id is None:
                    self.last_error = message.message
                else:
                    take(message)

    def kill(self) -> None:
        self._is_killed = True
        if self._actor is not None:
            self._cluster.kill(self._actor)

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._is_ready and not self._is_killed:
            with contextlib.suppress(TimeoutError, *self._cluster.errors):
                actor.send.remote(self._num_calls, [*self._outbox, encode(Shutdown())])
                await asyncio.wait_for(_closed(actor), _STOP_S)
        self._cluster.kill(actor)


async def _closed(actor: Any) -> None:
    await actor.close.remote()
