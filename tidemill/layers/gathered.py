"""Layers whose weights are divided among ranks and gathered before they compute: a rank holds its
rows of every matrix, and memory for two whole layers, one of which is computed with while the next
is put together. Tables are cut by rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from tidemill.distributed.group import group_of
from tidemill.distributed.shard import Shard
from tidemill.errors import ConfigError
from tidemill.kernels.memory import memory
from tidemill.kernels.moe import NativeExperts
from tidemill.layers.linear import Linear
from tidemill.layers.moe import Experts, Router
from tidemill.layers.row_split import RowSplit, RowStep, can_split
from tidemill.layers.streamed import Stream, Streaming, resident_bytes, slots_in_turn
from tidemill.quant.gathered import (
    LANES,
    Gathered,
    GatheredExperts,
    SharedWeights,
    own_rows,
    places_of,
)
from tidemill.types.model_config import ModelConfig

_SLOTS = 2
_PIECE = 2**20


class GatheredStreaming(Streaming):
    def __init__(self, shard: Shard, path: str) -> None:
        """`path`: of a file in shared memory; empty: ranks are on several hosts, and send each
        other their rows."""
        super().__init__(0)
        self._shard, self._group, self._store = shard, group_of(shard), SharedWeights(shard, path)
        self._experts: Stream | None = None
        self._fetch: _Fetch | None = None
        self._kept: list[Any] = []

    def attach(self, blocks: nn.ModuleList) -> None:
        for path, module in blocks.named_modules():
            if isinstance(module, Experts):
                self._attach_experts(path, module)
            elif (
                isinstance(module, Linear)
                and not isinstance(module, Router)
                and _can_be_cut(module)
            ):
                nums = list(module.outs.values())
                module.method = Gathered(module.method, self._store, path, module.num_in, nums)
                module.read_only(
                    {name: own_rows(num, self._shard) for name, num in module.outs.items()}
                )

    def _attach_experts(self, path: str, module: Experts) -> None:
        own = self._shard.range(module.num_experts)
        if not self._store.is_shared or module.spec.has_bias or not own:
            why = (
                "there are fewer experts than ranks"
                if not own
                else "they have biases"
                if module.spec.has_bias
                else ""
            )
            raise ConfigError(
                f"Experts cannot be gathered: {why or 'ranks are on several hosts'}.",
                fix="Use --tensor-layout 1d.",
                param="tensor_layout",
            )
        module.method = GatheredExperts(module.method, self._store, path, own)
        module.read_only(own)

    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        whole = model.whole
        assert isinstance(whole, ModelConfig)
        self._store.finish(self._group)
        self.fixed_bytes = resident_bytes(model)
        self._gather_layers(blocks)
        self._gather_experts(blocks)
        slots = sum(
            one.num_bytes for one in (self.stream, self._experts, self._fetch) if one is not None
        )
        self.held_bytes = self.fixed_bytes + self._store.held_bytes + slots
        self.streamed_bytes = sum(
            sum(one.num_bytes) for rank in self._store.of_ranks for one in rank.values()
        )
        if can_split(whole):
            split = RowSplit(whole, self._group)
            model.register_forward_pre_hook(
                lambda _, given: (split.own(given[0]), RowStep(split, given[1], given[0].shape[0]))
            )
            model.register_forward_hook(
                lambda _, given, made: split.gather(made, given[1].num_rows)
            )

    def _gather_layers(self, blocks: nn.ModuleList) -> None:
        units, layers = (
            list[np.ndarray](),
            list[tuple[nn.Module, list[tuple[Gathered, list[int]]]]](),
        )
        for block in blocks:
            unit, placed, end = list[np.ndarray](), list[tuple[Gathered, list[int]]](), 0
            for module in block.modules():
                if isinstance(module, Linear) and isinstance(module.method, Gathered):
                    pieces, starts, num_bytes = module.method.pieces(self._shard.size)
                    unit.append(pieces + np.array([0, 0, end]))
                    placed.append((module.method, [end + start for start in starts]))
                    end += num_bytes
            units.append(np.concatenate(unit) if unit else np.zeros((0, 3), np.int64))
            layers.append((block, placed))
        if not any(map(len, units)):
            return
        slots = slots_in_turn(len(units), min(_SLOTS, len(units)))
        if self._store.is_shared:
            parts = [
                np.concatenate([np.zeros((0, 3), np.int64), *map(_in_pieces, unit)])
                for unit in units
            ]
            firsts = np.cumsum([0, *map(len, parts)]).tolist()
            self.stream = Stream(self._store, np.concatenate(parts), firsts, max(slots) + 1, slots)
            base, slot_bytes, wait = self.stream.base, self.stream.slot_bytes, self.stream.wait
        else:
            self._fetch = fetch = _Fetch(self._store, self._shard, self._group, units)
            base, slot_bytes, wait, slots = fetch.base, 0, fetch.wait, [0] * len(units)
        for number, (block, placed) in enumerate(layers):
            for method, starts in placed:
                assert method.matrix is not None
                codes, *scales = (base + slots[number] * slot_bytes + start for start in starts)
                method.matrix.place(codes, scales[0] if scales else None)
            block.register_forward_pre_hook(lambda *_, number=number: wait(number))

    def _gather_experts(self, blocks: nn.ModuleList) -> None:
        """Those that a step's tokens chose, into slots for all of a layer's and as many again."""
        layers = [module for module in blocks.modules() if isinstance(module, Experts)]
        if not layers:
            return
        units, nums = list[np.ndarray](), [layer.num_experts for layer in layers]
        for layer in layers:
            assert isinstance(layer.method, GatheredExperts)
            for number in range(layer.num_experts):
                name = f"{layer.method.name}.{number}"
                stored = next(rank[name] for rank in self._store.of_ranks if name in rank)
                places, _ = places_of(stored)
                found = zip(stored.offsets, stored.num_bytes, places, strict=True)
                units.append(np.concatenate([_in_pieces(np.array(one)) for one in found]))
        firsts = np.cumsum([0, *map(len, units)]).tolist()
        self._experts = Stream(
            self._store, np.concatenate(units), firsts, min(sum(nums), _SLOTS * max(nums))
        )
        first = 0
        for layer in layers:
            assert isinstance(layer.weights, NativeExperts)
            layer.weights.read_from(self._experts.address, first)
            first += layer.num_experts


class _Fetch:
    """The fetches of ranks on several hosts: every rank sends its rows of a layer to all others,
    when they come to it."""

    def __init__(
        self, store: SharedWeights, shard: Shard, group: Any, units: list[np.ndarray]
    ) -> None:
        self._store, self._shard, self._group, self._units = store, shard, group, units
        self._slot = memory(
            max(int((unit[:, 1] + unit[:, 2]).max()) for unit in units if len(unit))
        )
        self._there = -1

    @property
    def base(self) -> int:
        return int(self._slot.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return len(self._slot)

    def wait(self, layer: int) -> None:
        if self._there == layer:
            return
        self._there = layer
        unit = self._units[layer]
        rank_of = self._store.rank_of(unit[:, 0])
        own = b"".join(
            self._store.read(int(offset), int(num))
            for offset, num, _ in unit[rank_of == self._shard.rank]
        )
        for rank in range(self._shard.size):
            came, first = np.frombuffer(self._group.broadcast_bytes(own, rank), np.uint8), 0
            for _, num, place in unit[rank_of == rank]:
                self._slot[place : place + num] = came[first : first + num]
                first += num


def _in_pieces(piece: np.ndarray) -> np.ndarray:
    """In parts that several threads read."""
    offset, num, place = piece.tolist()
    return np.array(
        [
            (offset + start, min(_PIECE, num - start), place + start)
            for start in range(0, num, _PIECE)
        ],
        np.int64,
    )


def _can_be_cut(linear: Linear) -> bool:
    """Tells if eight rows that kernels keep together are of one stored matrix."""
    *others, _ = linear.outs.values()
    return all(num % LANES == 0 for num in others)
