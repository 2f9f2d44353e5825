"""Models whose weights do not fit in memory: layers are read from disk ahead of their use, experts
as routers choose them.

Tables, norms and biases stay in memory. Of layers without experts, those that fit stay as well,
spread evenly, and the others share slots of memory, three if possible: one is computed with while
the next ones are read. Of a model with experts, everything but the experts stays; those that are
used most often stay in slots.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tidemill.config.sizes import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.linear import PlacedMatrix, Weight
from tidemill.kernels.memory import memory
from tidemill.kernels.moe import ExpertWeights, NativeExperts
from tidemill.kernels.native.streams import StreamFigures, StreamSpec
from tidemill.layers.linear import Linear
from tidemill.layers.mlp import GatedMLP
from tidemill.layers.moe import Experts, MoE
from tidemill.quant.base import Gated
from tidemill.quant.neurons import StreamedNeurons
from tidemill.quant.streamed import Store, Streamed
from tidemill.weights.prepared import Item, PreparedFile, WeightFile

_PIECE = 2**20
_NUM_READERS = 4
_MOST_SLOTS, _FEWEST_SLOTS = 3, 2


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The plan of the layers that are streamed, and the slot of each of them."""

    streamed: tuple[int, ...]
    slots: tuple[int, ...]
    num_slots: int


