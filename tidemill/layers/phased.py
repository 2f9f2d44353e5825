"""Ranks that share layers by heads and columns (1D), and may compute a step of many tokens in
another way: each rank some of its rows, with the parts of the weights that all ranks have, where
those lie in shared memory.

A row then goes through the parts of rank 0, of rank 1 and so on, and what they give is added in the
order of ranks: the sums of the 1D layout, bit for bit. So every step may be computed in the way
that is faster for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from tidemill.distributed.group import group_of
from tidemill.distributed.shard import Shard
from tidemill.errors import ConfigError
from tidemill.kernels.glu import glu
from tidemill.kernels.linear import PlacedMatrix
from tidemill.kernels.norm import add
from tidemill.kernels.parts import side_by_side, take_columns
from tidemill.layers.attention import AttentionStep
from tidemill.layers.linear import Linear
from tidemill.layers.row_split import RowSplit, RowStep
from tidemill.layers.streamed import Streaming, resident_bytes
from tidemill.quant.gathered import SharedWeights, Shown
from tidemill.types.model_config import ModelConfig


class AllRanks:
    """A linear of which ranks have parts, computed with all of them."""

    def __init__(self, matrices: Sequence[PlacedMatrix], act: str, adds_up: bool) -> None:
        """`act`: of a gated linear. `adds_up`: ranks have some of the inputs each; else some of the
        outputs, which lie here one rank's after the other's."""
        self._matrices, self._act, self._adds_up = matrices, act, adds_up

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        if not self._adds_up:
            made = [matrix(x_RK) for matrix in self._matrices]
            return side_by_side([glu(one, self._act) for one in made] if self._act else made)
        sum_RN, first = None, 0
        for matrix in self._matrices:
            part_RN = matrix(take_columns(x_RK, range(first, first + matrix.num_in)))
            first += matrix.num_in
            if sum_RN is None:
                sum_RN = part_RN
            else:
                add(part_RN, sum_RN)
        assert sum_RN is not None
        return sum_RN


class PhasedWeights(Streaming):
    def __init__(self, shard: Shard, path: str) -> None:
        """`path`: of a file in shared memory."""
        super().__init__(0)
        self._group, self._store = group_of(shard), SharedWeights(shard, path)
        weakref.finalize(self, self._store.close)  # where the load fails
        self._linears = list[tuple[Linear, Shown]]()
        self._by_rows = False

    def attach(self, blocks: nn.ModuleList) -> None:
        for path, module in blocks.named_modules():
            if isinstance(module, Linear) and module.is_cut:
                module.method = shown = Shown(module.method, self._store, path)
                self._linears.append((module, shown))
            elif not isinstance(module, Linear) and hasattr(module, "_group"):
                raise ConfigError(
                    f"tensor_layout phased is not for this model: {type(module).__name__} exchanges something of its own.",
                    fix="Use --tensor-layout 1d.",
                    param="tensor_layout",
                )

    def finish(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        whole = model.whole
        assert isinstance(whole, ModelConfig)
        self._store.finish(self._group)
        regions = [self._store.map(rank) for rank in range(self._group.size)]
        self._store.close()  # what is mapped stays
        for linear, shown in self._linears:
            linear.all_ranks = AllRanks(shown.matrices(regions), linear.act, linear.adds_up)
        self._regions = regions  # which matrices are placed in
        self.held_bytes = self.fixed_bytes = resident_bytes(model) + self._store.held_bytes
        split = RowSplit(whole, self._group, by_rank=True)

        def begin(
            _: nn.Module, given: tuple[torch.Tensor, RowStep]
        ) -> tuple[torch.Tensor, RowStep] | None:
            return (
                (split.own(given[0]), RowStep(split, given[1], given[0].shape[0]))
                if self._by_rows
                else None
            )

        def end(
            _: nn.Module, given: tuple[torch.Tensor, RowStep], made: torch.Tensor
        ) -> torch.Tensor | None:
            return split.gather(made, given[1].num_rows) if self._by_rows else None

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end)

    def forward(
        self, model: Callable[[torch.Tensor, AttentionStep], torch.Tensor]
    ) -> Callable[[torch.Tensor, AttentionStep], torch.Tensor]:
        """The model's forward pass by rows, with all ranks' weights."""

        def forward(residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
            with self.by_rows():
                return model(residual_TH, step)

        return forward

    @contextmanager
    def by_rows(self) -> Iterator[None]:
        """Meanwhile a forward pass is computed by rows, with all ranks' weights."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def _set(self, by_rows: bool) -> None:
        self._by_rows = by_rows
        for linear, _ in self._linears:
            linear.by_rows = by_rows
