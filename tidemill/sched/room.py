"""Room: what an engine can still take, by what it reported last and what was promised since. Ints
and strings only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Promise:
    num_rows: int
    num_pages: int


@dataclass(slots=True)
class Room:
    """The capacity of an engine that gets requests whose prompts another one computes first. Rows
    and pages are promised when the prompt begins; the promise ends when the engine has admitted the
    request and counts it itself."""

    num_rows: int
    num_pages: int
    page_size: int
    num_taken: int = 0  # rows of requests that run or wait there
    num_free: int = -1  # pages; -1: all
    _promised: dict[str, _Promise] = field(default_factory=dict)

    def pages_of(self, num_tokens: int, num_samples: int, num_groups: int = 1) -> int:
        """The pages of a prompt and the first tokens of its samples."""
        return (-(-num_tokens // self.page_size) + num_samples) * num_groups

    @property
    def num_promised(self) -> int:
        """Requests."""
        return len(self._promised)

    @property
    def has_row(self) -> bool:
        return (
            self.num_taken + sum(promise.num_rows for promise in self._promised.values())
            < self.num_rows
        )

    def why_not(self, num_rows: int, num_pages: int) -> str:
        """Why there is no room for so many; empty: there is. An engine with nothing to do takes
        whatever comes."""
        rows = self.num_taken + sum(promise.num_rows for promise in self._promised.values())
        if not rows:
            return ""
        if rows + num_rows > self.num_rows:
            return f"{rows} of {self.num_rows} slots are taken or promised"
        free = self.num_pages if self.num_free < 0 else self.num_free
        free -= sum(promise.num_pages for promise in self._promised.values())
        return (
            "" if num_pages <= free else f"{max(free, 0)} pages are free, and it needs {num_pages}"
        )

    def promise(self, request_id: str, num_rows: int, num_pages: int) -> None:
        self._promised[request_id] = _Promise(num_rows, num_pages)

    def admitted(self, request_id: str) -> None:
        """One of its samples. The prompt's pages are shared by those that follow."""
        promise = self._promised.get(request_id)
        if promise is not None:
            promise.num_rows -= 1
            promise.num_pages = promise.num_rows
            if not promise.num_rows:
                del self._promised[request_id]

    def release(self, request_id: str) -> None:
        self._promised.pop(request_id, None)

    def observe(self, num_running: int, num_waiting: int, num_free: int) -> None:
        self.num_taken, self.num_free = num_running + num_waiting, num_free


def first_in(
    waiting: Iterable[tuple[str, int, int]], under_way: dict[str, int], background: int
) -> int:
    """The next of those that wait for room: index into `waiting`, of tenant, priority and order of
    arrival. The background comes last, then by priority, then the tenant that has the fewest
    requests under way."""
    ranked = [
        (priority >= background, priority, under_way.get(tenant, 0), order, at)
        for at, (tenant, priority, order) in enumerate(waiting)
    ]
    return min(ranked)[-1]
