"""RayReplicas: engines in actors of a Ray cluster that serve one model, behind the interface of
EngineClient. Loads no torch.

As of `engine.replicas`, and more: actors are placed before anything is loaded, all or none; and
with an autoscaler replicas are started and stopped by how long requests wait. One that is to stop
gets no new requests, and ends when it has none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tidemill.capabilities import asked, check, require
from tidemill.cluster.ray.actor import EngineActor
from tidemill.cluster.ray.cluster import Cluster, Needs, NoRoom
from tidemill.cluster.ray.link import RayLink
from tidemill.cluster.ray.scale import Autoscaler, Load, ScalePolicy
from tidemill.config import EngineOptions, settled
from tidemill.engine.client import STALL_S, EngineClient
from tidemill.engine.link import START_S
from tidemill.engine.replicas import ReplicaAdapters, Replicas, all_started
from tidemill.engine.roles import PREFILL, Roles, routing_of
from tidemill.engine.routing import Routing
from tidemill.errors import ConfigError, TidemillError
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import AdapterInfo, Loading, Pages, Ready

_LOOK_EVERY_S = 1.0
_log = logging.getLogger("tidemill.cluster.ray")


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The options of `tidemill serve --ray` about the cluster."""

    num_replicas: int = 1
    policy: ScalePolicy | None = None

    @property
    def num_at_start(self) -> int:
        return (
            self.num_replicas
            if self.policy is None
            else min(max(self.num_replicas, self.policy.low), self.policy.high)
        )

    @property
    def num_at_most(self) -> int:
        return self.num_replicas if self.policy is None else self.policy.high


class RayFleet:
    """Makes the client of a server whose engines run on a cluster (`server.run.Fleet`)."""

    def __init__(self, cluster: Cluster, options: RayOptions, engine: EngineOptions) -> None:
        check(asked(engine) | ({"replicas"} if options != RayOptions() else set()))
        if engine.has_roles:
            options = RayOptions(engine.num_engines)
        self._cluster, self._options = cluster, options
        self._needs = cluster.needs_of(engine, options.num_at_most)
        self.engine = self._needs.limit(engine)
        self.num_at_most = options.num_at_most

    def client(
        self,
        on_events: Callable[[list[Event]], None],
        stall_s: float,
        on_pages: Callable[[Pages], None],
        start_s: float,
    ) -> RayReplicas:
        client_options = (
            self._cluster,
            self._options,
            self._needs,
            on_events,
            stall_s,
            on_pages,
            start_s,
        )
        return RayReplicas(*client_options, routing=routing_of(self.engine))


