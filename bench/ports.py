"""Ports of 127.0.0.1 that a test or a measurement has for itself; outside `tests`, whose name
foreign suites have too."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(num: int = 1) -> Iterator[int]:
    """The first of so many ports in a row, which nobody else is given.

    Each is bound by a socket that does not listen, beside which a server that sets SO_REUSEADDR
    may.
    """
    with contextlib.ExitStack() as reserved:
        yield _bind_in_a_row(reserved, num)


def _bind_in_a_row(reserved: contextlib.ExitStack, num: int) -> int:
    while True:
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError, OverflowError):
            first = 0
            for i in range(num):
                bound = sockets.enter_context(socket.socket())
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(("127.0.0.1", first + i if first else 0))
                first = first or int(bound.getsockname()[1])
            reserved.push(sockets.pop_all())
            return first
