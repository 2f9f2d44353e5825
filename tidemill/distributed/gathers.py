"""GatherGroup: ranks whose devices are joined by a library that copies (NCCL; in tests gloo), also
between hosts.

The library only copies, which is exact. Sums are computed here, in the order of ranks and by the
same operations as in the other groups: bits do not depend on how the library would have added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tidemill.distributed.group import Group, OverHost
from tidemill.errors import TidemillError, WorkerLost
from tidemill.kernels.cuda.lanes import in_order

_LARGE_BYTES = 2**18  # where the time of a message begins to be that of its bytes
_LOOK_S = 0.5
# after an error of the library: a process that ended, if that is why, is the better reason
_PATIENCE_S = 3.0


class Wire(Protocol):
    """A rank's end of the library."""

    @property
    def error(self) -> str:
        """The error that happened while nobody asked; empty: nothing."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out`: what all ranks have, one after the other. In the order of other work on the
        device."""
        ...

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Exchanges parts: of as many equal parts as there are ranks, part r goes to rank r; `out`:
        what came from each. Ordered as above."""
        ...

    def end(self) -> None:
        """Whoever waits for other ranks, or will, stops waiting. Returns at once."""
        ...


class GatherGroup(OverHost):
    """Until `begin`, only steps that are captured in CUDA graphs call the library, and capturing
    waits for nobody: ranks load kernels and allocate memory in their own time. A graph that is
    replayed before it (trials of nano-batching) does wait for the others, which replay the same
    ones in the same order."""

    def __init__(
        self, host: Group, wire: Wire, on_error: Callable[[WorkerLost], None] = lambda error: None
    ) -> None:
        """`host`: of the same ranks. `on_error`: is told, from a thread, if the library fails while
        all ranks live."""
        super().__init__(host)
        self._wire = wire
        self._on_error, self._ended, self._has_begun = on_error, threading.Event(), False
        threading.Thread(target=self._watch, name="watches the network", daemon=True).start()

    def begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._host.barrier()
        self._has_begun = True

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Small: every rank adds everything. Large, of more than two ranks: each adds a part, which
        it then shows to all, so that 2 / ranks of the bytes are sent. Either way a value is the
        same sum."""
        with in_order("collective"):
            if self.size == 2 or x_TN.nbytes < _LARGE_BYTES:
                return _add(self._gather(x_TN, x_TN.numel()), x_TN)
            num = -(-x_TN.numel() // self.size)
            own = _padded(x_TN, num * self.size)
            parts = own.new_empty(self.size, num)
            if self._is_live(x_TN):
                self._wire.all_to_all(own, parts)
            else:
                parts.copy_(own.view(parts.shape))
            summed = self._gather(_add(parts, own.new_empty(num)), num)
            return x_TN.copy_(summed.view(-1)[: x_TN.numel()].view(x_TN.shape))

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        dim %= 2
        sizes, other = sizes or [x.shape[dim]] * self.size, x.shape[1 - dim]
        with in_order("collective"):
            parts = self._gather(x, max(sizes) * other)
            filled = [part[: num * other] for part, num in zip(parts, sizes, strict=True)]
            return torch.cat(
                [part.view(-1, other) if dim == 0 else part.view(other, -1) for part in filled], dim
            )

    def fail(self) -> None:
        """Kernels that wait for a rank that is gone go on, and what they compute is of no use."""
        self._ended.set()
        self._host.fail()
        self._wire.end()

    def close(self) -> None:
        self._ended.set()
        self._wire.end()
        self._host.close()

    def _gather(self, x: torch.Tensor, num: int) -> torch.Tensor:
        """[ranks, num]: what each has, of as many values as the one that has most."""
        own = _padded(x, num)
        out = x.new_empty(self.size, num)
        if self._is_live(x):
            self._wire.all_gather(own, out)
        else:
            out.copy_(own.expand(self.size, num))
        return out

    def _is_live(self, x: torch.Tensor) -> bool:
        return self._has_begun or (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                error = self._wire.error
            except TidemillError as found:
                error = found.message
            if error and not self._ended.wait(_PATIENCE_S):
                self._on_error(
                    WorkerLost(
                        f"The engine cannot go on: rank {self.rank} has lost the others. {error}"
                    )
                )
            if error:
                return


def _padded(x: torch.Tensor, num: int) -> torch.Tensor:
    x = x.contiguous()
    return x.view(-1) if x.numel() == num else torch.cat([x.view(-1), x.new_zeros(num - x.numel())])


def _add(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.is_cuda:
        from tidemill.kernels.cuda.collectives import add_parts  # needs Triton

        return add_parts(parts, out)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return out.copy_(total.view(out.shape))
