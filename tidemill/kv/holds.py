"""Holds: prefixes whose pages outlive what would evict them. A hold has a name, a tenant and an
end.

A hold that is pinned owns its pages like a sequence, so they are never free. Other holds only have
theirs taken after all pages that nobody holds: they keep no request from starting. Both share one
bound on the number of pages. Where it is reached, the least recently renewed hold that is not
pinned ends, of the tenant that holds most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidemill.kv.pages import PagePool

MAX_HOLDS = 4096


@dataclass(slots=True)
class Held:
    """A prefix, and its pages in token order."""

    name: str
    tenant: str
    num_tokens: int
    pages: Sequence[int]
    expires_s: float
    is_pinned: bool = False
    times: Sequence[int] = ()  # how often each page had been taken
    # of the latest request that held it: it ends when that adapter is unloaded; 0: there was none
    adapter_id: int = 0


class Holds:
    def __init__(self, pool: PagePool, most: int) -> None:
        """`most`: pages."""
        self.most = most
        self.num_pinned = 0  # pages
        self._pool = pool
        self._held: OrderedDict[str, Held] = OrderedDict()  # least recently renewed first
        self.pins: Counter[int] = Counter()  # by page: how many holds own it
        self.next_end_s = float("inf")  # none ends before

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: str) -> Held | None:
        return self._held.get(name)

    def put(self, held: Held) -> tuple[str, list[Held]]:
        """Hold a prefix, instead of what was held by this name. Returns why not, if it cannot be,
        and what had to end for it."""
        ended = list[Held]()
        held.times = [self._pool.times_taken(page) for page in held.pages]
        if self._is_held(held):
            self.renew(held.name, held.expires_s)
            # of the same content, under another name
            self._held[held.name].adapter_id = held.adapter_id
            return "", ended
        self.drop(held.name)
        if why := self._excess(held):
            return why, ended
        pages, num_new = (
            set(held.pages),
            sum(1 for page in held.pages if not self._pool.keepers(page)),
        )
        victims = self._least_needed()
        while len(self._held) >= MAX_HOLDS or self._pool.num_kept + num_new > self.most:
            victim = next(victims, None)
            if victim is None:
                return f"{self.num_pinned} of {self.most} pages are pinned", ended
            ended.append(victim)
            self.drop(victim.name)
            num_new += sum(
                1 for page in victim.pages if page in pages and not self._pool.keepers(page)
            )
        for page in reversed(held.pages):  # the last is taken first
            self._pool.keep(page)
            if held.is_pinned:
                self._pool.share(page)
                self.pins[page] += 1
        self.num_pinned = len(self.pins)
        self._held[held.name] = held
        self.next_end_s = min(self.next_end_s, held.expires_s)
        return "", ended

    def _is_held(self, held: Held) -> bool:
        """By this name, and nothing of it was lost."""
        standing = self._held.get(held.name)
        if standing is None or standing.is_pinned is not held.is_pinned:
            return False
        return [*standing.pages] == [*held.pages] and [*standing.times] == [*held.times]

    def _excess(self, held: Held) -> str:
        """Why it could never be held. A tenant's pins are at most half of what those of others
        leave, so that there is always room for another's. Without API keys there is one tenant, the
        one without a name, and only the bound applies."""
        num = len(held.pages)
        if not num:
            return "none of its pages is cached"
        if num > self.most:
            return f"it has {num} pages, and at most {self.most} may be held"
        if held.is_pinned and held.tenant:
            own = {
                page
                for lease in self._held.values()
                if lease.is_pinned and lease.tenant == held.tenant
                for page in lease.pages
            }
            most_own = (self.most - self.num_pinned + len(own)) // 2  # no page is of two tenants
            if len(own.union(held.pages)) > most_own:
                return f"it has {num} pages, and this API key may pin {max(most_own - len(own), 0)} more"
        return ""

    def _least_needed(self) -> Iterator[Held]:
        """The leases that end first to make room: of the tenant that holds most, the least recently
        renewed, one after the other."""
        nums: Counter[str] = Counter()
        of: dict[str, deque[Held]] = {}
        for held in self._held.values():
            if not held.is_pinned:
                nums[held.tenant] += len(held.pages)
                of.setdefault(held.tenant, deque()).append(held)
        while of:
            most = max(of, key=lambda tenant: nums[tenant])
            victim = of[most].popleft()
            nums[most] -= len(victim.pages)
            if not of[most]:
                del of[most]
            yield victim

    def renew(self, name: str, expires_s: float) -> Held | None:
        """It ends at another time, and was used just now."""
        held = self._held.get(name)
        if held is not None:
            held.expires_s = expires_s
            self._held.move_to_end(name)
            self.next_end_s = min(self.next_end_s, expires_s)
        return held

    def drop(self, name: str) -> Held | None:
        held = self._held.pop(name, None)
        if held is None:
            return None
        for page, times in zip(reversed(held.pages), reversed(held.times), strict=True):
            if self._pool.times_taken(page) == times:  # else another sequence has taken it since
                self._pool.let_go(page)
                if held.is_pinned:
                    self._unpin(page)
        self.num_pinned = len(self.pins)
        return held

    def _unpin(self, page: int) -> None:
        self.pins[page] -= 1
        if not self.pins[page]:
            del self.pins[page]
        self._pool.drop(page)

    def drop_a_pin(self) -> Held | None:
        """The least recently renewed pin ends: a request cannot run otherwise."""
        name = next((held.name for held in self._held.values() if held.is_pinned), None)
        return None if name is None else self.drop(name)

    def drop_all(self, which: Callable[[Held], bool]) -> list[Held]:
        ended = [held for held in self._held.values() if which(held)]
        for held in ended:
            self.drop(held.name)
        return ended

    def drop_of(self, adapter_id: int) -> list[Held]:
        return self.drop_all(lambda held: held.adapter_id == adapter_id)

    def drop_broken(self, has_content: Callable[[int], bool]) -> list[Held]:
        """End those with a page that is still theirs and has lost its content."""

        def is_broken(held: Held) -> bool:
            pages = zip(held.pages, held.times, strict=True)
            return any(
                self._pool.times_taken(page) == times and not has_content(page)
                for page, times in pages
            )

        return self.drop_all(is_broken)

    def expire(self, now: float) -> list[Held]:
        """End what is over."""
        if now < self.next_end_s:
            return []
        ended = self.drop_all(lambda held: held.expires_s <= now)
        self.next_end_s = min(
            (held.expires_s for held in self._held.values()), default=float("inf")
        )
        return ended

    def clear(self) -> list[Held]:
        """End all: what pages hold is worthless."""
        return self.drop_all(lambda held: True)

    def check_integrity(self) -> None:
        keepers: Counter[int] = Counter()
        pins: Counter[int] = Counter()
        for held in self._held.values():
            for page, times in zip(held.pages, held.times, strict=True):
                if self._pool.times_taken(page) == times:
                    keepers[page] += 1
                    pins[page] += held.is_pinned
                else:
                    assert not held.is_pinned, "a pinned page was taken"
        assert all(
            self._pool.keepers(page) == keepers[page] for page in range(1, self._pool.num_pages)
        )
        assert self.pins == +pins
        assert len(self.pins) == self.num_pinned <= self._pool.num_kept <= self.most
