"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams in order of arrival, each with the number of its stream.

    When it ends, for whatever reason, they are all closed. The queue is bounded: what a slow reader
    has not taken stays in the streams.
    """
    if len(streams) == 1:
        try:
            async for only in streams[0]:
                yield 0, only
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(
        maxsize=len(streams)
    )

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                await queue.put((number, item, None))
            await queue.put((number, None, None))
        except Exception as error:
            await queue.put((number, None, error))
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    num_left = len(streams)
    try:
        while num_left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                num_left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
