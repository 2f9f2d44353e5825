"""Work on large requests and responses beside the event loop, so that other responses go on
meanwhile.

Python runs one thread at a time and changes between them every millisecond, but never amid one call
of a library: such work is made of calls that take little each. One thread does all of it: the event
loop never waits for more than one of these calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import msgspec

from tidemill.server.http import stopwatch

T = TypeVar("T")
LARGE_BYTES = 2**16  # of JSON, from which it is worth the way to the thread and back
SWITCH_S = 0.001  # that a thread runs before the event loop may go on
_PER_CALL = 2**12  # members of a list that are encoded at once
_thread = ThreadPoolExecutor(1, "aside")
_json = msgspec.json.Encoder().encode


async def aside(work: Callable[[], T], size: int = LARGE_BYTES) -> T:
    """In the thread, if `size`, in bytes of JSON or the like, is large."""
    return await stopwatch.of_task().in_thread(_thread, work) if size >= LARGE_BYTES else work()


def switch_often() -> None:
    """Lets threads take turns more often, in a process with an event loop."""
    sys.setswitchinterval(SWITCH_S)


def encoded(values: Iterable[Any], per_call: int = _PER_CALL) -> msgspec.Raw:
    """A list as JSON, in bounded calls."""
    left, parts = iter(values), list[bytes]()
    while piece := list(islice(left, per_call)):
        parts.append(_json(piece)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
