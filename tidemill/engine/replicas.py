"""Replicas: several engines that serve one model, behind the interface of EngineClient. Loads no
torch.

Each replica is an engine process of its own, with a client that supervises it. A request goes where
its routing says (`engine.routing`). If its replica is lost, it goes on in another at once, from the
tokens that were delivered, unless it may have been the cause; then it waits until that replica has
been started again. One that cannot be started is tried again for ever; the model is given up when
all replicas are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from array import array
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tidemill.capabilities import asked, check
from tidemill.config import EngineOptions, settled
from tidemill.config.transfer import numbered
from tidemill.engine.client import STALL_S, EngineClient
from tidemill.engine.link import START_S, EngineLink
from tidemill.engine.pending import EngineLost
from tidemill.engine.routing import Route, Routing
from tidemill.errors import EngineDead, TidemillError
from tidemill.kv.manager import FIRST_OWNER
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import AdapterInfo, Delta, Loading, Pages, Ready, Submit

MAX_LOSSES = 5


class Replicas:
    def __init__(
        self,
        num: int,
        on_events: Callable[[list[Event]], None] | None = None,
        stall_s: float = STALL_S,
        on_pages: Callable[[Pages], None] | None = None,
        start_s: float = START_S,
        routing: Routing | None = None,
    ) -> None:
        self._on_events, self._on_pages = on_events, on_pages
        self.routing = routing or Routing()
        self._gpus = _gpus()
        self.clients = [self._client(number, num, stall_s, start_s) for number in range(num)]
        self._names = {str(number): client for number, client in enumerate(self.clients)}
        self.routes: dict[str, Route] = {}
        self.routing.begin(self.clients, lambda number, event: self._tell(number, [event]))
        self._pages: dict[int, Pages] = {}  # those that have come since they were asked for
        self.adapters = ReplicaAdapters(self.clients)
        self.on_change: Callable[[], None] | None = None
        self.gave_up = asyncio.Event()
        self._is_moving = False

    def _client(self, number: int, num: int, stall_s: float, start_s: float) -> EngineClient:
        environ = (
            {"CUDA_VISIBLE_DEVICES": self._gpus[number % len(self._gpus)]}
            if self._gpus and num > 1
            else None
        )
        take, pages = partial(self._take_events, number), partial(self._take_pages, number)
        client = EngineClient(
            take, stall_s, pages, start_s, partial(EngineLink, environ), True, self.routing.gate
        )
        client.on_change = self._changed
        return client

    # ---- start and end

    async def start(
        self, options: EngineOptions, on_loading: Callable[[Loading], None] | None = None
    ) -> Ready:
        """All of them, or none. The first settles the values; the others get the same, so that each
        can take every request."""
        is_several = len(self.clients) > 1 and not options.has_roles
        on_gpus = self._gpus and options.device != "cpu"
        check(
            asked(options)
            | ({"data-parallel"} if is_several else set())
            | ({"GPU"} if on_gpus else set())
        )
        options_of = [self._options(options, number) for number in range(len(self.clients))]
        try:
            ready = await self.clients[0].start(options_of[0], on_loading)
            self.routing.check(ready)
            same = [settled(own, ready.config) for own in options_of[1:]]
            await all_started(
                client.start(own) for client, own in zip(self.clients[1:], same, strict=True)
            )
        except BaseException:
            await self.close()
            raise
        self.gave_up.clear()
        return ready

    def _options(self, options: EngineOptions, number: int) -> EngineOptions:
        """The options of one replica: those that replicas cannot share are divided."""
        on_device = (
            len(self.clients)
            if not self._gpus or options.device == "cpu"
            else -(-len(self.clients) // len(self._gpus))
        )
        disk = options.kv_disk
        if disk is not None:
            folder, _, size = disk.rpartition(":")
            disk = f"{folder}/replica-{number}:{size}"
        export = numbered(
            options.kv_export, number, options.tensor_parallel * options.pipeline_parallel
        )
        own = dataclasses.replace(options, data_parallel=on_device, kv_disk=disk, kv_export=export)
        return self.routing.options(own, number)

    async def stop(self) -> None:
        await asyncio.gather(*(client.stop() for client in self.clients))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))

    def hold(self) -> None:
        for client in self.clients:
            client.hold()

    def release(self) -> None:
        for client in self.clients:
            client.release()

    def _move_waiting(self) -> None:
        """Requests that wait for an engine that is restarted go to one that works."""
        if self._is_moving or not any(client.working for client in self.clients):
            return
        self._is_moving = True  # each that is handed over is a change, and calls this again
        try:
            for client in self.clients:
                client.hand_over_waiting()
        finally:
            self._is_moving = False

    def _changed(self) -> None:
        if self.death:
            self.gave_up.set()
        self._move_waiting()
        self.routing.changed()
        if self.on_change:
            self.on_change()

    # ---- state

    @property
    def num_replicas(self) -> int:
        return len(self.clients)

    @property
    def ready(self) -> Ready | None:
        return self.clients[0].ready

    @property
    def alive(self) -> bool:
        return any(client.alive for client in self.clients)

    @property
    def working(self) -> bool:
        return any(client.working for client in self.clients)

    @property
    def death(self) -> str:
        """Why there will be no engine any more."""
        return self.clients[0].death if all(client.death for client in self.clients) else ""

    @property
    def last_step_s(self) -> float:
        return min(client.last_step_s for client in self.clients)

    @property
    def used_s(self) -> float:
        return max(client.used_s for client in self.clients)

    @property
    def num_pending(self) -> int:
        return sum(client.num_pending for client in self.clients)

    @property
    def num_waiting(self) -> int:
        return sum(client.num_waiting for client in self.clients)

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self.clients)

    @property
    def is_idle(self) -> bool:
        return all(client.is_idle for client in self.clients)

    def described(self) -> list[dict[str, object]]:
        """A description of each replica: its state and its load."""
        states = [{"state": _state(client), "load": client.num_pending} for client in self.clients]
        roles = [{"role": role} for role in self.routing.names] or [{} for _ in states]
        return [state | role for state, role in zip(states, roles, strict=True)]

    def states(self) -> dict[str, str]:
        """States of the replicas that are to take requests, by number and role: running,
        restarting, or down while given up."""
        roles = self.routing.names
        return {
            f"{name} ({roles[int(name)]})" if roles else name: _state(client)
            for name, client in self._names.items()
        }

    # ---- requests

    async def submit(
        self,
        request: Submit,
        timeout_s: float | None = None,
        tells_accepted: bool = False,
        tells_progress: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of the request; same as `EngineClient.submit`."""
        if request.request_id in self.routes:
            raise TidemillError(f"Request id {request.request_id} is in use.")
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        route = self.routes[request.request_id] = self.routing.new_route(request)
        try:
            while len(route.over) < len(route.outputs):
                left_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
                part = self._place(request, route)
                assert route.client is not None
                try:
                    async with aclosing(
                        route.client.submit(part, left_s, tells_accepted, tells_progress)
                    ) as deltas:
                        async for delta in deltas:
                            if (answer := route.take(delta)) is not None:
                                yield answer
                except EngineLost as lost:
                    route.is_known |= lost.is_known
                    route.num_losses += lost.may_have_killed
                    if route.num_losses >= MAX_LOSSES:  # as when it takes all memory of a node
                        what = f"{MAX_LOSSES} engines were lost one after the other while this request was computed."
                        raise EngineDead(
                            what, fix="Try again, perhaps with a smaller request."
                        ) from lost
                tells_accepted &= not route.is_known
        finally:
            del self.routes[request.request_id]
            self.routing.end(request, route)

    def _place(self, request: Submit, route: Route) -> Submit:
        """The request as the chosen engine gets it. The engine is one that works, if any does; one
        that is restarted, or else raises what the engine died of."""
        usable = {name: client for name, client in self._names.items() if client.working} or {
            name: client for name, client in self._names.items() if client.alive
        }
        if not usable:
            raise EngineDead(self.death or "The engine is not running.", fix="Restart the server.")
        name, part = self.routing.place(request, route, usable)
        route.client = self._names[name]
        return msgspec.structs.replace(part, resumed=route.left) if route.is_known else part

    def cancel(self, request_id: str, why: TidemillError) -> bool:
        return any(client.cancel(request_id, why) for client in self.clients)

    def finish(self, request_id: str, index: int) -> None:
        route = self.routes.get(request_id)
        if route is not None:
            route.over.add(index)
            if route.client is not None:
                route.client.finish(request_id, index)

    def fail_all(self, why: TidemillError) -> None:
        for client in self.clients:
            client.fail_all(why)

    def renew(self, name: str, ttl_s: float, reason: str) -> None:
        """Renews the lease in all replicas: several may hold the prefix."""
        for client in self.clients:
            client.renew(name, ttl_s, reason)

    # ---- from the engines

    def _take_events(self, number: int, batch: list[Event]) -> None:
        if any(isinstance(event, events.EngineRestarted) for event in batch):
            asyncio.get_running_loop().call_soon(self._move_waiting)
        self._tell(number, batch)
        self.routing.take(number, batch)

    def _tell(self, number: int, batch: list[Event]) -> None:
        if self._on_events:
            self._on_events(
                [msgspec.structs.replace(event, replica=number) for event in batch]
                if number
                else batch
            )

    def ask_pages(self) -> None:
        self._pages.clear()
        for client in self.clients:
            client.ask_pages()

    def _take_pages(self, number: int, pages: Pages) -> None:
        """The map is of all replicas, one after the other; it is told when all that work have told
        theirs."""
        self._pages[number] = pages
        if self._on_pages and all(
            at in self._pages for at, client in enumerate(self.clients) if client.working
        ):
            self._on_pages(joined([self._pages[at] for at in sorted(self._pages)]))


