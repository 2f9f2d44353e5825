"""The time of a call in the server: how long it was in each state, from its first byte to the last
byte of its response.

A call is in one state at a time, so its spans add up to the whole, whatever is measured or not.
What no other state explains is the server's loop: waiting for a turn of the event loop or for a
thread, and small work between two states.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")

READING, PARSING, TEMPLATE, TOKENIZING = "reading", "parsing", "template", "tokenizing"
GRAMMAR, ENGINE, FORMATTING, WRITING = "grammar", "engine", "formatting", "writing"
LOOP = "server loop"
OWN_WORK = (PARSING, TOKENIZING, FORMATTING)  # in which this process computes
_SEE_AGAIN_S = 0.001  # if a response is sent, at least
_SEE_AGAIN_PART = 0.005  # of the time since its last byte was written


class Connection(Protocol):
    """The transport of a response."""

    def num_unsent(self) -> int:
        """Bytes of responses that the socket has not taken yet."""
        ...


class Stopwatch:
    __slots__ = (
        "_since_s",
        "begun_s",
        "connection",
        "ended_s",
        "is_written",
        "num_computed",
        "spans",
        "state",
    )

    def __init__(
        self,
        read_s: float | None = None,
        waited_s: float = 0.0,
        connection: Connection | None = None,
    ) -> None:
        """`read_s`: when the first byte was read, or the call was made. `waited_s`: for the server
        to read it. `connection`: of the response, whose end is when it was sent."""
        self._since_s = time.monotonic() if read_s is None else read_s
        self.begun_s = self._since_s - waited_s
        self.state, self.connection = LOOP, connection
        self.spans = {LOOP: waited_s}
        self.ended_s = 0.0
        self.is_written = False  # all of the response, though the socket may not have it
        self.num_computed = 0  # samples in engines that have not ended

    def enter(self, state: str) -> None:
        """The time since the last change was spent in the state it was in. No effect at the end."""
        if self.ended_s:
            return
        now, before = time.monotonic(), self.state
        self.spans[before] = self.spans.get(before, 0.0) + now - self._since_s
        self._since_s, self.state = now, state

    @contextlib.contextmanager
    def within(self, state: str) -> Iterator[None]:
        before = self.state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    async def in_thread(self, pool: Executor | None, work: Callable[[], T]) -> T:
        """Does the work in a thread. Waiting for one, and for the event loop afterwards, is not the
        state's time."""
        state = self.state

        def run() -> T:
            self.enter(state)
            try:
                return work()
            finally:
                self.enter(LOOP)

        self.enter(LOOP)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, run)
        finally:
            self.enter(state)

    def engine_ended(self, num: int = 1) -> None:
        """Samples have ended in their engine, which the task that waits for them is to see."""
        self.num_computed -= num
        if not self.num_computed and self.state == ENGINE:
            self.enter(LOOP)

    def snapshot(self) -> dict[str, float]:
        """The spans up to now."""
        now = {} if self.ended_s else {self.state: time.monotonic() - self._since_s}
        return {
            state: self.spans.get(state, 0.0) + now.get(state, 0.0)
            for state in (*self.spans, *(now.keys() - self.spans.keys()))
        }

    def end(self) -> None:
        """The last byte was written, or nobody waits for it. It is over when the socket has it."""
        if self.ended_s:
            return
        self.enter(WRITING)
        self.is_written = True
        if self.connection is None or not self.connection.num_unsent():
            self.stop()
        else:
            self._see(self._since_s, self.connection)

    def _see(self, written_s: float, connection: Connection) -> None:
        if self.ended_s or not connection.num_unsent():
            self.stop()
        else:
            again_s = max(_SEE_AGAIN_S, _SEE_AGAIN_PART * (time.monotonic() - written_s))
            asyncio.get_running_loop().call_later(again_s, self._see, written_s, connection)

    def stop(self) -> None:
        """It is over, also if bytes are left that nobody reads."""
        if not self.ended_s:
            self.enter(self.state)
            self.ended_s, self.connection = self._since_s, None


_of_task: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def start(stopwatch: Stopwatch) -> None:
    """From now on the task, and those that it makes, work for the call of this stopwatch."""
    _of_task.set(stopwatch)


def of_task() -> Stopwatch:
    """The stopwatch of the call that the task works for; one that is not looked at, if it works for
    none."""
    return _of_task.get() or Stopwatch()
