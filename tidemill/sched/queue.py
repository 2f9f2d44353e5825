"""WaitingQueue: requests without a slot, in one queue per tenant. Choosing the next one looks at
tenants, not at requests.

Lower priority values go first. Ageing bounds how long they can hold others back: the oldest request
of a tenant, once it has waited `AGEING_S`, is level with the highest priority that waits. Among
tenants on one level, the one with the fewest computed tokens is next; within a tenant, higher
priorities and the oldest request alternate. So no priority starves another one. A request that has
waited that long is not preempted for higher priorities afterwards. The background
(`request.BACKGROUND`) is a class of its own: it is next only while nothing else can start.

By prefix, the next of a tenant's requests of one priority is the one of which most tokens are
cached, before others overwrite them. Once the first in line has waited `PASSING_S`, the two
alternate: nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeAlias

from tidemill.errors import QueueFull
from tidemill.sched.request import BACKGROUND, Request
from tidemill.types.wire import Submit

ORDERS = ("arrival", "prefix")
AGEING_S = 10.0
PASSING_S = 2.0
_NUM_COMPARED = 64  # requests at the head of a tenant's queue whose prefixes are compared
_NUM_REMEMBERED = 1024  # tenants without requests whose computed tokens are remembered

NumCached: TypeAlias = Callable[[Request], int]


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's requests of one class."""

    num_served: int  # tokens computed
    num_requests: int = 0  # queued or running
    num_waiting: int = 0  # queued, those included that wait for the prompt of their first sample
    ready: list[Request] = field(default_factory=list)  # by place
    by_age: list[Request] = field(default_factory=list)  # the same, longest in the queue first
    oldest_is_next: bool = False
    was_passed: bool = False  # the first in line, by one with a longer prefix

    def candidate(self, best: int, now: float) -> Request | None:
        """The next request if this tenant's turn comes. `best`: the highest priority that waits, of
        any tenant."""
        head, oldest = self.ready[0], self.by_age[0]
        is_aged = oldest.is_aged or now - oldest.queued_s >= AGEING_S
        if head.priority > best and not is_aged:
            return None
        if (
            is_aged
            and oldest.priority > head.priority
            and (self.oldest_is_next or head.priority > best)
        ):
            return oldest
        return head

    def by_prefix(self, chosen: Request, now: float, num_cached: NumCached) -> Request:
        """Instead of the first request in line, the one with the longest cached prefix; of several,
        the first."""
        if chosen is not self.ready[0] or (self.was_passed and now - chosen.queued_s >= PASSING_S):
            return chosen
        line = takewhile(
            lambda request: request.priority == chosen.priority, islice(self.ready, _NUM_COMPARED)
        )
        return max(line, key=num_cached)


