"""Feed-forwards with ReLUs that do not fit in a GPU's memory: the neurons that are used most often
are there, the others in host memory, where the CPU computes those that are not zero (PowerInfer).

Which is which is settled before the first step and never changes, so a token's sum is always made
of the same two parts: hot neurons in the order of the GPU's matmul, cold ones in their own, then
one addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.linear import Weight
from tidemill.kernels.neurons import GivenNeurons
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import GatedMLP
from tidemill.layers.streamed import Reads, Streaming, resident_bytes, tensors_of
from tidemill.quant.base import LinearMethod, OfAFeedForward

if TYPE_CHECKING:
    from tidemill.kernels.cuda.host_neurons import HostExchange


class SplitNeurons:
    """The split neurons of one feed-forward. Its linears have the hot neurons."""

    def __init__(self, cold: GivenNeurons, gate: Weight) -> None:
        """`gate`: of the cold ones, on the GPU or the host."""
        self.cold, self.gate = cold, gate
        self.exchange: HostExchange | None = None  # None: both devices are the CPU

    def __call__(self, x_TH: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        if self.exchange is None:
            assert native.lib is not None
            made, hot = self.cold(x_TH, self.gate.logits(x_TH)), down(gate_up(x_TH))
            native.lib.add(made, hot)
            return hot
        made = self.exchange.begin(x_TH, self.cold, self.gate if self.cold.gate is None else None)
        hot = down.weight.logits(gate_up(x_TH))
        self.exchange.end()
        return hot.add_(made).to(x_TH.dtype)


class _Parts:
    """The parts of one feed-forward while it is read: the methods of its two layers, and what they
    keep of the cold neurons."""

    def __init__(self, module: GatedMLP, hot: torch.Tensor, gates_on_gpu: bool) -> None:
        self.module, self.hot, self._gates_on_gpu = module, hot, gates_on_gpu
        is_cold = torch.ones(module.down.num_in, dtype=torch.bool, device="cpu")
        is_cold[hot] = False
        self.cold = is_cold.nonzero()[:, 0]
        self._inner = module.gate_up.method
        module.gate_up.method = _GateUp(module.gate_up.method, self)
        module.down.method = _Down(module.down.method, self)
        self.first: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str] | None = None
        self.down: torch.Tensor | None = None

    def finish(self) -> SplitNeurons:
        assert self.first is not None
        assert self.down is not None
        (gate, up, bias, act), down = self.first, self.down
        self.first = self.down = None
        gate_bias, up_bias = (
            (None, None) if bias is None else (part.float().contiguous() for part in bias.chunk(2))
        )
        on_host = None if self._gates_on_gpu else (gate.cpu(), gate_bias)
        cold = GivenNeurons(up, down, act, up_bias, on_host)
        return SplitNeurons(cold, cold.gate or self._inner.join([gate], gate_bias))


class _Part(OfAFeedForward):
    def __init__(self, inner: LinearMethod[torch.Tensor], parts: _Parts) -> None:
        super().__init__(inner)
        self._parts = parts


class _GateUp(_Part):
    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        raise AssertionError("a gated layer")

    def join_gated(
        self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str
    ) -> Weight:
        hot, cold = (one.to(gate.device) for one in (self._parts.hot, self._parts.cold))
        of_hot, of_cold = (
            None if bias is None else bias.view(2, -1)[:, one].flatten()
            for one in (self._parts.hot, self._parts.cold)
        )
        self._parts.first = gate[cold], up[cold].cpu(), of_cold, act
        return self._inner.join_gated(gate[hot], up[hot], of_hot, act)


class _Down(_Part):
    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        (down,) = parts
        hot, cold = (one.to(down.device) for one in (self._parts.hot, self._parts.cold))
        self._parts.down = down[:, cold].cpu()
        return self._inner.join([down[:, hot].contiguous()], bias)


class NeuronSplit(Streaming):
    """`hot`: of each layer, the numbers of its neurons on the GPU, in order. `gates_on_gpu`: so are
    the gates of the others."""

    def __init__(self, budget: int, hot: list[torch.Tensor], gates_on_gpu: bool) -> None:
        super().__init__(budget)
        self._hot, self._gates_on_gpu = hot, gates_on_gpu
        self._parts: list[_Parts] = []
        self.layers: list[SplitNeurons] = []
        self.exchange: HostExchange | None = None

    @property
    def is_in_use(self) -> bool:
        """No layer waits for weights: the exchange with the host is a part of the step like any
        other."""
        return False

    def attach(self, blocks: nn.ModuleList) -> None:
        for block, hot in zip(blocks, self._hot, strict=True):
            found = [module for module in block.modules() if type(module) is GatedMLP]
            if len(found) != 1:
                raise ConfigError(
                    "hot_neurons needs layers with a plain gated feed-forward.",
                    fix="Leave --hot-neurons out.",
                )
            self._parts.append(_Parts(found[0], hot, self._gates_on_gpu))

    @torch.inference_mode()
    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        for parts in self._parts:
            split = parts.module.split = parts.finish()
            self.layers.append(split)
        self._parts = []
        gates = [one.gate for one in self.layers] if self._gates_on_gpu else []
        self.held_bytes = resident_bytes(model) + sum(
            one.nbytes for gate in gates for one in tensors_of(gate)
        )
        self.streamed_bytes = sum(one.cold.num_bytes for one in self.layers)
        if next(model.parameters()).is_cuda:
            from tidemill.kernels.cuda.host_neurons import HostExchange

            layouts = [one.cold.layout for one in self.layers]
            self.exchange = HostExchange(layouts[0].num_in, max(one.num_inner for one in layouts))
            for one in self.layers:
                one.exchange = self.exchange

    def see_live(self, live: torch.Tensor) -> None:
        if self.exchange is not None:
            self.exchange.live = live

    def _figures(self) -> Reads:
        num = sum(int(one.cold.num_read) for one in self.layers)
        seconds = 0.0 if self.exchange is None else int(self.exchange.num_ns) / 1e9
        return Reads(num * self.layers[0].cold.memory.shape[1], seconds, num, num)
