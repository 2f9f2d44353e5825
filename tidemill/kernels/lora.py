"""y += scale · up (down x) with the pair of each row's adapter, for any number of adapters in a
step.

An adapter has a slot, a number. The rows of a step that have one are put in order of their slots,
and cut into tiles of one slot each. A row's sums are chains in a fixed order, whatever else is in
its tile: its bits do not depend on the batch.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.linear import KIND_OF, Weight, pack_linear, to_panels
from tidemill.kernels.native import structs
from tidemill.kernels.pending import PendingLora

_ROWS = 4  # of a tile, as in lora.c
_LANES = 8


class Pair(Protocol):
    """A low-rank pair, as `weights.lora.LoraPair` has it."""

    @property
    def down_RK(self) -> torch.Tensor: ...
    @property
    def up_NR(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


def make_tiles(slots_T: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that have an adapter (slot 0 or more), by slot; and tiles of up to `most` of them:
    slot, first, count."""
    order = np.flatnonzero(slots_T >= 0)
    order = order[np.argsort(slots_T[order], kind="stable")]
    slots, firsts, counts = np.unique(slots_T[order], return_index=True, return_counts=True)
    num_tiles = -(-counts // most)
    group = np.repeat(np.arange(slots.size), num_tiles)
    offset = (np.arange(group.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * most
    tiles = np.stack(
        [slots[group], firsts[group] + offset, np.minimum(counts[group] - offset, most)], 1
    )
    return order.astype(np.int64), np.ascontiguousarray(tiles, np.int64)


class LoraStep:
    """The adapter of each row of the step at hand: one object for all linear layers."""

    def __init__(self) -> None:
        self.native = structs.LoraStep()
        self.groups: list[tuple[int, torch.Tensor]] = []
        self.set(np.zeros(0, np.int64))

    def set(self, slots_T: np.ndarray) -> None:
        """`slots_T`: of each token, -1 without an adapter."""
        self._order, self._tiles = make_tiles(slots_T, _ROWS)
        self.native.num_tokens, self.native.num_tiles = self._order.size, self._tiles.shape[0]
        self.native.order, self.native.tiles = self._order.ctypes.data, self._tiles.ctypes.data
        sorted_slots = slots_T[self._order]
        self.groups = [
            (int(slot), torch.from_numpy(self._order[sorted_slots == slot]))
            for slot in np.unique(sorted_slots)
        ]


class LinearLora(ABC):
    """The pairs of one linear layer, by slot. A fused matrix has a pair for each named part."""

    @abstractmethod
    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """Replaces what is in the slot. Parts that are not given have none."""

    @abstractmethod
    def adapted(self, x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The layer's output."""

    def pending(self, x_TK: torch.Tensor, weight: Weight) -> torch.Tensor | PendingLora:
        """The layer's output, to which the next kernel may add what adapters do."""
        return self.adapted(x_TK, weight)


class HostLora(LinearLora):
    @abstractmethod
    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor) -> None:
        """To the outputs of the step's rows, in place."""

    def adapted(self, x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
        y_TN = weight.matmul(x_TK)
        self.add(x_TK, y_TN)
        return weight.activate(y_TN)


class TorchLora(HostLora):
    """The reference."""

    def __init__(self, outs: Mapping[str, int], step: LoraStep) -> None:
        self._step = step
        ends = np.cumsum(list(outs.values())).tolist()
        self._columns = {
            name: slice(end - size, end)
            for (name, size), end in zip(outs.items(), ends, strict=True)
        }
        self._slots: dict[int, dict[str, tuple[Weight, Weight, float]]] = {}

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        self._slots[slot] = {
            name: (pack_linear(pair.down_RK), pack_linear(pair.up_NR), pair.scale)
            for name, pair in pairs.items()
        }

    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor) -> None:
        for slot, rows in self._step.groups:
            for name, (down, up, scale) in self._slots.get(slot, {}).items():
                columns = self._columns[name]
                y_TN[rows, columns] += up(down(x_TK[rows]) * scale)


@dataclass(slots=True)
class _Packed:
    down: torch.Tensor
    up: torch.Tensor


class NativeLora(HostLora):
    """By the compiled kernel (native/lora.c). 16-bit values stay so: widened as they are used, they
    give the bits of float32."""

    def __init__(
        self, num_in: int, outs: Mapping[str, int], step: LoraStep, num_slots: int, max_rank: int
    ) -> None:
        assert native.lib is not None
        self._lib, self._names = native.lib, list(outs)
        sizes = np.array(list(outs.values()), np.int64)
        columns = np.cumsum(sizes) - sizes
        self._pairs = (structs.LoraPair * (num_slots * len(outs)))()
        self._lora = structs.Lora(
            num_in, len(outs), -(-max_rank // _LANES) * _LANES, columns.ctypes.data,
            sizes.ctypes.data,
            ctypes.addressof(self._pairs), ctypes.addressof(step.native),
        )  # fmt: skip
        self._address = ctypes.addressof(self._lora)
        self._alive = (columns, sizes, step)
        self._packed: dict[int, list[_Packed]] = {}

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        packed = []
        for part, name in enumerate(self._names):
            at, pair = self._pairs[slot * len(self._names) + part], pairs.get(name)
            if pair is None:
                at.rank = 0
                continue
            down, up = pair.down_RK, pair.up_NR
            if down.dtype != up.dtype:
                down, up = down.float(), up.float()
            made = _Packed(to_panels(down), to_panels(up))
            packed.append(made)
            at.down, at.up, at.scale = made.down.data_ptr(), made.up.data_ptr(), pair.scale
            at.kind, at.rank = native.KINDS[KIND_OF[down.dtype]], down.shape[0]
        self._packed[slot] = packed

    def add(self, x_TK: torch.Tensor, y_TN: torch.Tensor) -> None:
        self._lib.lora(self._address, x_TK, y_TN)
