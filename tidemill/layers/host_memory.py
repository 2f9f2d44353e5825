"""Host memory that a GPU copies from by itself, and how long it waits for copies."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tidemill.config.sizes import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.kernels.memory import PAGE


def pin(host: torch.Tensor, device: torch.device) -> None:
    """From now on a GPU reads this memory, which begins at a page, by itself."""
    if device.type != "cuda":
        return
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(host.data_ptr(), -(-host.nbytes // PAGE) * PAGE, 0))
    if code:
        raise ConfigError(
            f"{fmt_bytes(host.nbytes)} of host memory for streamed weights cannot be pinned (CUDA error {code}).",
            fix="Raise the limit of locked memory (ulimit -l), or give more with --weight-memory.",
            param="weight_memory_bytes",
        )
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False


class Waits:
    """The time for which a GPU had nothing to do but to wait for copies, by pairs of events."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self.seconds = 0.0

    def wait(self, event: Any) -> None:
        stream, begin, end = (
            torch.cuda.current_stream(),
            *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
        )
        begin.record(stream)
        stream.wait_event(event)
        end.record(stream)
        self._open.append((begin, end))

    def take(self) -> float:
        """Since the start, as far as it is known by now."""
        while self._open and self._open[0][1].query():
            begin, end = self._open.pop(0)
            self.seconds += begin.elapsed_time(end) / 1000
        return self.seconds
