"""Retention: which prefixes are held in the KV cache, from when and until when. The mechanism is in
kv/holds.py."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.kv.holds import Held
from tidemill.kv.manager import KVManager
from tidemill.sched.clock import Clock
from tidemill.sched.request import Request
from tidemill.types import events
from tidemill.types.events import EventSink
from tidemill.types.wire import Hold


class Retention:
    """Holds what requests ask for, and ends it. Every decision is an event."""

    def __init__(self, kv: KVManager, clock: Clock, emit: EventSink, evict: bool = True) -> None:
        """`evict`: False: free pages are reserved for running requests, so that no pin may take
        one."""
        self._kv, self._clock, self._emit, self._evict = kv, clock, emit, evict

    def take(self, request: Request, has_ended: bool) -> None:
        """Hold what of a request is computed by now: prefixes of its prompt, or all of a request
        that ends."""
        left = []
        for hold in request.prefix_leases:
            if hold.num_tokens or has_ended:
                self._hold(request, hold)
            else:
                left.append(hold)
        request.prefix_leases = left

    def _hold(self, request: Request, hold: Hold) -> None:
        now, name = self._clock.now(), hold.name
        num_tokens = min(hold.num_tokens or len(request.tokens), request.num_computed)
        held = Held(
            name,
            request.spec.tenant,
            num_tokens,
            (),
            now + hold.ttl_s,
            hold.is_pinned,
            adapter_id=request.spec.adapter,
        )
        if hold.is_pinned and not self._evict and (self._kv.has_states or self._kv.has_windows):
            why = "pages that it does not hold any more are reserved for running requests (--no-evict)"
        else:
            why, ended = self._kv.hold(request.seq, request.tokens, held)
            self._report(ended, "the bound of what may be held is reached")
        if why:
            self._emit(events.PrefixNotHeld(now, request.request_id, name, hold.is_pinned, why))
            return
        request.num_held = max(request.num_held, min(held.num_tokens, request.num_prompt))
        counts = (held.num_tokens, len(held.pages), hold.ttl_s, hold.is_pinned)
        self._emit(
            events.PrefixHeld(now, request.request_id, name, *counts, hold.reason, *self._totals)
        )

    @property
    def _totals(self) -> tuple[int, int]:
        return self._kv.held.num_pinned, self._kv.num_held_pages

    def renew(self, name: str, ttl_s: float, reason: str, live: Iterable[Request] = ()) -> None:
        """`ttl_s`: from now on; 0: it ends, and none of those that are `live` holds it again."""
        now = self._clock.now()
        if ttl_s <= 0:
            for request in live:
                request.prefix_leases = [
                    hold for hold in request.prefix_leases if hold.name != name
                ]
            ended = self._kv.held.drop(name)
            self._report([ended] if ended else [], reason)
        elif self._kv.held.renew(name, now + ttl_s) is not None:
            self._emit(events.HoldRenewed(now, name, ttl_s, reason))

    def expire(self) -> None:
        self._report(self._kv.held.expire(self._clock.now()), "its time is over")

    def loads_failed(self) -> None:
        self._report(self._kv.drop_broken_holds(), "a page could not be loaded")

    def end_of(self, adapter_id: int, reason: str) -> None:
        """An adapter is gone: nobody can ask for what was computed with it."""
        self._report(self._kv.held.drop_of(adapter_id), reason)

    def give_up_a_pin(self, request: Request) -> bool:
        """A request that fits the pool cannot start though nothing else runs. False: there is no
        pin."""
        ended = self._kv.held.drop_a_pin()
        self._report([ended] if ended else [], f"{request.request_id} cannot run beside it")
        return ended is not None

    def clear(self, reason: str) -> None:
        """Ends all leases, because the content of pages cannot be trusted."""
        self._report(self._kv.held.clear(), reason)

    def _report(self, ended: Iterable[Held], reason: str) -> None:
        for held in ended:
            counts = (held.name, len(held.pages), held.is_pinned, reason, *self._totals)
            self._emit(events.HoldEnded(self._clock.now(), *counts))
