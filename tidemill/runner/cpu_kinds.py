"""The kinds of steps on a CPU: which batches each takes, and how it computes their hidden states.
The first that takes one computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tidemill.kernels.lora import LoraStep
from tidemill.kernels.mixers import MixedStep, Mixers
from tidemill.kernels.native.program import Program
from tidemill.runner.batch import Batch, sources
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepPlan

_LEAST_UNREAD = 16  # tokens of a step, below which its last layer computes them with the others

ForwardFn = Callable[
    [torch.Tensor, MixedStep], torch.Tensor
]  # all layers or some, from the tokens' hidden states
EmbedFn = Callable[[Batch], torch.Tensor]  # the hidden states that the first layer starts from


class StepKind(Protocol):
    gives_all: bool  # hidden states of all tokens

    def takes(self, plan: StepPlan, batch: Batch) -> bool:
        """Tells if it computes this batch."""
        ...

    def run(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """The hidden states of the batch's tokens, [T, H]; NaN where nobody reads them."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass: the replay of its recording, or op by op where there is none."""

    forward: ForwardFn
    program: Program | None = None

    def __call__(self, step: MixedStep, x_TH: torch.Tensor) -> torch.Tensor:
        return self.forward(x_TH, step) if self.program is None else step.replay(self.program, x_TH)


@dataclass(frozen=True, slots=True)
class Passes:
    """The same layers without and with adapters."""

    plain: Pass
    adapted: Pass

    def op_by_op(self) -> Passes:
        return Passes(replace(self.plain, program=None), replace(self.adapted, program=None))


class NoAdapters:
    """No token has an adapter."""

    def choose(self, passes: Passes, rows: np.ndarray, counts: np.ndarray | int) -> Pass:
        return passes.plain


class AdapterRows:
    """The adapters of a step's tokens: those of their rows."""

    def __init__(self, state: RowState, step: LoraStep) -> None:
        self._slots, self._step = state.adapters, step

    def choose(self, passes: Passes, rows: np.ndarray, counts: np.ndarray | int) -> Pass:
        """The pass for entries of these rows, so many tokens each. Tells the layers which token has
        which adapter."""
        slots = self._slots[rows]
        if slots.max(initial=-1) < 0:
            return passes.plain
        self._step.set(np.repeat(slots, counts))
        return passes.adapted


class AllLayers:
    """Every token through every layer: any step can be computed so."""

    gives_all = True

    def __init__(
        self, mixers: Mixers, embed: EmbedFn, adapters: AdapterRows | NoAdapters, passes: Passes
    ) -> None:
        self._mixers, self._embed, self._adapters, self.passes = mixers, embed, adapters, passes

    def op_by_op(self, timed: Callable[[EmbedFn], EmbedFn] = lambda embed: embed) -> AllLayers:
        """The same without recordings."""
        return AllLayers(self._mixers, timed(self._embed), self._adapters, self.passes.op_by_op())

    def takes(self, plan: StepPlan, batch: Batch) -> bool:
        return True

    def run(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        return self.forward(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        entries = batch.entries or (batch.rows, batch.starts, batch.counts)
        step = self._mixers.plan(
            *entries, batch.positions_T, batch.slots_GT, batch.paths, batch.rounds
        )
        embedded_TH = self._embed(batch)
        return self._adapters.choose(self.passes, batch.rows, batch.counts)(step, embedded_TH)


class ManyTokens(AllLayers):
    """Steps of many tokens, which ranks compute by rows (tensor layout phased)."""

    def __init__(
        self,
        mixers: Mixers,
        embed: EmbedFn,
        adapters: AdapterRows | NoAdapters,
        by_rows: Pass,
        least: int,
    ) -> None:
        """`least`: tokens from which on that is faster."""
        super().__init__(mixers, embed, adapters, Passes(by_rows, by_rows))
        self._least = least

    def takes(self, plan: StepPlan, batch: Batch) -> bool:
        return batch.ids_T.numel() >= self._least


class LastLayerApart:
    """Steps with prompts. Of most of a prompt's tokens only keys and values are ever read, so the
    last layer computes no more of them; the tokens that yield logits go through it by themselves,
    with the same bits."""

    gives_all = False

    def __init__(
        self,
        mixers: Mixers,
        embed: EmbedFn,
        adapters: AdapterRows | NoAdapters,
        state: RowState,
        write_kv: Passes,
        last_layer: Passes,
    ) -> None:
        """`write_kv`, `last_layer`: the passes of `Model.enter` and `Model.finish`."""
        self._mixers, self._embed, self._adapters, self._state = mixers, embed, adapters, state
        self._write_kv, self._last_layer = write_kv, last_layer

    def takes(self, plan: StepPlan, batch: Batch) -> bool:
        if batch.ids_T.numel() - sum([item.num_draws for item in plan.items]) < _LEAST_UNREAD:
            return False
        return batch.is_plain and not any(map(self._state.asks_prompt, plan.items))

    def run(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        return self.forward(batch, sources(plan.items, batch))

    def forward(self, batch: Batch, read: np.ndarray) -> torch.Tensor:
        """`read`: the tokens whose hidden states are read."""
        step = self._mixers.plan(
            batch.rows, batch.starts, batch.counts, batch.positions_T, batch.slots_GT
        )
        embedded_TH = self._embed(batch)
        entered_TH = self._adapters.choose(self._write_kv, batch.rows, batch.counts)(
            step, embedded_TH
        )
        hidden_TH = torch.full_like(entered_TH, torch.nan)
        if read.size:
            rows = np.repeat(batch.rows, batch.counts)[read]
            positions, slots = batch.positions_T[read], batch.slots_GT[:, read].contiguous()
            step = self._mixers.plan(rows, positions.numpy(), np.ones_like(read), positions, slots)
            hidden_TH[read] = self._adapters.choose(self._last_layer, rows, 1)(
                step, entered_TH[read]
            )
        return hidden_TH
