"""`--kv-layout virtual` on a GPU: the rows of the KV cache lie in address ranges of their own.

Decode steps are CUDA graphs: addresses stay what they are, and memory is mapped under them between
steps. Steps with prompts run op by op, since the kernel wants to know their number and lengths.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.contiguous import ContiguousStep, Sequences
from tidemill.kernels.cuda.virtual_memory import CudaMemory
from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.virtual import VirtualRows
from tidemill.runner.cuda_attention import StepTokens
from tidemill.runner.cuda_graphs import NO_LISTS, Grid
from tidemill.runner.cuda_work import Work
from tidemill.runner.device import CopiedTables, rows_changed
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepPlan
from tidemill.types.model_config import ModelConfig

if TYPE_CHECKING:
    from tidemill.runner.cuda_slots import CudaBatch, Launched

_NONE = np.zeros((0, 4), np.int32)


class VirtualCudaLayout:
    def __init__(
        self, config: EngineConfig, shape: ModelConfig, state: RowState, tables: CopiedTables
    ) -> None:
        self._table = tables.by_group[0]
        pages_per_row = self._table.shape[1]
        token = (config.layout.layers_per_page, 2, shape.num_kv_heads, 1, shape.head_dim)
        page = (config.page_size, *token)
        num_pages = config.num_pages + 1
        self.memory = CudaMemory(int(np.prod(page)) * torch.bfloat16.itemsize)
        # The null page comes before the first range and stays mapped. Tokens that fill graphs up
        # are in it, as are rows that have no range yet; and torch and Triton ask what the first
        # address of a tensor is.
        most = config.max_requests
        self.rows = VirtualRows(self.memory, most, pages_per_row, num_spare=most, num_before=1)
        self.memory.map(self.rows.base, [0])
        self._page_size, self._exposed = config.page_size, list[int]()
        self.firsts = np.zeros(most + 1, np.int32)  # where each row's tokens begin, in tokens
        self.firsts_gpu = upload(self.firsts.copy(), state.tokens.device)
        num_tokens = self.rows.num_pages * config.page_size
        values = self.memory.view(self.rows.base, (num_tokens, *token), torch.bfloat16)
        self.kv_memory, self.tables = (values, None), state.kv_tables
        # Where pages are mapped while they are copied or cleared.
        self._pool = self.memory.reserve(num_pages)
        self.memory.map(self._pool, [0])
        self.memory.settle()  # nothing may be mapped while a graph is captured
        self.pool = self.memory.view(self._pool, (num_pages, *page), torch.bfloat16)

    def expose(self, plan: StepPlan) -> None:
        """Pages that are copied or cleared have addresses for it until the next step."""
        for address in self._exposed:
            self.memory.unmap(address)
        pages = sorted({page for copy in plan.page_copies for page in copy} | set(plan.page_zeroes))
        self._exposed = [self._pool + page * self.memory.page_bytes for page in pages]
        for address, page in zip(self._exposed, pages, strict=True):
            self.memory.map(address, [page])

    def place(self, plan: StepPlan) -> None:
        copied = {target for _, target in plan.page_copies}  # were written already
        new = {page for update in plan.page_updates for page in update.page_ids if page} - copied
        # What new ones held is not needed, nor where it was.
        self.rows.drop([*plan.empty_pages, *sorted(new)])
        begun = {row.row for row in plan.new_rows} | {copy.target for copy in plan.row_copies}
        for row in begun:
            first = self.rows.address_of(row, 0)
            num_bytes = self.rows.pages_per_row * self.memory.page_bytes
            self.memory.take_back(first, first + num_bytes)
            self.rows.renew(row)
            self.firsts[row] = self.rows.first_page(row) * self._page_size
        for row in rows_changed(plan):
            self.rows.set(row, self._table[row])
        if begun:
            self.firsts_gpu.copy_(upload(self.firsts.copy(), self.firsts_gpu.device))

    def launched(self, launched: Launched) -> None:
        """A step is under way: pages that the next one needs are mapped meanwhile."""
        self.memory.fence = launched.ready
        for item in launched.plan.items:
            index, inside = divmod(item.start + item.count, self._page_size)
            if item.samples and not inside and self.rows.is_free(item.row, index):
                self.memory.map_ahead(self.rows.address_of(item.row, index))


class ContiguousAttention:
    """Attention over rows whose keys and values have no gaps."""

    variants: tuple[bool, ...] = (False,)
    captures_prompts, compiles_alone = False, True
    num_slots, num_copies = 0, 0

    def __init__(self, config: EngineConfig, kv: PagedKV, kv_layout: VirtualCudaLayout) -> None:
        self._kv, self._layout, self._max_context = kv, kv_layout, config.max_context

    def compiling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decode_grid(self, size: int, shares: bool) -> Grid:
        return NO_LISTS

    def mixed_grid(self, size: int, has_decodes: bool, by_flash: bool = False) -> Grid:
        return NO_LISTS

    def work(self, batch: CudaBatch, by_flash: bool = False) -> Work:
        about = [(item.row, item.start, item.count, item.num_draws) for item in batch.items]
        rows, starts, counts, nums_draws = np.array(about, np.int32).T
        ends = np.cumsum(counts, dtype=np.int32)
        begins = np.repeat(starts - (ends - counts), counts)
        positions = begins + np.arange(ends[-1], dtype=np.int32)
        draws = zip(ends.tolist(), nums_draws.tolist(), strict=True)
        last = [np.arange(end - num, end, dtype=np.int32) for end, num in draws]
        lists = _NONE, _NONE, _NONE, _NONE
        return Work(
            np.repeat(rows, counts), positions.astype(np.int32), *lists, np.concatenate(last)
        )

    def work_of(self, tokens: np.ndarray) -> Work:
        raise AssertionError("all tokens go through all layers")

    def step(self, tokens: StepTokens, work: Work | None) -> ContiguousStep:
        firsts = self._layout.firsts_gpu.index_select(0, tokens.rows_T)
        slots_T = firsts + tokens.positions_T
        sequences = None if work is None else self._sequences(work)
        return ContiguousStep(self._kv, tokens.positions_T, slots_T, self._max_context, sequences)

    def _sequences(self, work: Work) -> Sequences:
        """Tokens of a row that follow each other are one."""
        rows, positions = work.rows, work.positions
        follows = np.diff(positions, prepend=-1) == 1
        begins = np.flatnonzero(np.diff(rows, prepend=-1) | ~follows)
        queries = np.append(begins, rows.size).astype(np.int32)
        lens = np.diff(queries)
        keys = self._layout.firsts[rows[begins]]
        words = np.concatenate([queries, keys, keys[-1:], positions[begins] + lens])
        made = upload(words.astype(np.int32), self._layout.firsts_gpu.device)
        num = begins.size
        parts = made[: num + 1], made[num + 1 : 2 * num + 2], made[2 * num + 2 :]
        return Sequences(*parts, int(lens.max()))
