"""Models whose weights do not fit in a GPU's memory: layers are copied from pinned host memory while others compute.

A layer's slot is filled with the next layer that uses it as soon as the layer is done, on a stream of copies; a layer begins when
its copy is there. After a forward pass every slot has its first layer again, so that a captured pass may follow any other: copies
and the events between both streams are part of CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.layers.linear import Linear
from tidemill.layers.moe import Experts
from tidemill.layers.streamed import Streaming, resident_bytes, tensors_of
from tidemill.model_config import MoESpec
from tidemill.quant.base import ExpertParts, ExpertStacks, LinearMethod
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.prepared import memory

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
        self.tensor.set_(at.untyped_storage(), (at.storage_offset() + start) // size, self.shape, stride)
        return at[start : start + len(self.host)]


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that a GPU reads by itself, no larger than asked for."""
    made = torch.from_numpy(memory(num_bytes))[:num_bytes]
    if device.type == "cuda":
        code = torch.cuda.cudart().cudaHostRegister(made.data_ptr(), -(-num_bytes // 4096) * 4096, 0)
        if int(code) != 0:
            raise MemoryError(f"no pinned host memory for {num_bytes} bytes of weights (CUDA error {int(code)})")
    return made


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

    def new_stacks(self, spec: MoESpec, hidden_size: int) -> ExpertStacks | None:
        return self._inner.new_stacks(spec, hidden_size)

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        return self._move(self._inner.join_experts(parts, spec))

    def _move(self, made: Any) -> Any:
        for tensor in tensors_of(made):
            if tensor.nbytes < _SMALL or not tensor.is_contiguous():
                continue
            host = pinned(tensor.nbytes, tensor.device)
            host.copy_(tensor.view(torch.uint8).flatten())
            self._moved.append(Moved(tensor, host, tensor.shape))
            tensor.set_(torch.empty(0, device=tensor.device).untyped_storage(), 0, (0,), (1,))
        return made


class HostStreaming(Streaming):
    """`num_bytes`, `num_copies`: copied in passes that were not captured, and by captured ones once."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._moved: list[list[Moved]] = []  # by layer
        self._slots: list[int] = []  # by streamed layer
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # by streamed layer: from host memory, to a slot
        self._kept: list[torch.Tensor] = []
        self._in_slot: dict[int, int] = {}
        self._on_the_way: dict[int, Any] = {}  # by streamed layer: an event
        self.num_bytes = 0

    def attach(self, blocks: nn.ModuleList) -> None:
        for block in blocks:
            moved: list[Moved] = []
            self._moved.append(moved)
            for module in block.modules():
                if isinstance(module, Linear | Experts):
                    module.method = InHostMemory(module.method, moved)

    @torch.inference_mode()
    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self.fixed_bytes = resident_bytes(model)
        sizes = [sum(one.num_bytes for one in moved) for moved in self._moved]
        device = self._moved[0][0].tensor.device
        plan = self.plan(sizes)
        slot_bytes = max((sizes[layer] for layer in plan.streamed), default=0)
        slots = torch.empty(plan.num_slots, slot_bytes, dtype=torch.uint8, device=device)
        self._slots = list(plan.slots)
        for layer, moved in enumerate(self._moved):
            if layer in plan.streamed:
                number = len(self._copies)
                self._copies.append(_place(moved, slots[plan.slots[number]]))
                blocks[layer].register_forward_pre_hook(lambda *_, number=number: self._begin(number))
                blocks[layer].register_forward_hook(lambda *_, number=number: self._end(number))
                continue
            own = torch.empty(sizes[layer], dtype=torch.uint8, device=device)
            self._kept.append(own)
            for host, to in _place(moved, own):
                to.copy_(host)
        self._moved = []
        self.held_bytes = self.fixed_bytes + slots.nbytes + sum(one.nbytes for one in self._kept)
        self.streamed_bytes = sum(sizes[layer] for layer in plan.streamed)
        if self._copies:
            model.register_forward_hook(lambda *_: self.settle())
            self.settle()

    @cached_property
    def _stream(self) -> Any:
        is_cuda = self._copies[0][0][1].is_cuda
        return torch.cuda.Stream() if is_cuda else None

    def _begin(self, number: int) -> None:
        """The layer's weights are in its slot before it begins."""
        if self._in_slot.get(self._slots[number]) != number:  # not the order that was foreseen
            self._copy(number)
        self._wait(number)

    def _end(self, number: int) -> None:
        """Its slot is free for the next layer that has it."""
        others = (*range(number + 1, len(self._slots)), *range(number))
        following = next((other for other in others if self._slots[other] == self._slots[number]), number)
        if following != number:
            self._copy(following)

    def settle(self) -> None:
        """Every slot has its first layer."""
        for slot in set(self._slots):
            first = self._slots.index(slot)
            if self._in_slot.get(slot) != first:
                self._copy(first)
        for number in list(self._on_the_way):
            self._wait(number)

    def _wait(self, number: int) -> None:
        event = self._on_the_way.pop(number, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _copy(self, number: int) -> None:
        """Once what was enqueued before is done."""
        self._on_the_way.pop(self._in_slot.get(self._slots[number], -1), None)
        self._in_slot[self._slots[number]] = number
        self.num_bytes += sum(len(host) for host, _ in self._copies[number])
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
