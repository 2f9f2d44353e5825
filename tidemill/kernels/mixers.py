"""A model's attention and states behind one plan: what the layers of a step are given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.attention import TorchAttention, TorchStep
from tidemill.kernels.kv_cache import HeadWeights, PagedKV
from tidemill.kernels.native.program import Program
from tidemill.kernels.native_attention import NativeAttention, NativeStep
from tidemill.kernels.native_state import NativeStates, NativeStateStep
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights, TorchStates, TorchStateStep
from tidemill.model_config import AttentionSpec, LayerSpec


class Mixers:
    def __init__(self, layers: tuple[LayerSpec, ...], kv: PagedKV | None, states: PagedStates | None) -> None:
        """`kv`: of the attention layers alone; `states`: of all layers. None: there are none."""
        self.kv, self.paged = kv, states
        self._numbers = np.cumsum([isinstance(spec, AttentionSpec) for spec in layers]) - 1  # among attention layers
        self.attention = self.states = None
        if kv is not None:
            self.attention = NativeAttention(kv) if NativeAttention.can_run(kv) else TorchAttention(kv)
        if states is not None:
            self.states = NativeStates(states) if NativeStates.can_run(states) else TorchStates(states)

    @property
    def tables(self) -> list[tuple[torch.Tensor, int]]:
        """The page tables of all groups, keys and values first, and the tokens of a page of each."""
        kv = [] if self.kv is None else [(table, self.kv.page_size) for table in self.kv.tables]
        return kv if self.paged is None else [*kv, *((table, self.paged.interval) for table in self.paged.tables)]

    @property
    def are_native(self) -> bool:
        """All of them: then a forward pass can be recorded."""
        return isinstance(self.attention, NativeAttention | None) and isinstance(self.states, NativeStates | None)

    def plan(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, positions_T: torch.Tensor, slots_GT: torch.Tensor
    ) -> MixedStep:
        attention = None if self.attention is None else self.attention.plan(rows, starts, counts, positions_T, slots_GT)
        states = None if self.states is None else self.states.plan(rows, starts, counts)
        return MixedStep(self._numbers, attention, states, self._address(attention, states))

    def _address(self, attention: NativeStep | TorchStep | None, states: NativeStateStep | TorchStateStep | None) -> Any:
        """The tm_step of a replay."""
        if not isinstance(states, NativeStateStep):
            return None
        step = attention.alive[0] if isinstance(attention, NativeStep) else native.Step()
        step.states = states.address
        return step


@dataclass(slots=True)
class MixedStep:
    numbers: np.ndarray
    attention: NativeStep | TorchStep | None
    states: NativeStateStep | TorchStateStep | None
    made: Any  # the tm_step, if there are states

    def attend(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        assert self.attention is not None
        return self.attention.attend(int(self.numbers[layer]), qkv_TC, learned)

    def convolve(self, layer: int, projected_TC: torch.Tensor, learned: StateWeights) -> torch.Tensor:
        assert self.states is not None
        return self.states.convolve(layer, projected_TC, learned)

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        assert self.states is not None
        return self.states.scan(layer, inputs, learned)

    def replay(self, program: Program, embedded_TH: torch.Tensor) -> torch.Tensor:
        """All layers of a recorded model at once."""
        assert native.lib is not None
        if self.made is not None:
            return native.lib.replay(program, embedded_TH, ctypes.addressof(self.made))
        assert isinstance(self.attention, NativeStep)
        return self.attention.replay(program, embedded_TH)
