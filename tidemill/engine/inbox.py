"""Inbox: the deltas of one request that its reader has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque

from tidemill.errors import TidemillError
from tidemill.types.wire import Delta

# Of a backlog; about 100 bytes each. A whole response has fewer: a busy server must not take itself
# for a slow client.
MAX_CELLS = 2**20
PIECE_CELLS = 2**11  # of a piece that is taken at once
_DELTA_CELLS = 2  # of a delta besides its contents


class Inbox:
    """One reader. Deltas of a sample that wait together are taken together, in pieces of bounded
    size: a server that falls behind catches up, since each piece that it sends then holds more
    tokens.

    A backlog is counted in cells: tokens and log-probabilities. Those of the prompt come once and
    are bounded by the request, so they do not count."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Delta]] = {}  # by sample; the first is taken next
        self._error: TidemillError | None = None
        self._reader: asyncio.Future[None] | None = None
        self.num_cells = 0

    def put(self, delta: Delta) -> None:
        self._waiting.setdefault(delta.index, deque()).append(delta)
        self.num_cells += cells(delta)
        self._wake()

    def fail(self, error: TidemillError) -> None:
        """The reader gets the error next; the backlog is dropped."""
        self._error = error
        self._waiting.clear()
        self.num_cells = 0
        self._wake()

    async def take(self) -> Delta:
        """The next piece, or raise the error. Other tasks run between two pieces, however many
        wait."""
        if self._waiting:
            await asyncio.sleep(0)
        while not self._waiting and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        index = next(iter(self._waiting))
        waiting = self._waiting.pop(index)
        parts = [waiting.popleft()]
        num_cells = cells(parts[0])
        while waiting and parts[0].token_ids and num_cells + cells(waiting[0]) <= PIECE_CELLS:
            num_cells += cells(waiting[0])
            parts.append(waiting.popleft())
        if waiting:
            self._waiting[index] = waiting  # behind the other samples
        self.num_cells -= num_cells
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def cells(delta: Delta) -> int:
    """An output of beam search comes at once and is bounded by the request, so what is in it does
    not count."""
    if delta.score is not None:
        return _DELTA_CELLS
    return (
        _DELTA_CELLS
        + len(delta.token_ids)
        + sum(1 + len(entry.top) for entry in delta.logprobs or ())
    )


def _joined(parts: list[Delta]) -> Delta:
    first, last = parts[0], parts[-1]
    return Delta(
        first.request_id,
        first.index,
        [token for part in parts for token in part.token_ids],
        last.finish_reason,
        None
        if first.logprobs is None
        else [entry for part in parts for entry in part.logprobs or ()],
        first.prompt_pieces,  # these and the embedding come with the first token
        last.num_cached,
        last.timings,
        first.embedding,
        last.score,
        num_held=last.num_held,
    )
