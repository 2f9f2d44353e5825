"""Why a queued request waits: what the first of its queue lacks, and who starts before it.

The scheduler tells why the first in the queue cannot start, and of the first alone, so that a step
costs the same however long the queue is. What those behind it wait for is counted here: requests
that started before them, of their own tenant, of others, and of higher priorities.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

_NUM_REASONS = 16
_NUM_TENANTS = 4096  # that are counted one by one


class _Started(NamedTuple):
    """Requests that have started so far."""

    num: int
    num_own: int  # of the same tenant
    num_higher: int  # of higher priorities
    num_foreground: int  # of these, while the background waits


class Line:
    """The queue of the foreground or of the background."""

    def __init__(self, foreground: Line | None = None) -> None:
        """`foreground`: which comes before it."""
        self._foreground = foreground
        self._reasons: deque[tuple[int, str]] = deque(maxlen=_NUM_REASONS)  # numbered
        self._num_reasons = 0
        self._head = ""  # the request that cannot start at the moment
        self._num_waiting = self._num_started = 0
        self._by_tenant: Counter[str] = Counter()
        self._by_priority: Counter[int] = Counter()

    def stop(self, request_id: str, reason: str) -> None:
        if not self._head or self._reasons[-1][1] != reason:
            self._num_reasons += 1
            self._reasons.append((self._num_reasons, reason))
        self._head = request_id

    def leave(self, request_id: str) -> None:
        if request_id == self._head:
            self._head = ""

    def forget(self) -> None:
        """A request is not queued any more."""
        self._num_waiting -= 1

    def start(self, tenant: str, priority: int) -> None:
        self._num_started += 1
        self._by_priority[priority] += 1
        if tenant in self._by_tenant or len(self._by_tenant) < _NUM_TENANTS:
            self._by_tenant[tenant] += 1

    def join(self, tenant: str, priority: int) -> Place:
        """The place of a request that comes now."""
        first_reason = self._num_reasons if self._head else self._num_reasons + 1
        self._num_waiting += 1
        started = self.started(tenant, priority)
        return Place(self, tenant, priority, first_reason, self._num_waiting - 1, started)

    def started(self, tenant: str, priority: int) -> _Started:
        num_higher = sum(num for other, num in self._by_priority.items() if other < priority)
        num_foreground = self._foreground._num_started if self._foreground else 0
        return _Started(self._num_started, self._by_tenant[tenant], num_higher, num_foreground)

    def reasons_since(self, number: int) -> list[str]:
        return list(dict.fromkeys(reason for at, reason in self._reasons if at >= number))


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place in a queue."""

    line: Line
    tenant: str
    priority: int
    first_reason: int  # that counts for it
    num_ahead: int  # in the queue when it came
    before: _Started  # by then

    def why(self) -> str:
        """Why it has waited for others until now. Empty: it has not, or only for a step."""
        reasons = self.line.reasons_since(self.first_reason)
        if not reasons:
            return ""
        now, before = self.line.started(self.tenant, self.priority), self.before
        num_others = now.num - before.num - (now.num_own - before.num_own)
        num_higher = now.num_higher - before.num_higher
        num_foreground = now.num_foreground - before.num_foreground
        why = [
            f"behind {self.num_ahead} in the queue" if self.num_ahead else "",
            f"{num_others} of other tenants went first, whose turn it was" if num_others else "",
            f"{num_higher} of a higher priority went first" if num_higher else "",
            f"{num_foreground} that are not in the background went first" if num_foreground else "",
        ]
        told = ", ".join(part for part in why if part)
        return f"{told}: {'; '.join(reasons)}" if told else "; ".join(reasons)