def _state(client: EngineClient) -> str:
    return "running" if client.working else "restarting" if client.alive else "down"


async def all_started(starts: Iterable[Coroutine[Any, Any, Ready]]) -> None:
    """The first that fails ends the others."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def joined(parts: Sequence[Pages]) -> Pages:
    """The pages of several engines, as if one had them."""
    owners: list[tuple[str, int]] = []
    kinds = array("H")
    tiers: dict[str, tuple[int, int]] = {}
    for part in parts:
        shift = len(owners)
        own = array("H", part.kinds)
        kinds.extend(
            own
            if not shift
            else array("H", [owner + shift if owner >= FIRST_OWNER else owner for owner in own])
        )
        owners += part.owners
        for name, num, most in part.tiers:
            has, may_have = tiers.get(name, (0, 0))
            tiers[name] = has + num, may_have + most
    each = [(name, num, most) for name, (num, most) in tiers.items()]
    return Pages(owners, kinds.tobytes(), max(part.took_s for part in parts), each)


class ReplicaAdapters:
    """The LoRA adapters of all replicas. Each load has the same number everywhere: all get the same
    loads in the same order."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = clients

    @property
    def _first(self) -> EngineClient:
        return self.clients[0]

    def __iter__(self) -> Iterator[AdapterInfo]:
        return iter(self._first.adapters)

    def get(self, name: str) -> AdapterInfo | None:
        return self._first.adapters.get(name)

    def expect(self, options: EngineOptions) -> None:
        for client in self.clients:
            client.adapters.expect(options)

    def enter(self, info: AdapterInfo) -> None:
        for client in self.clients:
            client.adapters.enter(info)

    def leave(self, info: AdapterInfo) -> None:
        for client in self.clients:
            client.adapters.leave(info)

    async def load(self, name: str, path: str, in_place: bool = False) -> AdapterInfo:
        """Into all, or none."""
        if not all(client.working for client in self.clients):
            what = "Not all replicas work: one is started again."
            raise EngineDead(
                what, fix="Load the adapter again in a moment; /health says which replicas work."
            )
        loads = [client.adapters.load(name, path, in_place) for client in self.clients]
        done = await asyncio.gather(*loads, return_exceptions=True)
        failed = next((result for result in done if isinstance(result, BaseException)), None)
        infos = [result for result in done if not isinstance(result, BaseException)]
        if failed is not None:
            for client, result in zip(self.clients, done, strict=True):
                if not isinstance(result, BaseException):
                    client.adapters.unload(name)
            raise failed
        assert len({info.adapter_id for info in infos}) == 1
        return infos[0]

    def unload(self, name: str) -> None:
        """Raises KeyError if there is none."""
        for client in self.clients:
            client.adapters.unload(name)


def _gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. CUDA itself is not
    asked: that takes seconds."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    found = sorted(
        int(name[1])
        for path in Path("/dev").glob("nvidia*")
        if (name := re.fullmatch(r"nvidia(\d+)", path.name))
    )
    return list(map(str, found))


Client: TypeAlias = EngineClient | Replicas
