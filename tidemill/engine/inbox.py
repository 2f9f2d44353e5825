"""What has come for one request and has not been taken yet."""

from __future__ import annotations

import asyncio
from collections import deque

from tidemill.errors import TidemillError
from tidemill.wire import Delta


class Inbox:
    """One taker. Tokens of a sample that wait together are taken together: a server that falls behind catches up, since each
    piece that it sends then holds more, and whoever reads slowly has less kept for them."""

    def __init__(self) -> None:
        self._items: deque[Delta | TidemillError] = deque()
        self._taker: asyncio.Future[None] | None = None

    def put(self, item: Delta | TidemillError) -> None:
        self._items.append(item)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self) -> Delta | TidemillError:
        while not self._items:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        item = self._items.popleft()
        return item if not self._items or isinstance(item, TidemillError) else self._joined(item)

    def _joined(self, first: Delta) -> Delta:
        """With what waits of the same sample, up to its end or an error. Samples keep their order, not that among them."""
        parts, others = [first], list[Delta | TidemillError]()
        while self._items and parts[-1].finish_reason is None:
            item = self._items[0]
            if isinstance(item, TidemillError):
                break
            self._items.popleft()
            if item.index == first.index:
                parts.append(item)
            else:
                others.append(item)
        self._items.extendleft(reversed(others))
        if len(parts) == 1:
            return first
        last = parts[-1]
        return Delta(
            first.request_id,
            first.index,
            [token for part in parts for token in part.token_ids],
            last.finish_reason,
            None if first.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
            first.prompt_logprobs,  # which come with the first token
            last.num_cached,
            last.timings,
            last.embedding,
        )