class _Class:
    """The foreground or the background."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.tenants: dict[str, Tenant] = {}  # those with requests
        self._ready: dict[str, Tenant] = {}  # of these, those with a request that could start
        self._served_before: dict[str, int] = {}  # of tenants without requests

    def join(self, request: Request) -> None:
        """A tenant that had no requests starts level with the least served of those present: idling
        saves up no claim, and leaving for a moment pays no debt."""
        tenant = self.tenants.get(request.spec.tenant)
        if tenant is None:
            least = min((other.num_served for other in self.tenants.values()), default=0)
            tenant = self.tenants[request.spec.tenant] = Tenant(
                max(self._served_before.pop(request.spec.tenant, 0), least)
            )
        tenant.num_requests += 1
        request.account = tenant

    def leave(self, request: Request) -> None:
        tenant = request.account
        tenant.num_requests -= 1
        if tenant.num_requests:
            return
        del self.tenants[request.spec.tenant]
        self._served_before[request.spec.tenant] = tenant.num_served
        if not self.tenants:
            self._served_before.clear()  # all start level again
        elif len(self._served_before) > _NUM_REMEMBERED:
            least = min(other.num_served for other in self.tenants.values())
            kept = [
                (name, served) for name, served in self._served_before.items() if served > least
            ]
            self._served_before = dict(kept[-_NUM_REMEMBERED // 2 :])

    def push(self, request: Request, now: float) -> None:
        self.num_waiting += 1
        request.account.num_waiting += 1
        if request.parent is None and not request.awaiting_choice:
            self.make_ready(request, now)

    def make_ready(self, request: Request, now: float) -> None:
        tenant = request.account
        request.queued_s = now - request.waited_s
        insort(tenant.ready, request, key=_place)
        insort(tenant.by_age, request, key=_age)
        self._ready[request.spec.tenant] = tenant

    def remove(self, request: Request) -> None:
        tenant = request.account
        self.num_waiting -= 1
        tenant.num_waiting -= 1
        at = _index(tenant.ready, request, _place)
        if at < len(tenant.ready) and tenant.ready[at] is request:
            del tenant.ready[at]
            del tenant.by_age[_index(tenant.by_age, request, _age)]
            if not tenant.ready:
                del self._ready[request.spec.tenant]

    def ready(self) -> Iterable[Tenant]:
        """The tenants with a request that could start."""
        return self._ready.values()

    @property
    def best(self) -> int:
        """The highest priority among requests that could start: the lowest value."""
        if len(self._ready) == 1:
            return next(iter(self._ready.values())).ready[0].priority
        return min([tenant.ready[0].priority for tenant in self._ready.values()])

    def first(self, now: float, num_cached: NumCached | None) -> Request | None:
        if not self._ready:
            return None
        chosen, least, best = None, (0, 0), self.best
        for tenant in self._ready.values():
            served = (tenant.num_served, tenant.ready[0].seq)
            if (chosen is None or served < least) and (
                request := tenant.candidate(best, now)
            ) is not None:
                chosen, least = request, served
        if chosen is not None and num_cached is not None:
            return chosen.account.by_prefix(chosen, now, num_cached)
        return chosen

    def check_integrity(self) -> None:
        assert self.num_waiting == sum(tenant.num_waiting for tenant in self.tenants.values())
        assert self._ready == {
            name: tenant for name, tenant in self.tenants.items() if tenant.ready
        }
        assert not self._served_before.keys() & self.tenants.keys()
        assert len(self._served_before) <= _NUM_REMEMBERED
        for tenant in self.tenants.values():
            assert tenant.num_requests >= tenant.num_waiting >= len(tenant.ready)
            assert tenant.ready == sorted(tenant.ready, key=_place)
            assert tenant.by_age == sorted(tenant.ready, key=_age)
            assert all(
                request.parent is None and not request.awaiting_choice for request in tenant.ready
            )


class WaitingQueue:
    """All requests without a slot."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # by seq, in no order
        self._classes = (_Class(), _Class())

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        """By priority, then arrival."""
        return iter(sorted(self.requests.values(), key=_place))

    def num_waiting(self, in_background: bool, tenant: str | None = None) -> int:
        """`tenant`: of this one only."""
        kind = self._classes[in_background]
        if tenant is None:
            return kind.num_waiting
        return kind.tenants[tenant].num_waiting if tenant in kind.tenants else 0

    def num_tenants(self, in_background: bool) -> int:
        """The number of tenants with requests, queued or running."""
        return len(self._classes[in_background].tenants)

    def join(self, request: Request) -> None:
        """A new request, to be counted for its tenant until it leaves."""
        self._classes[request.in_background].join(request)

    def leave(self, request: Request) -> None:
        self._classes[request.in_background].leave(request)

    def push(self, request: Request, now: float) -> None:
        """Queue a request that has joined. It can be chosen once it does not wait for a prompt that
        it will share, nor for a token."""
        self.requests[request.seq] = request
        self._classes[request.in_background].push(request, now)

    def make_ready(self, request: Request, now: float) -> None:
        """A queued request does not wait for another's prompt or for a token any more."""
        self._classes[request.in_background].make_ready(request, now)

    def remove(self, request: Request) -> None:
        del self.requests[request.seq]
        self._classes[request.in_background].remove(request)

    def first(self, now: float, num_cached: NumCached | None = None) -> Request | None:
        """The request that starts next. `num_cached`: choose by prefix; how many of a request's
        tokens are cached."""
        if len(self.requests) <= 1:
            only = next(iter(self.requests.values()), None)
            return only if only is not None and only.account.ready else None
        return self._classes[False].first(now, num_cached) or self._classes[True].first(
            now, num_cached
        )

    def only_tenant(self) -> Tenant | None:
        """The only one with a request that could start, if there is only one; of the background
        only if no other has."""
        for kind in self._classes:
            if ready := list(kind.ready()):
                return ready[0] if len(ready) == 1 else None
        return None

    def waited_s(self, now: float) -> float:
        """The longest time that one of the requests that could start has waited in the queue."""
        return max(
            (now - tenant.by_age[0].queued_s for kind in self._classes for tenant in kind.ready()),
            default=0.0,
        )

    def take(self, request: Request, now: float) -> str:
        """Remove the request that starts now. Returns why it goes before others, if it does."""
        tenant = request.account
        tenant.oldest_is_next = request.priority == tenant.ready[0].priority
        num_passed = _index(tenant.ready, request, _place) if tenant.oldest_is_next else 0
        tenant.was_passed = num_passed > 0
        by_age = request.priority > self._classes[request.in_background].best
        self.remove(request)
        request.waited_s = now - request.queued_s
        # once back in the queue it would be before them again
        request.is_aged |= by_age or request.waited_s >= AGEING_S
        if by_age:
            return f"before higher priorities, after {request.waited_s:.0f} s in the queue"
        return f"before {num_passed} that came earlier: the longest prefix" if num_passed else ""

    def check_integrity(self) -> None:
        for kind in self._classes:
            kind.check_integrity()
        assert len(self) == sum(kind.num_waiting for kind in self._classes)


