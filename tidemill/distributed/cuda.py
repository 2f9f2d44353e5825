"""CudaGroup: ranks whose GPUs read each other's memory directly, or that share a GPU. What is on
the host goes another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.distributed.group import Group, OverHost

_ANY_TURN = 2**30  # in both halves of a count: later than any


class CudaGroup(OverHost):
    def __init__(self, host: Group) -> None:
        from tidemill.kernels.cuda.collectives import (
            MOST_PROGRAMS,
            Exchange,
            flags_offset,
            memory_bytes,
        )
        from tidemill.kernels.cuda.virtual_memory import Driver

        super().__init__(host)
        driver = Driver(torch.cuda.current_device())
        self._driver, self._rescue = driver, torch.cuda.Stream()
        own, handle = driver.allocate_shared(memory_bytes(self.size))
        handles = [host.broadcast_bytes(handle, source) for source in range(self.size)]
        table = [
            own if rank == self.rank else driver.open_shared(theirs)
            for rank, theirs in enumerate(handles)
        ]
        self._exchange = Exchange(
            self.rank, self.size, torch.tensor(table, dtype=torch.int64, device="cuda")
        )
        self._flags, self._num_words = own + flags_offset(), 2 * MOST_PROGRAMS * self.size
        host.barrier()

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._host.barrier()
        self._exchange.begin()
        torch.cuda.synchronize()
        self._host.barrier()

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.lanes import in_order

        with in_order("collective"):
            return self._exchange.all_reduce(x_TN)

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        sizes = sizes or [x.shape[dim]] * self.size
        if dim % 2:
            return self._exchange.all_gather(x, sizes)
        flat = self._exchange.all_gather(x.reshape(1, -1), [num * x.shape[1] for num in sizes])
        return flat.view(-1, x.shape[1])

    def fail(self) -> None:
        """Kernels that wait for a rank that is gone go on, and what they compute is of no use."""
        self._host.fail()
        self._driver.fill_words(self._flags, _ANY_TURN, self._num_words, self._rescue.cuda_stream)

    def close(self) -> None:
        self._host.close()
