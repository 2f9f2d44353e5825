"""Limits of each key: how many requests it may have under way, and how many it may send in a
minute."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.errors import QueueFull

MAX_TENANTS = 65_536  # that are remembered; those with nothing under way are forgotten first


@dataclass(slots=True)
class _Use:
    num_under_way: int = 0
    allowance: float = 0.0  # requests that it may send now
    seen_s: float = 0.0


class Limits:
    """A minute's requests are a token bucket: all of them may come at once, and they come back
    evenly."""

    def __init__(
        self,
        max_under_way: int | None = None,
        per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_under_way, self._per_minute, self._clock = max_under_way, per_minute, clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self.num_refused = 0

    def enter(self, tenant: str) -> None:
        """Raises QueueFull. After it: `leave`, once."""
        if self._max_under_way is None and self._per_minute is None:
            return
        now = self._clock()
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = _Use(0, float(self._per_minute or 0), now)
            self._forget()
        self._uses.move_to_end(tenant)
        if self._max_under_way is not None and use.num_under_way >= self._max_under_way:
            self.num_refused += 1
            what = f"This key has {use.num_under_way} requests under way, and may have {self._max_under_way}."
            raise QueueFull(what, fix="Wait for one of them to end.")
        if self._per_minute is not None:
            gained = (now - use.seen_s) * self._per_minute / 60
            use.allowance, use.seen_s = min(use.allowance + gained, float(self._per_minute)), now
            if use.allowance < 1:
                self.num_refused += 1
                raise QueueFull(
                    f"This key may send {self._per_minute} requests a minute.",
                    fix="Try again in a moment.",
                )
            use.allowance -= 1
        use.num_under_way += 1

    def leave(self, tenant: str) -> None:
        use = self._uses.get(tenant)
        if use is not None:
            use.num_under_way -= 1

    def _forget(self) -> None:
        if len(self._uses) > MAX_TENANTS:
            idle = next(
                (tenant for tenant, use in self._uses.items() if not use.num_under_way), None
            )
            if idle is not None:
                del self._uses[idle]