class RayReplicas(Replicas):
    def __init__(
        self,
        cluster: Cluster,
        options: RayOptions,
        needs: Needs,
        on_events: Callable[[list[Event]], None] | None = None,
        stall_s: float = STALL_S,
        on_pages: Callable[[Pages], None] | None = None,
        start_s: float = START_S,
        routing: Routing | None = None,
    ) -> None:
        """`routing`: with roles, each of them has a placement group."""
        self._cluster, self._given, self._needs = cluster, options, needs
        self._placed: dict[int, Any] = {}  # actors without an engine, by number of the replica
        self._groups: dict[str, Any] = {}  # placement groups, by role
        self._kv_key = b""
        # of each replica: requests that run, and that wait
        self._counts: dict[int, tuple[int, int]] = {}
        self._num_finished = 0
        self._started: set[int] = set()  # replicas that take requests
        self._draining: set[int] = set()  # those that stop when they have none
        self._watching: asyncio.Task[None] | None = None
        super().__init__(options.num_at_most, on_events, stall_s, on_pages, start_s, routing)
        if options.policy is not None:
            self.adapters = _FixedAdapters(self.clients)

    def _client(self, number: int, num: int, stall_s: float, start_s: float) -> EngineClient:
        take, pages = partial(self._take_events, number), partial(self._take_pages, number)
        client = EngineClient(
            take, stall_s, pages, start_s, partial(self._new_link, number), True, self.routing.gate
        )
        client.on_change = self._changed
        return client

    def _new_link(self, number: int) -> RayLink:
        group = self._groups.get(self.routing.names[number]) if self.routing.names else None
        return RayLink(
            self._cluster, self._needs, self._placed.pop(number, None), group, self._kv_key
        )

    def _options(self, options: EngineOptions, number: int) -> EngineOptions:
        """Several replicas may be on one node."""
        folder, _, size = (options.kv_disk or "").rpartition(":")
        own = dataclasses.replace(
            options, kv_disk=f"{folder}/replica-{number}:{size}" if folder else None
        )
        return self.routing.options(own, number)

    # ---- start and end

    async def start(
        self, options: EngineOptions, on_loading: Callable[[Loading], None] | None = None
    ) -> Ready:
        num = self._given.num_at_start
        try:
            await self._place_all(num, options.tensor_parallel * options.pipeline_parallel)
        except NoRoom as error:
            await self.close()
            several = (
                "--prefill, --decode" if self.routing.names else "--replicas, --tensor-parallel"
            )
            fix = f"Ask for fewer {several} or --threads, or add nodes (--ray-wait waits for them)."
            raise ConfigError(
                f"The cluster has no room for the replicas: {error}.", fix=fix, param="replicas"
            ) from error
        try:
            ready = await self.clients[0].start(self._options(options, 0), on_loading)
            self.routing.check(ready)
            await all_started(self._start_one(number, options, ready) for number in range(1, num))
        except BaseException:
            await self.close()
            raise
        self._started = set(range(num))
        self._name_started()
        self.gave_up.clear()
        scaler = Autoscaler(self._given.policy) if self._given.policy is not None else None
        self._watching = asyncio.create_task(self._watch(scaler, options, ready))
        return ready

    async def _place_all(self, num: int, num_ranks: int) -> None:
        """Engines that have roles exchange pages by TCP, each rank at a port of its own, with a key
        that is made here."""
        roles = self.routing
        if not isinstance(roles, Roles):
            self._placed = dict(enumerate(await self._cluster.place(EngineActor, self._needs, num)))
            return
        for role in dict.fromkeys(roles.names):
            numbers = [at for at, name in enumerate(roles.names) if name == role]
            group = self._groups[role] = await self._cluster.reserve(self._needs, len(numbers))
            actors = await self._cluster.place(EngineActor, self._needs, len(numbers), group)
            self._placed.update(zip(numbers, actors, strict=True))
            if role == PREFILL:
                doors = [await actor.door.remote(num_ranks) for actor in actors]
                roles.addresses = [f"tcp:{host}:{port}" for host, port in doors]
        self._kv_key = secrets.token_hex(32).encode()

    async def _start_one(self, number: int, options: EngineOptions, first: Ready) -> Ready:
        """Starts a replica with the values of the first, so that each can take every request."""
        ready = await self.clients[number].start(
            settled(self._options(options, number), first.config)
        )
        if ready.model != first.model:
            await self.clients[number].stop()
            fix = "Give all nodes the same files under this name."
            raise ConfigError(
                f"The model {options.model} is not the same on all nodes of the cluster.",
                fix=fix,
                param="model",
            )
        return ready

    def _name_started(self) -> None:
        """Those that requests are placed on."""
        self._names = {str(number): self.clients[number] for number in sorted(self._started)}

    async def close(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        await super().close()
        self._cluster.kill(*self._placed.values())
        self._cluster.release(*self._groups.values())
        self._placed, self._groups = {}, {}

    @property
    def num_replicas(self) -> int:
        return len(self._started)

    @property
    def death(self) -> str:
        found = [self.clients[number].death for number in sorted(self._started)]
        return found[0] if found and all(found) else ""

    # ---- health and scaling

    async def _watch(self, scaler: Autoscaler | None, options: EngineOptions, first: Ready) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._stop_drained(options.model)
                if scaler is not None:
                    wanted = scaler.wanted(time.monotonic(), self.load(first.config.max_requests))
                    if wanted > len(self._started):
                        await self._grow(options, first, scaler.reason)
                    elif wanted < len(self._started):
                        self._shrink(scaler.reason)
            except (TidemillError, NoRoom) as error:
                _log.error("a replica could not be started: %s", error)
            except Exception:
                _log.exception("the replicas could not be looked after")

    def load(self, num_slots: int) -> Load:
        counts = [self._counts.get(number, (0, 0)) for number in self._started]
        unplaced = sum(self.clients[number].num_waiting for number in self._started)
        running, waiting = (
            sum(count[0] for count in counts),
            sum(count[1] for count in counts) + unplaced,
        )
        return Load(len(self._started), running, waiting, num_slots, self._num_finished)

    async def _grow(self, options: EngineOptions, first: Ready, reason: str) -> None:
        if self._draining:
            self._started.add(self._draining.pop())
        else:
            number = next(at for at in range(len(self.clients)) if at not in self._started)
            num_bytes, began = first.config.memory_bytes, time.monotonic()
            self._take_events(
                number, [events.ModelLoading(began, options.model, num_bytes, reason)]
            )
            await self._start_one(number, options, first)
            now = time.monotonic()
            self._take_events(
                number, [events.ModelLoaded(now, options.model, num_bytes, now - began)]
            )
            self._started.add(number)
        self._name_started()
        _log.warning("%d replicas: one was added, %s", len(self._started), reason)

    def _shrink(self, reason: str) -> None:
        """The last one takes no more requests, and stops when it has none."""
        number = max(self._started)
        self._started.discard(number)
        self._draining.add(number)
        self._name_started()
        _log.warning("%d replicas: one takes no more requests, %s", len(self._started), reason)

    async def _stop_drained(self, model: str) -> None:
        for number in [number for number in self._draining if not self.clients[number].num_pending]:
            self._draining.discard(number)
            client = self.clients[number]
            assert client.ready is not None
            await client.stop()
            self._counts.pop(number, None)
            self.routing.forget(str(number))
            gone = events.ModelUnloaded(
                time.monotonic(), model, client.ready.config.memory_bytes, "fewer replicas suffice"
            )
            self._take_events(number, [gone])

    def _take_events(self, number: int, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, events.StepPlanned | events.RequestsLeft):
                self._counts[number] = event.num_running, event.num_waiting
            elif isinstance(event, events.EngineRestarted):
                self._counts.pop(number, None)
            elif isinstance(event, events.Finished | events.Aborted):
                self._num_finished += 1
        super()._take_events(number, batch)


class _FixedAdapters(ReplicaAdapters):
    """A replica that is started later would not have them."""

    async def load(self, name: str, path: str, in_place: bool = False) -> AdapterInfo:
        require("loading adapters", {"lora", "autoscale"})
        raise AssertionError
