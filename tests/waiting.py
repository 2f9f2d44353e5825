"""Waiting for a state, never for a time: the limit is far beyond what any state takes, on any
machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG_S = 600.0


def until(state: Callable[[], T], every_s: float = 0.1) -> T:
    """Waits until the state is true, and returns it.

    Most states are asked of a server, and ten requests a second do not keep it busy.
    """
    end_s = time.monotonic() + LONG_S
    while not (found := state()):
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(every_s)
    return found


async def until_async(state: Callable[[], T], every_s: float = 0.01) -> T:
    async with asyncio.timeout(LONG_S):
        while not (found := state()):
            await asyncio.sleep(every_s)
    return found