def evenly(num: int, of: int) -> list[int]:
    """Chooses so many of so many numbers from 0 on, as far from each other as they can be."""
    return [i for i in range(of) if (i + 1) * num // of > i * num // of]


def slots_in_turn(num_layers: int, num_slots: int) -> list[int]:
    """Slots of layers that come in turns, again and again: in runs of all slots, or of all but one,
    so that any `num_slots` - 1 layers that follow each other have different ones."""
    num_short = -num_layers % num_slots
    while num_layers - num_short * (num_slots - 1) < 0:  # of few layers, shorter runs
        num_slots -= 1
        num_short = -num_layers % num_slots
    num_long = (num_layers - num_short * (num_slots - 1)) // num_slots
    return [
        slot for run in [num_slots] * num_long + [num_slots - 1] * num_short for slot in range(run)
    ]


def plan_layers(sizes: Sequence[int], budget: int) -> LayerPlan | None:
    """Plans which layers are streamed: as few as possible. `sizes`: bytes of each layer. None: not
    even all of them streamed would fit."""
    if sum(sizes) <= budget:
        return LayerPlan((), (), 0)
    for num_slots in range(_MOST_SLOTS, _FEWEST_SLOTS - 1, -1):
        for num in range(num_slots + 1, len(sizes) + 1):
            streamed = evenly(num, len(sizes))
            largest, moved = max(sizes[i] for i in streamed), sum(sizes[i] for i in streamed)
            if sum(sizes) - moved + num_slots * largest <= budget:
                return LayerPlan(tuple(streamed), tuple(slots_in_turn(num, num_slots)), num_slots)
    return None


class Stream:
    """Units of a file, each of some items, and slots of memory that they are read into."""

    def __init__(
        self,
        file: WeightFile,
        pieces: np.ndarray,
        firsts: Sequence[int],
        num_slots: int,
        slot_of: Sequence[int] = (),
    ) -> None:
        """`pieces`: [n, 3] of where in the file, how many bytes, where in a slot. `firsts`: of each
        unit, and the number of all. `slot_of`: of each unit; empty: any."""
        assert native.lib is not None
        self._lib, self._file = native.lib, file
        self.slot_bytes = int((pieces[:, 1] + pieces[:, 2]).max())
        self._slots = memory(num_slots * self.slot_bytes)
        self._pieces = np.ascontiguousarray(pieces, np.int64)
        self._firsts, self._slot_of = np.array(firsts, np.int64), np.array(slot_of, np.int64)
        spec = StreamSpec(
            fd=file.fd,
            file_bytes=file.file_bytes,
            changed_ns=file.changed_ns,
            num_units=len(firsts) - 1,
            num_slots=num_slots,
            slot_bytes=self.slot_bytes,
            slots=self.base,
            pieces=self._pieces.ctypes.data,
            first_piece=self._firsts.ctypes.data,
            slot_of=self._slot_of.ctypes.data if len(slot_of) else None,
        )
        self.address = self._lib.open_stream(spec, _NUM_READERS)
        # What the stream reads from and writes to must outlive it.
        self.close = weakref.finalize(
            self,
            _close,
            os.getpid(),
            self._lib,
            self.address,
            file,
            self._slots,
            self._pieces,
            self._firsts,
            self._slot_of,
        )

    @classmethod
    def of_items(
        cls,
        file: PreparedFile,
        units: Sequence[Sequence[Item]],
        num_slots: int,
        slot_of: Sequence[int] = (),
    ) -> Stream:
        """Units of some items each."""
        pieces, firsts = list[tuple[int, int, int]](), [0]
        for unit in units:
            place = 0
            for item in unit:
                for start in range(0, item.num_bytes, _PIECE):
                    pieces.append(
                        (item.offset + start, min(_PIECE, item.num_bytes - start), place + start)
                    )
                place += item.num_bytes
            firsts.append(len(pieces))
        return cls(file, np.array(pieces), firsts, num_slots, slot_of)

    @property
    def base(self) -> int:
        return int(self._slots.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return len(self._slots)

    @property
    def figures(self) -> StreamFigures:
        return self._lib.stream_figures(self.address)

    def wait(self, layer: int) -> None:
        self._lib.stream_layer(self.address, layer)


def _close(
    process: int, lib: native.Library, address: int, file: WeightFile, *kept: object
) -> None:
    if process == os.getpid():  # a forked child has none of the threads that read
        lib.close_stream(address)
        file.close()


def size_of(items: Sequence[Item]) -> int:
    return sum(item.num_bytes for item in items)


class Reads(NamedTuple):
    """The reads of streamed weights, in the form of `events.WeightsStreamed`."""

    num_bytes: int
    waited_s: float
    num_asked: int
    num_read: int
    num_foreseen: int = 0


class Streaming(ABC):
    """The streaming of one model. `attach` before its tensors are read, `finish` when all are."""

    def __init__(self, budget: int) -> None:
        """`budget`: bytes of weights in memory, of all of the model."""
        self.budget = budget
        self.fixed_bytes = 0  # of what always stays
        self.held_bytes = 0  # of weights, in memory
        self.streamed_bytes = 0  # not always in memory
        # None: all is in memory after all, or other streams than those of the C library
        self.stream: Stream | None = None
        self._taken = Reads(0, 0.0, 0, 0)  # figures when they were last asked for

    @property
    def is_in_use(self) -> bool:
        """Layers wait for weights while they compute."""
        return self.streamed_bytes > 0

    def see_live(self, live: torch.Tensor) -> None:
        """On a GPU, before the first step: where it will be said how many of a step's tokens do not
        only fill it up, [1]."""
        return

    @abstractmethod
    def attach(self, blocks: nn.ModuleList) -> None: ...

    @abstractmethod
    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None: ...

    def take_reads(self) -> Reads:
        """Since the last call."""
        now, before = self._figures(), self._taken
        self._taken = now
        return Reads(*(mine - other for mine, other in zip(now, before, strict=True)))  # type: ignore[arg-type]

    def _figures(self) -> Reads:
        """Since the start."""
        if self.stream is None:
            return Reads(0, 0.0, 0, 0)
        now = self.stream.figures
        return Reads(
            now.num_bytes, now.waited_ns / 1e9, now.num_asked, now.num_read, now.num_foreseen
        )

    def plan(self, sizes: Sequence[int]) -> LayerPlan:
        plan = plan_layers(sizes, self.budget - self.fixed_bytes)
        if plan is None:
            raise self.too_small(
                _FEWEST_SLOTS * max(sizes), f"{_FEWEST_SLOTS} layers of {fmt_bytes(max(sizes))}"
            )
        return plan

    def too_small(self, num_bytes: int, what: str) -> ConfigError:
        least = self.fixed_bytes + num_bytes
        return ConfigError(
            f"{fmt_bytes(self.budget)} of memory for weights are too few: {fmt_bytes(self.fixed_bytes)} of tables and norms "
            f"always stay there, and {what} must fit beside them.",
            fix=f"Give at least {-(-least // 2**20)}M with --weight-memory.",
            param="weight_memory_bytes",
        )


class DiskStreaming(Streaming):
    """From a file of prepared weights, on a CPU."""

    def __init__(self, budget: int, store: Store, by_neuron: bool = False) -> None:
        """`by_neuron`: feed-forwards with a ReLU, of which those neurons are read that are not
        zero; all else stays in memory."""
        super().__init__(budget)
        self.store, self._by_neuron = store, by_neuron
        self._neurons: list[tuple[GatedMLP, StreamedNeurons]] = []
        self._kept: list[np.ndarray] = []

    def attach(self, blocks: nn.ModuleList) -> None:
        if self._by_neuron:
            for path, module in blocks.named_modules():
                if isinstance(module, GatedMLP):
                    neurons = StreamedNeurons(
                        module.gate_up.method, module.down.method, self.store, path
                    )
                    module.gate_up.method, module.down.method = neurons.gate_up, neurons.down
                    self._neurons.append((module, neurons))
            return
        has_experts = any(isinstance(module, Experts) for module in blocks.modules())
        for path, module in blocks.named_modules():
            if isinstance(module, Experts if has_experts else Linear):
                module.method = Streamed(module.method, self.store, path)

    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        file = self.store.finish()
        self.fixed_bytes = resident_bytes(model)
        if self._by_neuron:
            self._stream_neurons(file)
        elif any(isinstance(module, Experts) for module in blocks.modules()):
            self._stream_experts(
                file, [module for module in blocks.modules() if isinstance(module, MoE)]
            )
        else:
            self._stream_layers(file, blocks)

    # ---- layers

    def _stream_layers(self, file: PreparedFile, blocks: nn.ModuleList) -> None:
        items = [
            [file.items[_method_of(linear).name] for linear in _streamed_linears(block)]
            for block in blocks
        ]
        sizes = [size_of(one) for one in items]
        plan = self.plan(sizes)
        if plan.streamed:
            units = [items[layer] for layer in plan.streamed]
            file.verify(item for unit in units for item in unit)
            self.stream = Stream.of_items(file, units, plan.num_slots, plan.slots)
            self.streamed_bytes = sum(size_of(unit) for unit in units)
        for layer, block in enumerate(blocks):
            if layer in plan.streamed:
                assert self.stream is not None
                number = plan.streamed.index(layer)
                _place(
                    block,
                    items[layer],
                    self.stream.base + plan.slots[number] * self.stream.slot_bytes,
                )
                block.register_forward_pre_hook(
                    lambda *_, number=number, stream=self.stream: stream.wait(number)
                )
                continue
            kept = memory(sizes[layer])
            first = 0
            for item in items[layer]:
                file.read(item, kept[first : first + item.num_bytes])
                first += item.num_bytes
            self._kept.append(kept)
            _place(block, items[layer], kept.ctypes.data)
        slots = 0 if self.stream is None else self.stream.num_bytes
        self.held_bytes = self.fixed_bytes + slots + sum(map(len, self._kept))

    # ---- experts

    def _stream_experts(self, file: PreparedFile, modules: list[MoE]) -> None:
        layers = [module.experts for module in modules]
        names = [
            [_method_of(layer).expert(number) for number in range(layer.num_experts)]
            for layer in layers
        ]
        items = [file.items[name] for of_layer in names for name in of_layer]
        largest, most = (
            max(item.num_bytes for item in items),
            max(layer.num_experts for layer in layers),
        )
        num_slots = min(len(items), (self.budget - self.fixed_bytes) // largest)
        if num_slots < most:
            raise self.too_small(
                most * largest, f"all {most} experts of a layer, {fmt_bytes(largest)} each"
            )
        file.verify(items)
        self.stream = Stream.of_items(file, [[item] for item in items], num_slots)
        self.streamed_bytes = size_of(items) - min(size_of(items), self.stream.num_bytes)
        first = 0
        for layer in layers:
            assert isinstance(layer.weights, NativeExperts)
            layer.weights.read_from(self.stream.address, first)
            first += layer.num_experts
        for one, following in pairwise(modules):
            assert isinstance(one.experts.weights, NativeExperts)
            assert isinstance(following.experts.weights, NativeExperts)
            one.experts.weights.foresee(following.experts.weights, following.choose)
        self.held_bytes = self.fixed_bytes + self.stream.num_bytes

    # ---- neurons

    def _stream_neurons(self, file: PreparedFile) -> None:
        items = [file.items[neurons.name] for _, neurons in self._neurons]
        layers = [neurons.weights() for _, neurons in self._neurons]
        largest, most = (
            max(one.layout.num_bytes for one in layers),
            max(one.layout.num_inner for one in layers),
        )
        nums = [one.layout.num_inner for one in layers]
        num_slots = min(sum(nums), (self.budget - self.fixed_bytes) // largest)
        if num_slots < most:
            raise self.too_small(
                most * largest, f"all {most} neurons of a layer, {fmt_bytes(largest)} each"
            )
        file.verify(items)
        pieces = [
            np.stack(
                [item.offset + np.arange(num) * size, np.full(num, size), np.zeros(num, np.int64)],
                axis=1,
            )
            for item, num, size in (
                (item, one.layout.num_inner, one.layout.num_bytes)
                for item, one in zip(items, layers, strict=True)
            )
        ]
        self.stream = Stream(file, np.concatenate(pieces), range(sum(nums) + 1), num_slots)
        first = 0
        for (module, _), weights in zip(self._neurons, layers, strict=True):
            weights.read_from(self.stream.address, first)
            module.neurons = weights
            first += weights.layout.num_inner
        self.streamed_bytes = size_of(items) - min(size_of(items), self.stream.num_bytes)
        self.held_bytes = self.fixed_bytes + self.stream.num_bytes


def _method_of(layer: Linear | Experts) -> Streamed:
    assert isinstance(layer.method, Streamed)
    return layer.method


def _streamed_linears(block: nn.Module) -> list[Linear]:
    return [
        module
        for module in block.modules()
        if isinstance(module, Linear) and isinstance(module.method, Streamed)
    ]


def _place(block: nn.Module, items: Sequence[Item], address: int) -> None:
    for linear, item in zip(_streamed_linears(block), items, strict=True):
        matrix = linear.weight.ungated if isinstance(linear.weight, Gated) else linear.weight
        assert isinstance(matrix, PlacedMatrix)
        assert (matrix.num_in, matrix.num_out) == (linear.num_in, sum(linear.outs.values()))
        codes, *scales = (address + start for start in item.starts)
        matrix.place(codes, scales[0] if scales else None)
        address += item.num_bytes


def resident_bytes(model: nn.Module) -> int:
    """The bytes of the weights that stay in memory: tables, norms, and matrices that are not
    streamed."""
    held = [one for one in (*model.parameters(), *model.buffers()) if one.device.type != "meta"]
    for module in model.modules():
        held += tensors_of(
            module.weight
            if isinstance(module, Linear)
            else module.weights
            if isinstance(module, Experts)
            else ()
        )
    return sum(one.nbytes for one in held)


def tensors_of(held: object) -> list[torch.Tensor]:
    """Those of a weight, in whatever they lie."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, Weight | ExpertWeights):
        held = list(vars(held).values())
    elif is_dataclass(held) and not isinstance(held, type):
        held = [getattr(held, one.name) for one in fields(held)]
    return (
        [tensor for part in held for tensor in tensors_of(part)]
        if isinstance(held, list | tuple)
        else []
    )
