"""The last layer of a step with prompts, on a GPU: of most of a prompt's tokens only keys and values are ever read.

A graph of many tokens ends with the last layer's keys and values. The tokens that yield logits then go through that layer as
those of a decode step do, in a graph of their own, up to the drawn tokens. Their bits are the same: no kernel's depend on the
batch. Their keys and values are written a second time.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tidemill.runner.cuda_graphs import Graph, Step, one_of_each_kind
from tidemill.runner.cuda_work import Work

if TYPE_CHECKING:
    from tidemill.runner.cuda_runner import CudaRunner

FROM_TOKENS = 512  # of a graph: below, a layer takes as long as reading its weights, and they would be read twice


class CudaLastLayer:
    def __init__(self, runner: CudaRunner, decode_sizes: list[int], mixed_sizes: list[int]) -> None:
        self._runner, self._wide = runner, [size for size in mixed_sizes if size >= FROM_TOKENS]
        self._sizes = decode_sizes if self._wide else []
        hidden = runner._hidden
        self._given = hidden.new_zeros(decode_sizes[-1], hidden.shape[1])  # what the layer starts from, of rows that are read
        self.graphs: dict[tuple[int, bool], Graph] = {}  # by size, and whether adapters are on

    def is_left_out(self, size: int) -> bool:
        """Tells if graphs of so many tokens leave out the last layer of tokens that yield no logits."""
        return size in self._wide

    def steps(self, has_loras: bool) -> list[Step]:
        """That use every kernel."""
        kinds = ((self.step, self._sizes), (self._all_rows_step, self._wide))
        return [make(size, lora) for make, sizes in kinds for size in one_of_each_kind(sizes) for lora in {False, has_loras}]

    def capture(self, pool: object, run_first: bool, has_loras: bool) -> None:
        for size in reversed(self._sizes):
            for lora in {False, has_loras}:
                self.graphs[size, lora] = self._runner._capture(self.step(size, lora), pool, run_first)

    def step(self, size: int, lora: bool = False) -> Step:
        runner = self._runner
        programs = (*runner._decode_programs(size, True)[:3], 0)

        def run() -> torch.Tensor:
            rows, positions = runner._tokens_of(size)
            hidden = runner._forward(
                rows, positions, programs, lora=lora, through=lambda ids, at, step: runner.model.finish(self._given[:size], step)
            )
            return runner._pick(hidden, runner._range[:size], rows, positions)

        return Step(size, programs, run)

    def __call__(self, work: Work, where: tuple[int, int], has_lora: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tokens and logits of the rows that are read. `work`: of the whole step; `where`: as `_write` has it."""
        (begin, end), runner = where, self._runner
        num = end - begin
        if not num:
            return None, None
        torch.index_select(runner._hidden, 0, runner._words[begin:end], out=self._given[:num])
        graph = self.graphs[self._sizes[bisect_left(self._sizes, num)], has_lora]
        table = np.stack([work.rows[work.last], work.positions[work.last], np.ones(num, np.int32)], axis=1)
        runner._replay(graph, runner._work_of(table, np.ones(num, bool)), has_lora)
        return graph.out.clone(), runner._logits[:num]  # the next replay writes over the tokens

    def _all_rows_step(self, size: int, lora: bool) -> Step:
        programs = self._runner._mixed_programs(size, True)
        return Step(size, programs, partial(self.all_rows, size, programs, False, lora))

    def all_rows(self, size: int, programs: tuple[int, int, int, int], by_flash: bool, lora: bool) -> torch.Tensor:
        """The hidden states of all tokens, kernel by kernel: somebody reads them."""
        runner = self._runner
        given = runner._hidden[:size]
        made = runner._forward(
            *runner._tokens_of(size), programs, by_flash, lora, through=lambda ids, at, step: runner.model.finish(given, step)
        )
        return given.copy_(made)