def _place(request: Request) -> tuple[int, int, int]:
    return request.place


def _age(request: Request) -> tuple[bool, float, int]:
    return not request.is_aged, request.queued_s, request.seq


def _index(
    line: list[Request], request: Request, key: Callable[[Request], tuple[float, ...]]
) -> int:
    """The index in the line where the request is, or would be. Mostly it is the first."""
    return 0 if line and line[0] is request else bisect_left(line, key(request), key=key)


def check_room(
    most: int, request: Submit, queued: Iterable[Submit], waiting: WaitingQueue | None = None
) -> None:
    """Raise QueueFull if the request cannot be queued behind those that are `queued` and those that
    the scheduler has `waiting`, of which only its own class counts.

    One tenant's part of the queue is half of what the others leave, so that there is always room
    for another tenant. Without API keys there is one tenant, the one without a name, and only the
    bound applies."""
    num_new, tenant, in_background = (
        request.params.n,
        request.tenant,
        request.priority >= BACKGROUND,
    )
    others = [
        (other.params.n, other.tenant)
        for other in queued
        if (other.priority >= BACKGROUND) == in_background
    ]
    num_waiting, num_own = (
        sum(num for num, _ in others),
        sum(num for num, other in others if other == tenant),
    )
    if waiting is not None:
        num_waiting += waiting.num_waiting(in_background)
        num_own += waiting.num_waiting(in_background, tenant)
    if num_waiting + num_new > most:
        raise QueueFull(
            f"{num_waiting} requests are waiting; at most {most} may.", fix="Try again later."
        )
    most_own = (most - num_waiting + num_own) // 2
    if tenant and num_own and num_own + num_new > most_own:
        raise QueueFull(
            f"{num_own} requests of this API key are waiting; at most {most_own} may, half of the {most} places less those "
            f"that other keys hold.",
            fix="Try again when some of them have started.",
        )
