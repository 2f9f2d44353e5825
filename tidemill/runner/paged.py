"""The KV cache in pages that lie anywhere in one pool: `--kv-layout paged`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.config.cache import bytes_of_page
from tidemill.kernels.kv_cache import new_cache, views
from tidemill.runner.batch import Batch
from tidemill.runner.state import RowState
from tidemill.sched.plan import StepPlan
from tidemill.types.model_config import ModelConfig


def new_pool(config: EngineConfig, shape: ModelConfig) -> torch.Tensor:
    """Pages of keys and values, or of states where a model has no others; and the null page. Mapped
    as they are used."""
    layout, num = config.layout, config.num_pages + 1
    if not shape.token_layers or not shape.has_equal_parts:
        page_bytes = bytes_of_page(shape, config.kv_dtype, config.page_size, layout)
        return torch.from_numpy(np.zeros((num, page_bytes), np.uint8))
    page = layout.layers_per_page, shape.num_kv_heads, config.page_size, shape.head_dim
    return new_cache(num, *page, config.kv_dtype)


class PagedLayout:
    def __init__(
        self, pool: torch.Tensor, config: EngineConfig, shape: ModelConfig, state: RowState
    ) -> None:
        self.pool, self.tables = pool, state.kv_tables
        page = config.layout.layers_per_page, shape.num_kv_heads, config.page_size, shape.head_dim
        self._page, self._kv_dtype = page, config.kv_dtype

    @property
    def kv_memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and values as attention reads them, and scales where the format has them."""
        return views(self.pool, *self._page, self._kv_dtype)

    def expose(self, plan: StepPlan) -> None:
        return

    def place(self, plan: StepPlan) -> None:
        return

    def launched(self, launched: object) -> None:
        return

    def slots(self, batch: Batch) -> torch.Tensor:
        """The places that a batch's tokens are written to, [G, T]."""
        return batch.slots_GT

    @contextmanager
    def trial_pages(self) -> Iterator[torch.Tensor]:
        """Pages to compute trial steps in, while there is no sequence."""
        yield self.pool
