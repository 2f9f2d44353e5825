"""States by the compiled kernels (native/scan.c), with the interface of kernels/state.py's torch
backend."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.native import structs
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights, cut
from tidemill.types.model_config import STATE_KINDS, StateSpec

_MAX_KERNEL = 16  # as in scan.c


class NativeStates:
    def __init__(self, states: PagedStates) -> None:
        assert native.lib is not None
        self.states, self._lib = states, native.lib
        self._pieces = [np.array(pieces, np.int32) for pieces in states.layout.pieces]
        self._layers = [
            _layer(spec, pieces) if isinstance(spec, StateSpec) else None
            for spec, pieces in zip(states.specs, self._pieces, strict=True)
        ]
        first, *others = (table.data_ptr() // 4 for table in states.tables)
        self._stride = others[0] - first if others else 0
        assert all(other == first + (i + 1) * self._stride for i, other in enumerate(others))
        self._places = [
            None if layer is None else ctypes.addressof(layer) for layer in self._layers
        ]

    @staticmethod
    def can_run(states: PagedStates) -> bool:
        """Vectors of eight: columns of a head, channels, what is normed together, a delta rule's
        keys."""
        specs = [spec for spec in states.specs if isinstance(spec, StateSpec)]
        sizes = [
            size for spec in specs for size in (spec.head_dim, spec.num_channels, spec.norm_size)
        ]
        sizes += [spec.state_size for spec in specs if spec.kind == "delta"]
        return (
            native.lib is not None
            and not any(size % 8 for size in sizes)
            and all(s.kernel <= _MAX_KERNEL for s in specs)
        )

    def plan(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> NativeStateStep:
        states = self.states
        segments = cut(rows, starts, counts, states.interval)
        made = structs.States(
            num_tokens=int(counts.sum()),
            num_chains=rows.size,
            page_bytes=states.layout.page_bytes,
            table_width=states.tables[0].stride(0),
            table_stride=self._stride,
            pool=states.pool.data_ptr(),
            tables=states.tables[0].data_ptr(),
            segments=segments.records.ctypes.data,
            chains=segments.chains.ctypes.data,
        )
        return NativeStateStep(
            self._lib, ctypes.addressof(made), self._places, states.specs, (made, segments)
        )


def _layer(spec: StateSpec, pieces: np.ndarray) -> structs.StateLayer:
    names = (
        "num_heads",
        "head_dim",
        "state_size",
        "num_groups",
        "kernel",
        "norm_size",
        "num_channels",
        "num_projected",
    )
    return structs.StateLayer(
        kind=STATE_KINDS.index(spec.kind),
        pieces=pieces.ctypes.data,
        **{name: getattr(spec, name) for name in names},
    )


@dataclass(slots=True)
class NativeStateStep:
    lib: native.Library
    address: int  # of the tm_states
    layers: list[int | None]  # addresses of their tm_state_layer
    specs: tuple[Any, ...]
    alive: tuple[Any, ...]  # what the tm_states points to

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        return self.lib.conv(
            self.address, self._at(layer), projected_TC, learned, self.specs[layer].num_channels
        )

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        return self.lib.scan(
            self.address, self._at(layer), inputs, learned, self.specs[layer].num_inner
        )

    def _at(self, layer: int) -> int:
        address = self.layers[layer]
        assert address is not None
        return address
