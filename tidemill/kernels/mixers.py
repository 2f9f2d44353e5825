"""A model's attention and states behind one plan: what the layers of a step are given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.attention import TorchAttention, TorchStep
from tidemill.kernels.kv_cache import HeadWeights, PagedKV
from tidemill.kernels.native import structs
from tidemill.kernels.native.program import Program
from tidemill.kernels.native_attention import NativeAttention, NativeStep
from tidemill.kernels.native_state import NativeStates, NativeStateStep
from tidemill.kernels.policies import Round
from tidemill.kernels.policy_attention import PolicyStep, plan_policies
from tidemill.kernels.state import (
    PagedStates,
    ScanInputs,
    StateWeights,
    TorchStates,
    TorchStateStep,
)
from tidemill.kernels.trees import Paths
from tidemill.types.model_config import LayerSpec

Attention: TypeAlias = NativeAttention | TorchAttention
AttentionStep: TypeAlias = NativeStep | TorchStep | PolicyStep


def _choose_attention(kv: PagedKV) -> tuple[Attention, str]:
    """The backend, and why it is not the compiled kernel, if it is not."""
    if NativeAttention.can_run(kv):
        return NativeAttention(kv), ""
    why = NativeAttention.uncovered(kv)
    return TorchAttention(kv), "; ".join(
        filter(None, (why, "torch computes it, several times slower"))
    )


class Mixers:
    def __init__(
        self, layers: tuple[LayerSpec, ...], kv: PagedKV | None, states: PagedStates | None
    ) -> None:
        """`kv`: of the attention layers alone; `states`: of all layers. None: there are none."""
        self.kv, self.paged = kv, states
        # among attention layers
        self._numbers = np.cumsum([spec.reads_tokens for spec in layers]) - 1
        self.attention: Attention | None = None
        self.states: NativeStates | TorchStates | None = None
        self.why_not = ""  # attention by the compiled kernel, and what computes it instead
        if kv is not None:
            self.attention, self.why_not = _choose_attention(kv)
        if states is not None:
            self.states = (
                NativeStates(states) if NativeStates.can_run(states) else TorchStates(states)
            )

    @property
    def tables(self) -> list[tuple[torch.Tensor, int]]:
        """The page tables of all groups, keys and values first, and the tokens of a page of each."""
        kv = [] if self.kv is None else [(table, self.kv.page_size) for table in self.kv.tables]
        return (
            kv
            if self.paged is None
            else [*kv, *((table, self.paged.interval) for table in self.paged.tables)]
        )

    @property
    def takes_trees(self) -> bool:
        """Drafts may be a tree."""
        return self.states is None and self.attention is not None

    @property
    def are_native(self) -> bool:
        """All of them: then a forward pass can be recorded."""
        return isinstance(self.attention, NativeAttention | None) and isinstance(
            self.states, NativeStates | None
        )

    def plan(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
        paths: Paths | None = None,
        rounds: Sequence[Round] = (),
    ) -> MixedStep:
        """`paths`: of drafts that are a tree, each of which is an entry of its own. `rounds`: if
        rows have KV policies."""
        attention: AttentionStep | None = None
        if isinstance(self.attention, NativeAttention) and rounds:
            attention = self.attention.plan_policies(rounds, positions_T, slots_GT, paths)
        elif self.kv is not None and rounds:
            attention = plan_policies(self.kv, rounds, positions_T, slots_GT, paths)
        elif self.attention is not None:
            attention = self.attention.plan(rows, starts, counts, positions_T, slots_GT, paths)
        states = None if self.states is None else self.states.plan(rows, starts, counts)
        return MixedStep(self._numbers, attention, states, self._address(attention, states))

    def _address(
        self, attention: AttentionStep | None, states: NativeStateStep | TorchStateStep | None
    ) -> Any:
        """The tm_step of a replay."""
        if not isinstance(states, NativeStateStep):
            return None
        step = attention.alive[0] if isinstance(attention, NativeStep) else structs.Step()
        step.states = states.address
        return step


@dataclass(slots=True)
class MixedStep:
    numbers: np.ndarray
    attention: AttentionStep | None
    states: NativeStateStep | TorchStateStep | None
    made: Any  # the tm_step, if there are states

    def attend(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        assert self.attention is not None
        return self.attention.attend(int(self.numbers[layer]), qkv_TC, learned)

    def enter(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> None:
        assert isinstance(self.attention, NativeStep)
        self.attention.enter(int(self.numbers[layer]), qkv_TC, learned)

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
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
