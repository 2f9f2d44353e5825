"""Group: ranks that compute one model together, and what they exchange. Every rank calls the same
methods in the same order.

Sums are in the order of ranks, whoever comes first, and the same in every implementation: bits do
not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tidemill.distributed.shard import Shard


class Group(Protocol):
    rank: int
    size: int

    def begin(self) -> None:
        """All ranks are ready to compute. Before that, what they exchange may be anything."""
        ...

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, float32. In place; x is returned."""
        ...

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The ranks' matrices side by side (dim 1) or one after the other (dim 0), float32.
        `sizes`: of each rank in that dimension, where they differ."""
        ...

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Part r goes to rank r; returned is what came from each. Parts are [rows, width], rows
        differ. `counts`: rows that come from each rank, where that is known."""
        ...

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        """The bytes that rank `source` gave."""
        ...

    def barrier(self) -> None: ...

    def fail(self) -> None:
        """A rank is gone: whoever waits in a collective, or will, gets WorkerLost. May be called
        from another thread."""
        ...

    def close(self) -> None: ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def begin(self) -> None:
        return

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        return x_TN

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        return x

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        return list(parts)

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        return data

    def barrier(self) -> None:
        return

    def fail(self) -> None:
        return

    def close(self) -> None:
        return


_groups = dict[Shard, Group]()
_alone = Alone()


class OverHost:
    """An exchange, through their hosts, of ranks whose tensors are on GPUs."""

    def __init__(self, host: Group) -> None:
        """`host`: of the same ranks."""
        self.rank, self.size, self._host = host.rank, host.size, host

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Through the host: how many rows come is known there alone."""
        received = self._host.all_to_all([part.float().cpu() for part in parts], counts)
        return [part.to(parts[0].device, parts[0].dtype) for part in received]

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        return self._host.broadcast_bytes(data, source)

    def barrier(self) -> None:
        self._host.barrier()


def use(shard: Shard, group: Group) -> None:
    """From now on, layers with this shard exchange what they compute in this group."""
    assert (group.rank, group.size) == (shard.rank, shard.size)
    _groups[shard] = group


def group_of(shard: Shard) -> Group:
    """The group of a layer with this shard."""
    return _alone if shard.size == 1 else _groups[shard]
