"""Models whose weights do not fit in a GPU's memory: layers are copied from pinned host memory
while others compute.

A layer's slot is filled with the next layer that has it as soon as the layer is done, by a stream
of copies; a layer begins when its copy is there. The order of copies goes round: the first layers
of the next step come while tokens are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tidemill.config.sizes import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.kernels.linear import Weight
from tidemill.kernels.memory import memory
from tidemill.kernels.moe import ExpertWeights
from tidemill.layers.host_experts import ExpertSlots, HostStacks, Layer
from tidemill.layers.host_memory import Waits, pin
from tidemill.layers.linear import Linear
from tidemill.layers.moe import Experts, MoE
from tidemill.layers.streamed import Reads, Streaming, resident_bytes, tensors_of
from tidemill.quant.base import ExpertParts, ExpertStacks, LinearMethod
from tidemill.quant.cuda import CudaExperts
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

_SMALL = 2**16  # bytes of a tensor that is not worth a copy: it stays
_ALIGN = 256


@dataclass(slots=True)
class Moved:
    """A weight's tensor, whose bytes are in host memory."""

    tensor: torch.Tensor
    host: torch.Tensor
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """In a slot."""
        return -(-len(self.host) // _ALIGN) * _ALIGN

    def place(self, at: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor lies there from now on. Returns its bytes."""
        stride = torch.empty(self.shape, device="meta").stride()
        size = self.tensor.element_size()
        self.tensor.set_(
            at.untyped_storage(), (at.storage_offset() + start) // size, self.shape, stride
        )
        return at[start : start + len(self.host)]


class InHostMemory(LinearMethod[Any]):
    """Another method's weights, moved to host memory as soon as they are made."""

    def __init__(self, inner: LinearMethod[Any], moved: list[Moved]) -> None:
        super().__init__()
        self._inner, self._moved = inner, moved

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return self._inner.read(tensor, row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self._move(self._inner.join(parts, bias))

    def join_gated(self, gate: Any, up: Any, bias: torch.Tensor | None, act: str) -> Weight:
        return self._move(self._inner.join_gated(gate, up, bias, act))

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        raise AssertionError("experts have slots of their own")

    def _move(self, made: Any) -> Any:
        for tensor in tensors_of(made):
            if tensor.nbytes < _SMALL or not tensor.is_contiguous():
                continue
            host = torch.from_numpy(memory(tensor.nbytes))[: tensor.nbytes]
            host.copy_(tensor.view(torch.uint8).flatten())
            self._moved.append(Moved(tensor, host, tensor.shape))
            tensor.set_(torch.empty(0, device=tensor.device).untyped_storage(), 0, (0,), (1,))
        return made


class ExpertsInHostMemory(LinearMethod[Any]):
    """Another method's experts, in host memory from the start. What a layer's tokens share stays on
    the device."""

    def __init__(self, inner: LinearMethod[Any]) -> None:
        super().__init__()
        self._inner = inner

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return self._inner.read(tensor, row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self._inner.join(parts, bias)

    def new_stacks(self, spec: MoESpec, hidden_size: int) -> ExpertStacks:
        one = self._inner.new_stacks(replace(spec, num_experts=1, top_k=1), hidden_size)
        assert one is not None
        return HostStacks(spec.num_experts, one)

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        return self._inner.join_experts(parts, spec)


class HostStreaming(Streaming):
    """From pinned host memory, on a GPU."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._moved: list[list[Moved]] = []  # by layer
        self._slots: tuple[int, ...] = ()  # by streamed layer
        # by streamed layer: from host memory, to a slot
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._in_slot: dict[int, int] = {}
        self._on_the_way: dict[int, Any] = {}  # by streamed layer: an event
        self._stream: Any = None  # of copies; None where there is no GPU
        self._waits = Waits()
        self.experts: ExpertSlots | None = None
        self.num_bytes = self.num_asked = self.num_read = 0

    def _figures(self) -> Reads:
        if self.experts is None:
            return Reads(self.num_bytes, self._waits.take(), self.num_asked, self.num_read)
        places = self.experts.places
        waited_s = self.experts.waits.take()
        return Reads(
            self.experts.num_bytes, waited_s, places.num_asked, places.num_read, places.num_foreseen
        )

    def attach(self, blocks: nn.ModuleList) -> None:
        experts = [module for module in blocks.modules() if isinstance(module, Experts)]
        for one in experts:
            one.method = ExpertsInHostMemory(one.method)
        for block in blocks if not experts else ():
            moved: list[Moved] = []
            self._moved.append(moved)
            for module in block.modules():
                if isinstance(module, Linear):
                    module.method = InHostMemory(module.method, moved)

    @torch.inference_mode()
    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        layers = [module for module in blocks.modules() if isinstance(module, MoE)]
        if layers:
            self._stream_experts(model, layers)
        else:
            self._stream_layers(model, blocks)

    # ---- experts

    def _stream_experts(self, model: nn.Module, modules: list[MoE]) -> None:
        layers, first = list[Layer](), 0
        for module in modules:
            weights = module.experts.weights
            assert isinstance(weights, CudaExperts)
            stacks = weights.stacks
            assert isinstance(stacks, HostStacks)
            number = len(layers)
            layers.append(Layer(first, module.experts.spec, stacks, weights.biases, module.choose))
            weights.read_from(partial(self._find, number))
            first += module.experts.num_experts
        self.fixed_bytes = resident_bytes(model)
        sizes = {layer.stacks.expert_bytes for layer in layers}
        if len(sizes) > 1:
            raise ConfigError(
                "Experts of different sizes cannot be streamed to a GPU.",
                fix="Leave --weight-memory out, or use --device cpu.",
                param="weight_memory_bytes",
            )
        (size,), most = sizes, max(layer.spec.num_experts for layer in layers)
        num_slots = min(first, (self.budget - self.fixed_bytes) // size)
        if num_slots < most:
            raise self.too_small(
                most * size, f"all {most} experts of a layer, {fmt_bytes(size)} each"
            )
        self.experts = ExpertSlots(num_slots, layers, layers[0].stacks.device)
        self.held_bytes = self.fixed_bytes + self.experts.held_bytes
        self.streamed_bytes = (first - num_slots) * size

    @property
    def is_in_use(self) -> bool:
        """Experts are looked up by the host even where all of them have found a place."""
        return self.streamed_bytes > 0 or self.experts is not None

    def _find(
        self, number: int, x_TH: torch.Tensor, live: torch.Tensor | None, experts_P: torch.Tensor
    ) -> Any:
        assert self.experts is not None
        return self.experts.find(number, x_TH, live, experts_P)

    # ---- layers

    def _stream_layers(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self.fixed_bytes = resident_bytes(model)
        sizes = [sum(one.num_bytes for one in moved) for moved in self._moved]
        device = next((one.tensor.device for moved in self._moved for one in moved), None)
        if device is None:  # nothing is worth a copy of its own
            self.held_bytes = self.fixed_bytes
            return
        plan = self.plan(sizes)
        largest = max((sizes[layer] for layer in plan.streamed), default=0)
        slots = torch.empty(plan.num_slots, largest, dtype=torch.uint8, device=device)
        self._slots, self.held_bytes = plan.slots, self.fixed_bytes + slots.nbytes
        for layer, moved in enumerate(self._moved):
            if layer not in plan.streamed:
                own = torch.empty(sizes[layer], dtype=torch.uint8, device=device)
                for host, to in _place(moved, own):
                    to.copy_(host)
                moved.clear()  # host memory is free again
                self.held_bytes += own.nbytes
                continue
            number = len(self._copies)
            for one in moved:
                pin(one.host, device)
            self._copies.append(_place(moved, slots[plan.slots[number]]))
            blocks[layer].register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            blocks[layer].register_forward_hook(lambda *_, number=number: self._end(number))
        self._moved = []
        self.streamed_bytes = sum(sizes[layer] for layer in plan.streamed)
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        for slot in range(plan.num_slots):
            self._copy(plan.slots.index(slot))

    def _begin(self, number: int) -> None:
        """The layer's weights are in its slot before it begins."""
        self.num_asked += 1
        if self._in_slot.get(self._slots[number]) != number:  # not the order that was foreseen
            self._copy(number)
        event = self._on_the_way.pop(number, None)
        if event is not None:
            self._waits.wait(event)

    def _end(self, number: int) -> None:
        """Its slot is free for the next layer that has it."""
        others = (*range(number + 1, len(self._slots)), *range(number))
        following = next(
            (other for other in others if self._slots[other] == self._slots[number]), number
        )
        if following != number:
            self._copy(following)

    def _copy(self, number: int) -> None:
        """Once what was enqueued before is done."""
        self._on_the_way.pop(self._in_slot.get(self._slots[number], -1), None)
        self._in_slot[self._slots[number]] = number
        self.num_bytes += sum(len(host) for host, _ in self._copies[number])
        self.num_read += 1
        if self._stream is None:
            for host, to in self._copies[number]:
                to.copy_(host)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for host, to in self._copies[number]:
                to.copy_(host, non_blocking=True)
        self._on_the_way[number] = self._stream.record_event()


def _place(moved: list[Moved], at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One after the other: of each, its bytes in host memory, and where they go."""
    made, start = [], 0
    for one in moved:
        made.append((one.host, one.place(at, start)))
        start += one.num_bytes
    return made
