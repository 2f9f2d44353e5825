"""Ranks as threads of this process, of which one runs at a time: it passes the turn on where it
waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tidemill.distributed.group import use
from tidemill.distributed.shard import Shard

T = TypeVar("T")


class Meeting:
    """Where ranks leave what the others take."""

    def __init__(self, size: int) -> None:
        self.size, self._turn, self._done = size, 0, set[int]()
        self._changed, self._error = threading.Condition(), None
        self._rounds: list[dict[int, Any]] = []

    def begin(self, rank: int) -> None:
        with self._changed:
            self._wait(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        with self._changed:
            self._done.add(rank)
            self._error = self._error or error
            self._pass_on(rank)

    def exchange(self, rank: int, number: int, value: Any) -> list[Any]:
        with self._changed:
            while len(self._rounds) <= number:
                self._rounds.append({})
            own = self._rounds[number]
            own[rank] = value
            self._pass_on(rank)
            self._wait(rank)
            assert len(own) == self.size, "ranks call different collectives"
            return [own[other] for other in range(self.size)]

    def _pass_on(self, rank: int) -> None:
        others = [(rank + i) % self.size for i in range(1, self.size + 1)]
        self._turn = next((other for other in others if other not in self._done), -1)
        self._changed.notify_all()

    def _wait(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise RuntimeError("another rank failed")


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting, self._number = rank, meeting.size, meeting, 0

    def _exchange(self, value: Any) -> list[Any]:
        self._number += 1
        return self._meeting.exchange(self.rank, self._number - 1, value)

    def begin(self) -> None:
        return

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        assert x_TN.dtype == torch.float32
        first, *others = self._exchange(x_TN.clone())
        x_TN.copy_(first)
        for other in others:
            x_TN += other
        return x_TN

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        parts = self._exchange(x.clone())
        assert sizes is None or [part.shape[dim] for part in parts] == list(sizes)
        return torch.cat(parts, dim)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        came = [sent[self.rank] for sent in self._exchange([part.clone() for part in parts])]
        assert counts is None or [len(part) for part in came] == list(counts)
        return came

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        return self._exchange(data)[source]

    def barrier(self) -> None:
        self._exchange(None)

    def fail(self) -> None:
        return

    def close(self) -> None:
        return


def run_ranks(size: int, work: Callable[[Shard], T]) -> list[T]:
    """`work` on every rank; what each returns."""
    meeting, results = Meeting(size), dict[int, T]()

    def rank_main(shard: Shard) -> None:
        error: BaseException | None = None
        try:
            meeting.begin(shard.rank)
            results[shard.rank] = work(shard)
        except BaseException as found:
            error = found
            errors.append(found)
        finally:
            meeting.end(shard.rank, error)

    errors: list[BaseException] = []
    shards = [Shard(rank, size) for rank in range(size)]
    for shard in shards:
        use(shard, ThreadGroup(meeting, shard.rank))
    threads = [threading.Thread(target=rank_main, args=(shard,)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
