"""Roles: prefill engines and decode engines of one model, as a Routing of Replicas. Loads no torch.

A request goes to a prefill engine, which ends it with the first token (`Submit.hands_over`). The
token is delivered, and the request goes on in a decode engine in the way in which requests of a
killed engine do: with its seed and its output so far. The decode engine finds the prompt's pages by
their content where they were exported to it, and computes the others, so that tokens never depend
on what was moved.

Every engine can do all of the work. What needs no decoding is served by a prefill engine as a
whole; beam search, KV policies that give up tokens, and prompts of which a decode engine has nearly
everything, by a decode engine. Where no engine of a role works, those of the other take its part.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from tidemill.capabilities import check
from tidemill.config import EngineOptions
from tidemill.engine.client import PROBE, EngineClient
from tidemill.engine.routing import BLOCK_LEN, Route, Routing, keys_of
from tidemill.sched.placement import Choice, Placement
from tidemill.sched.request import BACKGROUND, HANDED_OVER
from tidemill.sched.room import Room, first_in
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Delta, Ready, Submit, Timings

PREFILL, DECODE = "prefill", "decode"
# at the gate; then a request enters though there is no room, one at a time, so that none starves
_PATIENCE_S = 5.0
_SHORT = 16  # a prompt is short if it takes this part of a step


@dataclass(slots=True)
class RoleRoute(Route):
    order: int = 0  # of arrival
    tenant: str = ""
    name: str = ""  # of the engine that has it
    target: str = ""  # the decode engine that has room for it
    is_let_in: bool = False  # its prompt may begin
    source: int = -1  # the engine that handed it over
    first_s: float = 0.0  # when its first token came
    # of samples that were handed over: their first token
    firsts: dict[int, Delta] = field(default_factory=dict)

    def take(self, delta: Delta) -> Delta | None:
        if delta.token_ids and not self.first_s:
            self.first_s = time.monotonic()
        if delta.finish_reason == HANDED_OVER:
            self.firsts[delta.index], self.is_known = delta, True
            if not delta.token_ids:  # they came before
                return None
            delta = msgspec.structs.replace(delta, finish_reason=None, timings=None)
        elif (first := self.firsts.get(delta.index)) is not None:
            delta = _joined(first, delta)
        return Route.take(self, delta)

    @property
    def has_begun(self) -> bool:
        return any(self.outputs)


class Roles(Routing):
    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.names = [PREFILL] * num_prefill + [DECODE] * num_decode  # by number of the engine
        self._placements = {PREFILL: Placement(), DECODE: Placement()}
        name = secrets.token_hex(8)
        # where prefill engines export pages
        self.addresses = [f"shm:{name}-{at}" for at in range(num_prefill)]
        self.clients: Sequence[EngineClient] = ()
        self._emit: Callable[[int, Event], None] = lambda number, event: None
        self._rooms: dict[str, Room] = {}  # of decode engines
        self.routes: dict[str, RoleRoute] = {}
        # requests that wait until a decode engine has room, and since when
        self._at_gate: dict[str, float] = {}
        self._late = ""  # the one that was let in though there was none, until it is admitted
        # by tenant: requests that did not have to wait, or not any more
        self._let_in: Counter[str] = Counter()
        self._order = count()
        self._told: set[str] = set()  # decode engines that know that they are told what comes

    def begin(self, clients: Sequence[EngineClient], emit: Callable[[int, Event], None]) -> None:
        self.clients, self._emit = clients, emit

    def check(self, ready: Ready) -> None:
        check({PREFILL, DECODE} | ({"encoder"} & {*ready.config.features}))

    def options(self, options: EngineOptions, number: int) -> EngineOptions:
        """Prefill engines export pages, which decode engines fetch."""
        if self.names[number] == DECODE:
            return dataclasses.replace(options, kv_import=",".join(self.addresses))
        size = "" if options.kv_transfer_bytes is None else f":{options.kv_transfer_bytes}"
        return dataclasses.replace(options, kv_export=self.addresses[number] + size)

    def new_route(self, request: Submit) -> Route:
        route = RoleRoute(
            [[] for _ in range(request.params.n)], order=next(self._order), tenant=request.tenant
        )
        self.routes[request.request_id] = route
        return route

    # ---- where a request goes

    def place(
        self, request: Submit, route: Route, usable: Mapping[str, EngineClient]
    ) -> tuple[str, Submit]:
        assert isinstance(route, RoleRoute)
        keys = keys_of(request.prompt_ids, request)
        part, choice = self._part(request, route, keys, usable)
        route.name = choice.name
        self._placements[self._role(choice.name)].note(choice.name, keys)
        self._emit(
            int(choice.name),
            events.Placed(time.monotonic(), request.request_id, part, choice.reason),
        )
        if part == PREFILL:
            # what ends with the prompt
            prefix_leases = [hold for hold in request.prefix_leases if hold.num_tokens]
            return choice.name, msgspec.structs.replace(
                request, hands_over=True, prefix_leases=prefix_leases
            )
        if part == DECODE and 0 in route.firsts:
            return choice.name, _rest(request)
        return choice.name, request

    def _part(
        self, request: Submit, route: RoleRoute, keys: list[int], usable: Mapping[str, EngineClient]
    ) -> tuple[str, Choice]:
        """The next part of the request, and the engine that gets it."""
        pools = {
            role: {name: client for name, client in usable.items() if self._role(name) == role}
            for role in (PREFILL, DECODE)
        }
        if route.has_begun:
            if route.source < 0 and route.firsts:
                route.source = int(route.name)
            if route.target in pools[DECODE]:
                return DECODE, Choice(route.target, 0, "it has kept room for it")
            return DECODE, self._choose(
                DECODE,
                keys,
                pools[DECODE] or usable,
                "" if pools[DECODE] else "no decode engine works",
            )
        for role, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
            if not pools[role]:
                return "whole", self._choose(other, keys, pools[other], f"no {role} engine works")
        role, why = self._sole_role(request, usable)
        if role:
            return "whole", self._choose(role, keys, pools[role], why)
        choice = self._choose(DECODE, keys, pools[DECODE])
        num_new = len(request.prompt_ids) - choice.num_known * BLOCK_LEN
        if num_new <= self._num_short(usable):
            known = f"all but {num_new} of {len(request.prompt_ids)} prompt tokens are known to it"
            return "whole", Choice(
                choice.name,
                choice.num_known,
                known if choice.num_known else f"{num_new} tokens are few",
            )
        return PREFILL, self._choose(PREFILL, keys, pools[PREFILL])

    def _choose(
        self, role: str, keys: list[int], some: Mapping[str, EngineClient], why: str = ""
    ) -> Choice:
        loads = {
            name: client.num_pending + self._num_promised(name) for name, client in some.items()
        }
        chosen = self._placements[role].choose(keys, loads)
        return (
            chosen if not why else Choice(chosen.name, chosen.num_known, f"{why}; {chosen.reason}")
        )

    def _sole_role(self, request: Submit, usable: Mapping[str, EngineClient]) -> tuple[str, str]:
        """The role that serves all of the request, and why; empty: there is none."""
        params, ready = request.params, next(iter(usable.values())).ready
        assert ready is not None
        room = ready.config.context_of(params) - len(request.prompt_ids)
        if params.pooling is not None:
            return PREFILL, "nothing is generated"
        if (
            request.priority == PROBE
            or min(room, room if params.max_tokens is None else params.max_tokens) <= 1
        ):
            return PREFILL, "the first token is the last"
        if params.beams is not None:
            return DECODE, "beams fork and end together"
        policy = ready.config.policy_of(params)
        if policy is not None and policy.kind != "full":
            return DECODE, "its KV policy gives up tokens"
        return "", ""

    @staticmethod
    def _num_short(usable: Mapping[str, EngineClient]) -> int:
        """Tokens of a prompt that a decode engine computes beside its own work without harm."""
        ready = next(iter(usable.values())).ready
        assert ready is not None
        return max(ready.config.token_budget // _SHORT, BLOCK_LEN // 2)

    def _role(self, name: str) -> str:
        return self.names[int(name)]

    # ---- admission: a prompt begins when a decode engine has room for what follows

    def gate(self, request: Submit) -> str:
        """Why a request must not begin yet; empty: it may. See EngineClient."""
        route = self.routes.get(request.request_id)
        if route is None or not request.hands_over or route.is_let_in:
            self._at_gate.pop(request.request_id, None)
            return ""
        why = (
            f"{len(self._at_gate)} requests wait for room in the decode engines"
            if self._at_gate
            else ""
        )
        if not why:
            why = self._find_room(request, route)
        if why:
            self._at_gate.setdefault(request.request_id, time.monotonic())
            asyncio.get_running_loop().call_soon(self._let_in_all)
        return why

    def _find_room(self, request: Submit, route: RoleRoute, is_late: bool = False) -> str:
        """Has room kept for it; or else says why there is none. `is_late`: it waits in a decode
        engine's own queue if need be."""
        num_rows, decoding = request.params.n, self._decoding
        why = {
            name: self._room(name).why_not(num_rows, self._pages_of(request, name))
            for name in decoding
        }
        free = {name: client for name, client in decoding.items() if not why[name]}
        if is_late:
            free, self._late = free or decoding, request.request_id
        if decoding and not free:
            return f"no decode engine has room: {next(iter(why.values()))}"
        if free:  # or else whoever works goes on with it
            route.target = self._choose(DECODE, keys_of(request.prompt_ids, request), free).name
            self._room(route.target).promise(
                request.request_id, num_rows, self._pages_of(request, route.target)
            )
            self._tell_what_comes(request, route.target)
        self._let_in[route.tenant] += 1
        route.is_let_in = True
        return ""

    def _tell_what_comes(self, request: Submit, target: str) -> None:
        """Tells the decode engines which request comes. Of several, only the one that will have the
        request fetches its pages as they are exported."""
        if self.names.count(DECODE) > 1:
            self.clients[int(target)].expect(request)
            for name in self._decoding.keys() - self._told - {target}:
                self.clients[int(name)].expect(None)
            self._told |= {target, *self._decoding}

    @property
    def _decoding(self) -> dict[str, EngineClient]:
        """Decode engines that work."""
        return {
            str(at): client
            for at, client in enumerate(self.clients)
            if self.names[at] == DECODE and client.working
        }

    def _pages_of(self, request: Submit, name: str) -> int:
        ready = self.clients[int(name)].ready
        assert ready is not None
        return self._room(name).pages_of(
            len(request.prompt_ids), request.params.n, len(ready.config.layout.groups)
        )

    def _let_in_all(self) -> None:
        """Those that may begin by now."""
        while self._at_gate:
            is_late = (
                not self._late
                and time.monotonic() - next(iter(self._at_gate.values())) > _PATIENCE_S
            )
            if (
                not is_late
                and self._decoding
                and not any(self._room(name).has_row for name in self._decoding)
            ):
                return
            waiting = [(client, pending) for client in self.clients for pending in client.at_gate]
            if not waiting:
                return
            routes = [self.routes[pending.request.request_id] for _, pending in waiting]
            candidates = [
                (route.tenant, pending.request.priority, route.order)
                for route, (_, pending) in zip(routes, waiting, strict=True)
            ]
            ids = [pending.request.request_id for _, pending in waiting]
            oldest = next(iter(self._at_gate))
            is_late = is_late and oldest in ids
            at = ids.index(oldest) if is_late else first_in(candidates, self._let_in, BACKGROUND)
            (client, pending), route = waiting[at], routes[at]
            if self._find_room(pending.request, route, is_late):
                return
            self._at_gate.pop(pending.request.request_id, None)
            client.let_in(pending)

    def _room(self, name: str) -> Room:
        room = self._rooms.get(name)
        if room is None:
            ready = self.clients[int(name)].ready
            assert ready is not None
            config = ready.config
            room = self._rooms[name] = Room(config.max_requests, config.num_pages, config.page_size)
        return room

    def _num_promised(self, name: str) -> int:
        return self._rooms[name].num_promised if name in self._rooms else 0

    # ---- from the engines

    def take(self, number: int, batch: Sequence[Event]) -> None:
        if self.names[number] == DECODE and self.clients[number].ready is not None:
            for event in batch:
                self._take(number, event)
            self._let_in_all()
        super().take(number, batch)

    def _take(self, number: int, event: Event) -> None:
        match event:
            case events.StepPlanned() | events.RequestsLeft():
                self._room(str(number)).observe(
                    event.num_running, event.num_waiting, event.num_free_pages
                )
            case events.EngineRestarted():
                self._rooms.pop(str(number), None)
                self._told.discard(str(number))
            case events.Admitted():
                request_id = event.request_id.partition(":")[0]
                self._room(str(number)).admitted(request_id)
                self._late = "" if request_id == self._late else self._late
                route = self.routes.get(request_id)
                if route is not None and route.source >= 0 and route.name == str(number):
                    now, num_new = time.monotonic(), event.num_tokens - event.num_cached
                    taken = events.TakenOver(
                        now,
                        event.request_id,
                        route.source,
                        event.num_cached,
                        num_new,
                        now - route.first_s,
                    )
                    self._emit(number, taken)

    def changed(self) -> None:
        self._let_in_all()

    def forget(self, name: str) -> None:
        self._placements[self._role(name)].forget(name)

    def end(self, request: Submit, route: Route) -> None:
        assert isinstance(route, RoleRoute)
        del self.routes[request.request_id]
        self._at_gate.pop(request.request_id, None)
        self._late = "" if request.request_id == self._late else self._late
        if route.is_let_in:
            self._let_in[route.tenant] -= 1
            self._let_in += Counter()  # without those that are 0
        if route.target in self._rooms:
            self._rooms[route.target].release(request.request_id)
        # a conversation may go on there
        if route.name and self._role(route.name) == DECODE and len(route.outputs) == 1:
            self._placements[DECODE].note(
                route.name, keys_of([*request.prompt_ids, *route.outputs[0]], request)
            )
        self._let_in_all()  # what was kept for it is free


def routing_of(options: EngineOptions) -> Routing:
    return (
        Roles(options.prefill_engines, options.decode_engines) if options.has_roles else Routing()
    )


def _rest(request: Submit) -> Submit:
    """The rest of a request when its first token was delivered."""
    params = msgspec.structs.replace(request.params, prompt_logprobs=None)
    prefix_leases = [hold for hold in request.prefix_leases if not hold.num_tokens]
    return msgspec.structs.replace(request, params=params, prefix_leases=prefix_leases)


def _joined(first: Delta, delta: Delta) -> Delta:
    """The delta that one engine would have made of both parts: what it found in its cache, and how
    long the parts took."""
    timings = delta.timings
    if timings is not None and first.timings is not None:
        began = first.timings
        decode_s = began.decode_s + timings.queue_s + timings.prefill_s + timings.decode_s
        timings = Timings(began.queue_s, began.prefill_s, decode_s)
    num_held = max(first.num_held, delta.num_held)
    return msgspec.structs.replace(
        delta, num_cached=first.num_cached, num_held=num_held, timings=timings
    )
