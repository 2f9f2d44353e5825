"""The KV cache with an address range for each row, on a CPU: `--kv-layout virtual`.

To the attention kernels a token is a page, and the page table of a row counts up: what they read is
contiguous. Pages of the plan are pieces of physical memory, mapped into the ranges of the rows that
have them; a page that two rows share is mapped twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.virtual import HostMemory, VirtualRows
from tidemill.runner.batch import Batch
from tidemill.runner.device import rows_changed
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepPlan
from tidemill.types.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RECORDED_VALUES = 16384  # of a recorded forward pass, at most: `runner/graphs.py`


class VirtualLayout:
    def __init__(self, config: EngineConfig, shape: ModelConfig, state: RowState) -> None:
        self._table = table = state.kv_tables[0].numpy()
        token = (config.layout.layers_per_page, 2, shape.num_kv_heads, 1, shape.head_dim)
        dtype, num_pages = _DTYPES[config.kv_dtype], config.num_pages + 1
        page_bytes = config.page_size * int(np.prod(token)) * dtype.itemsize
        self.memory = HostMemory(num_pages, page_bytes)
        self.rows = VirtualRows(self.memory, *table.shape)
        self._page_size = config.page_size
        self._trial_pages = 1 + _RECORDED_VALUES // shape.hidden_size // config.page_size
        num_tokens = table.shape[1] * config.page_size
        numbers = torch.arange(table.shape[0] * num_tokens, dtype=torch.int32)
        self._first = numbers.view(-1, num_tokens)
        self._tokens = self.memory.view(self.rows.address, (self._first.numel(), *token), dtype)
        self.pool = self.memory.pool((num_pages, config.page_size, *token), dtype)
        self.tables, self.kv_memory = [self._first], (self._tokens, None)

    def expose(self, plan: StepPlan) -> None:
        return

    def place(self, plan: StepPlan) -> None:
        for row in rows_changed(plan):
            self.rows.set(row, self._table[row])
        self.rows.drop(plan.empty_pages)

    def slots(self, batch: Batch) -> torch.Tensor:
        """The places that a batch's tokens are written to, [G, T]."""
        first_tokens = batch.last_token + 1 - batch.counts
        begins = batch.starts - first_tokens + batch.rows * self._first.shape[1]
        places = np.repeat(begins, batch.counts)
        return torch.from_numpy(places + np.arange(places.size))[None]

    @contextmanager
    def trial_pages(self) -> Iterator[torch.Tensor]:
        """In the range of the first row, which has no sequence yet."""
        num = min(self.pool.shape[0] - 1, self._table.shape[1], self._trial_pages)
        pages = np.zeros_like(self._table[0])
        pages[:num] = np.arange(1, num + 1)
        self.rows.set(0, pages)
        self._first[0] = 0
        try:
            yield self._tokens[: num * self._page_size]
        finally:
            self.rows.set(0, np.zeros_like(pages))
            self.rows.drop(pages[:num].tolist())
            self._first[0] = torch.arange(self._first.shape[1], dtype=torch.int32)
