"""VirtualCpuRunner: the rows of the KV cache lie in address ranges of their own (`--kv-layout virtual`).

To the attention kernels a token is a page, and the page table of a row counts up: what they read is contiguous. Pages of the plan
are pieces of physical memory, mapped into the ranges of the rows that have them; a page that two rows share is mapped twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.native.program import Program
from tidemill.kernels.virtual import HostMemory, VirtualRows
from tidemill.runner.batch import Batch
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.graphs import Through, record_forward
from tidemill.sched.plan import StepPlan

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RECORDED_VALUES = 16384  # of a recorded forward pass, at most: `runner/graphs.py`


def rows_changed(plan: StepPlan) -> set[int]:
    """Rows whose page tables are other than before."""
    return {new.row for new in plan.new_rows} | {copy.target for copy in plan.row_copies} | {u.row for u in plan.page_updates}


class VirtualCpuRunner(CpuRunner):
    def _new_cache(self, config: EngineConfig) -> torch.Tensor:
        shape, table = self.model.config, self.state.kv_tables[0]
        self._token = (config.layout.layers_per_page, 2, shape.num_kv_heads, 1, shape.head_dim)
        dtype, num_pages = _DTYPES[config.kv_dtype], config.num_pages + 1
        self.memory = HostMemory(num_pages, config.page_size * int(np.prod(self._token)) * dtype.itemsize)
        self.rows = VirtualRows(self.memory, *table.shape)
        num_tokens = table.shape[1] * config.page_size
        self._first = torch.arange(table.shape[0] * num_tokens, dtype=torch.int32).view(-1, num_tokens)
        self._tokens = self.memory.view(self.rows.address, (self._first.numel(), *self._token), dtype)
        return self.memory.pool((num_pages, config.page_size, *self._token), dtype)

    def _kv_memory(self, config: EngineConfig) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        return self._tokens, [self._first], None

    def _record(self, through: Through | None = None) -> Program | None:
        """In the range of the first row, which has no sequence yet."""
        table = self.state.kv_tables[0].numpy()
        num = min(
            self.cache.shape[0] - 1, table.shape[1], 1 + _RECORDED_VALUES // self.model.config.hidden_size // self.state.page_size
        )
        pages = np.zeros_like(table[0])
        pages[:num] = np.arange(1, num + 1)
        self.rows.set(0, pages)
        self._first[0] = 0
        try:
            return record_forward(self.model, self.mixers, self._tokens[: num * self.state.page_size], through)
        finally:
            self.rows.set(0, np.zeros_like(pages))
            self.rows.drop(pages[:num].tolist())
            self._first[0] = torch.arange(self._first.shape[1], dtype=torch.int32)

    def change_pages(self, plan: StepPlan) -> None:
        super().change_pages(plan)
        self._place(rows_changed(plan))
        self.rows.drop(plan.empty_pages)

    def _place(self, rows: Iterable[int]) -> None:
        table = self.state.kv_tables[0].numpy()
        for row in rows:
            self.rows.set(row, table[row])

    def _gather(self, plan: StepPlan) -> Batch:
        batch = super()._gather(plan)
        first_tokens = batch.last_token + 1 - batch.counts
        places = np.repeat(batch.starts - first_tokens + batch.rows * self._first.shape[1], batch.counts)
        batch.slots_GT = torch.from_numpy(places + np.arange(places.size))[None]
        return batch
