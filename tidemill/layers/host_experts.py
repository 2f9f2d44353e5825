"""Experts of a model that does not fit in a GPU's memory: all lie in pinned host memory, those that
are used most often in slots on the GPU.

The host waits for a layer's routing, and has the chosen experts that are in no slot copied.
Meanwhile it asks the next layer's router about the same hidden states: the experts that it would
choose are copied while this layer computes. A guess changes no result, only when a copy begins.

A slot is not written while it is read: when the host knows a layer's routing, all layers before it
are done, and what the layer itself needs is not given away.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.kernels.memory import memory
from tidemill.layers.host_memory import Waits, pin
from tidemill.layers.places import Places
from tidemill.quant.base import ExpertStacks
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

if TYPE_CHECKING:
    from tidemill.kernels.cuda.moe import InSlots


class HostStacks(ExpertStacks):
    """In host memory. Matrices are read on the device, as those that stay there."""

    def __init__(self, num_experts: int, one: ExpertStacks) -> None:
        """`one`: an expert's, on the device."""
        self.device = one.gate_up_E2IH.device
        self._one = one
        super().__init__(
            *(_in_host_memory(num_experts, part) for part in (one.gate_up_E2IH, one.down_EHI))
        )

    def read(
        self, side: str, expert: int, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> None:
        self._one.read(side, 0, tensor, row_order)
        size = self.down_EHI.shape[2]
        rows = {"gate": slice(0, size), "up": slice(size, None)}.get(side, slice(None))
        if side == "down":
            self.down_EHI[expert].copy_(self._one.down_EHI[0])
        else:
            self.gate_up_E2IH[expert, rows].copy_(self._one.gate_up_E2IH[0, rows])

    @property
    def expert_bytes(self) -> int:
        return self.gate_up_E2IH[0].nbytes + self.down_EHI[0].nbytes


def _in_host_memory(num: int, one: torch.Tensor) -> torch.Tensor:
    """Room in host memory for so many."""
    num_bytes = num * one.nbytes
    return torch.from_numpy(memory(num_bytes))[:num_bytes].view(one.dtype).view(num, *one.shape[1:])


@dataclass(slots=True)
class Layer:
    """Experts of a layer. `first`: the number of its first one among all layers'."""

    first: int
    spec: MoESpec
    stacks: HostStacks
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    route: Callable[[torch.Tensor], torch.Tensor]  # hidden states to the router's logits


class ExpertSlots:
    """Slots on the device that the experts of all layers share."""

    def __init__(self, num_slots: int, layers: list[Layer], device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._firsts = [layer.first for layer in layers]
        self.places = Places(sum(layer.spec.num_experts for layer in layers), num_slots)
        like = layers[0].stacks
        self.stacks = ExpertStacks(
            *(
                torch.zeros(num_slots, *one.shape[1:], dtype=one.dtype, device=device)
                for one in (like.gate_up_E2IH, like.down_EHI)
            )
        )
        for layer in layers:
            pin(layer.stacks.gate_up_E2IH, device)
            pin(layer.stacks.down_EHI, device)
        is_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream() if is_gpu else None  # of copies
        self._arrivals: list[tuple[int, Any]] = [
            (0, None)
        ] * num_slots  # of each slot: the number of its last copy, and its event
        self._num_copies = 0
        self.waits = Waits()
        self.num_bytes = 0
        self._tables = torch.zeros(
            _num_words(layers, num_slots), dtype=torch.int32, pin_memory=is_gpu
        )
        self._chosen = torch.zeros(0, dtype=torch.int32)

    @property
    def held_bytes(self) -> int:
        return self.stacks.gate_up_E2IH.nbytes + self.stacks.down_EHI.nbytes

    @torch.inference_mode()
    def find(
        self, number: int, x_TH: torch.Tensor, live: torch.Tensor | None, experts_P: torch.Tensor
    ) -> InSlots:
        """Finds the slots of the chosen experts of a layer. Copies of those that are in no slot are
        under way, and the device waits."""
        layer = self._layers[number]
        chosen, guessed = self._read_choices(number, x_TH, live, experts_P)
        needed = [layer.first + expert for expert in chosen]
        for unit in self.places.need(needed):
            self._copy(unit)
        if self._stream is not None and needed:
            _, event = max(
                (self._arrivals[self.places.where[unit]] for unit in needed), key=lambda one: one[0]
            )
            if event is not None:
                self.waits.wait(event)
        for unit in self.places.ahead(guessed):
            self._copy(unit)
        return self._tell(layer)

    def _read_choices(
        self, number: int, x_TH: torch.Tensor, live: torch.Tensor | None, experts_P: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """The experts that the layer needs, and the units that the next one may need."""
        from tidemill.kernels.cuda.launch import is_compiling

        layer, ahead = self._layers[number], self._layers[(number + 1) % len(self._layers)]
        num, parts = x_TH.shape[0], [experts_P]
        logits = (
            ahead.route(x_TH)[:, : ahead.spec.num_experts]
            if number + 1 < len(self._layers)
            else None
        )
        if is_compiling():  # nothing was computed
            return [], []
        if logits is not None:
            parts.append(logits.topk(ahead.spec.top_k, dim=-1).indices.flatten().int())
        if live is not None:
            parts.append(live)
        chosen = self._to_host(torch.cat(parts))
        num_live = num if live is None else int(chosen[-1])
        mine = chosen[: num_live * layer.spec.top_k]
        begin = experts_P.numel()
        guessed = (
            chosen[begin : begin + num_live * ahead.spec.top_k]
            if number + 1 < len(self._layers)
            else mine[:0]
        )
        return np.unique(mine).tolist(), (ahead.first + np.unique(guessed)).tolist()

    def _to_host(self, on_device: torch.Tensor) -> np.ndarray:
        if self._stream is None:
            return on_device.numpy()
        if self._chosen.numel() < on_device.numel():
            self._chosen = torch.empty(2 * on_device.numel(), dtype=torch.int32, pin_memory=True)
        there = self._chosen[: on_device.numel()]
        there.copy_(on_device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return there.numpy()

    def _copy(self, unit: int) -> None:
        layer = self._layers[bisect_right(self._firsts, unit) - 1]
        expert, slot = unit - layer.first, int(self.places.where[unit])
        pairs = (
            (self.stacks.gate_up_E2IH[slot], layer.stacks.gate_up_E2IH[expert]),
            (self.stacks.down_EHI[slot], layer.stacks.down_EHI[expert]),
        )
        self.num_bytes += layer.stacks.expert_bytes
        self._num_copies += 1
        if self._stream is None:
            for to, host in pairs:
                to.copy_(host)
            return
        with torch.cuda.stream(self._stream):
            for to, host in pairs:
                to.copy_(host, non_blocking=True)
            self._arrivals[slot] = self._num_copies, self._stream.record_event()

    def _tell(self, layer: Layer) -> InSlots:
        """The device reads the last layer's tables no more: the host has waited for its routing
        since."""
        from tidemill.kernels.cuda.moe import InSlots

        num, places, table = layer.spec.num_experts, self.places, self._tables.numpy()
        table[:num] = places.where[layer.first : layer.first + num].clip(0)
        has_biases = any(bias is not None for bias in layer.biases)
        if has_biases:
            experts = places.in_slot - layer.first
            experts[(experts < 0) | (experts >= num)] = 0
            table[-experts.size :] = experts
        num_words = len(table) if has_biases else len(table) - len(places.in_slot)
        there = self._tables[:num_words].to(self._device, non_blocking=True)
        biases = (
            None if bias is None else bias.index_select(0, there[-len(places.in_slot) :])
            for bias in layer.biases
        )
        return InSlots(there, self.stacks.gate_up_E2IH, self.stacks.down_EHI, *biases)


def _num_words(layers: list[Layer], num_slots: int) -> int:
    """Slots of experts, of numbers past them up to a power of two and itself; then experts of
    slots."""
    most = max(layer.spec.num_experts for layer in layers)
    return (1 << (most - 1).bit_length()) + 1 + num_slots
