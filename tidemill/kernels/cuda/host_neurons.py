"""Neurons that the host's cores compute for a GPU, in the middle of a step.

On a stream of its own: hidden states, and the gate if the GPU has it, go to pinned memory; the
stream calls the compiled kernel; what it made comes back. The GPU computes the other neurons
meanwhile. All of it is captured in the step's CUDA graph, so that the engine's thread has no part
in it. One layer's exchange is done before the next one's begins: all share the same memory.
"""

from __future__ import annotations

import ctypes

import torch

from tidemill.kernels import native
from tidemill.kernels.cuda.launch import is_compiling
from tidemill.kernels.cuda.virtual_memory import Driver
from tidemill.kernels.linear import Weight
from tidemill.kernels.native.streams import HostNeurons
from tidemill.kernels.neurons import GivenNeurons

ROWS = 256  # at once: more go in turns


class HostExchange:
    """`live`: how many of a step's tokens do not only fill it up, [1]; set before the first step."""

    def __init__(self, hidden_size: int, most_neurons: int) -> None:
        assert native.lib is not None
        self._driver, self._stream = Driver(torch.cuda.current_device()), torch.cuda.Stream()
        self._function = ctypes.cast(native.lib.run_host_neurons, ctypes.c_void_p).value or 0
        self._given = torch.zeros(ROWS * (hidden_size + most_neurons) + 1, pin_memory=True)
        self._made = torch.zeros(ROWS, hidden_size, pin_memory=True)
        self._gate = torch.zeros(ROWS, most_neurons)
        self.num_ns = torch.zeros(1, dtype=torch.int64)
        self.live: torch.Tensor | None = None
        self._calls: dict[tuple[int, int, int], HostNeurons] = {}  # graphs have their addresses

    def begin(self, x_TH: torch.Tensor, neurons: GivenNeurons, gate: Weight | None) -> torch.Tensor:
        """Begins the exchange; returns where the sums will be, in float32, once `end` was called.
        `gate`: of the neurons, if the GPU has it."""
        made = torch.empty(x_TH.shape, device=x_TH.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for first in range(0, len(x_TH), ROWS):
                self._exchange(
                    x_TH[first : first + ROWS], made[first : first + ROWS], neurons, gate, first
                )
        return made

    def end(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def _exchange(
        self,
        x_TH: torch.Tensor,
        made_TH: torch.Tensor,
        neurons: GivenNeurons,
        gate: Weight | None,
        first: int,
    ) -> None:
        parts = [x_TH.float().flatten(), *([] if gate is None else [gate.logits(x_TH).flatten()])]
        if is_compiling():
            return
        assert self.live is not None
        given = torch.cat([*parts, self.live.float()])
        self._given[: given.numel()].copy_(given, non_blocking=True)
        key = id(neurons), first, len(x_TH)
        if key not in self._calls:
            rows = range(first, first + len(x_TH))
            self._calls[key] = neurons.host_call(
                self._given, self._gate, self._made, rows, self.num_ns
            )
        self._driver.call_host(
            self._function, ctypes.addressof(self._calls[key]), self._stream.cuda_stream
        )
        made_TH.copy_(self._made[: len(x_TH)], non_blocking=True)
