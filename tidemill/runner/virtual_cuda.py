"""VirtualCudaRunner: `--kv-layout virtual` on a GPU. As CudaRunner, with the rows of the KV cache in address ranges of their own.

Decode steps are CUDA graphs: addresses stay what they are, and memory is mapped under them between steps. Steps with prompts run
op by op, since the kernel wants to know their number and lengths.
"""

from __future__ import annotations

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.contiguous import ContiguousStep, Sequences
from tidemill.kernels.cuda.look_up import look_up
from tidemill.kernels.cuda.virtual_memory import CudaMemory
from tidemill.kernels.virtual import VirtualRows
from tidemill.runner.cuda_graphs import Graph, Step, uncaptured
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.runner.cuda_step import Launched, Through
from tidemill.runner.cuda_work import Work
from tidemill.runner.device import rows_changed
from tidemill.runner.state import upload
from tidemill.sched.plan import StepItem, StepPlan

_NONE = np.zeros((0, 4), np.int32)


class VirtualCudaRunner(CudaRunner):
    _reads_all = True

    def _new_cache(self, config: EngineConfig) -> torch.Tensor:
        shape, pages_per_row = self.model.config, self.state.kv_tables[0].shape[1]
        token = (config.layout.layers_per_page, 2, shape.num_kv_heads, 1, shape.head_dim)
        page = (config.page_size, *token)
        num_pages = config.num_pages + 1
        self.memory = self._make_memory(num_pages, int(np.prod(page)) * torch.bfloat16.itemsize)
        # The null page comes before the first range and stays mapped. Tokens that fill graphs up are in it, as are rows that have
        # no range yet; and torch and Triton ask what the first address of a tensor is.
        self.rows = VirtualRows(self.memory, config.max_requests, pages_per_row, num_spare=config.max_requests, num_before=1)
        self.memory.map(self.rows.base, [0])
        self._page_size, self._exposed = config.page_size, list[int]()
        self._firsts = np.zeros(config.max_requests + 1, np.int32)  # where each row's tokens begin, in tokens
        self._firsts_gpu = upload(self._firsts.copy(), self._device)
        self._sequences: Sequences | None = None
        num_tokens = self.rows.num_pages * config.page_size
        self._tokens_of_rows = self.memory.view(self.rows.base, (num_tokens, *token), torch.bfloat16)
        self._pool = self.memory.reserve(num_pages)  # where pages are mapped while they are copied or cleared
        self.memory.map(self._pool, [0])
        self.memory.settle()  # nothing may be mapped while a graph is captured
        return self.memory.view(self._pool, (num_pages, *page), torch.bfloat16)

    def _make_memory(self, num_pages: int, page_bytes: int) -> CudaMemory:
        return CudaMemory(page_bytes)

    def _kv_memory(self, config: EngineConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._tokens_of_rows, None

    def _kinds_of_attention(self) -> tuple[bool, ...]:
        return (False,)

    def _capture_mixed(self, step: Step, pool: object, run_first: bool) -> Graph:
        return uncaptured(step, self._hidden)

    # ---- a step

    def launch(self, plan: StepPlan) -> Launched:
        launched = super().launch(plan)
        self.memory.fence = launched.ready
        for item in plan.items:
            index, inside = divmod(item.start + item.count, self._page_size)
            if item.samples and not inside and self.rows.is_free(item.row, index):
                self.memory.map_ahead(self.rows.address_of(item.row, index))
        return launched

    def _stage(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._tables[0][new.row] = 0  # past its end, too
        super()._stage(plan)
        self._place(plan, {target for _, target in plan.page_copies})

    def change_pages(self, plan: StepPlan) -> None:
        """Pages that are copied or cleared have addresses for it until the next step."""
        for address in self._exposed:
            self.memory.unmap(address)
        pages = sorted({page for copy in plan.page_copies for page in copy} | set(plan.page_zeroes))
        self._exposed = [self._pool + page * self.memory.page_bytes for page in pages]
        for address, page in zip(self._exposed, pages, strict=True):
            self.memory.map(address, [page])
        super().change_pages(plan)

    def _place(self, plan: StepPlan, copied: set[int]) -> None:
        """`copied`: pages that were written already."""
        new = {page for update in plan.page_updates for page in update.page_ids if page} - copied
        self.rows.drop([*plan.empty_pages, *sorted(new)])  # what new ones held is not needed, nor where it was
        begun = {one.row for one in plan.new_rows} | {copy.target for copy in plan.row_copies}
        for row in begun:
            first = self.rows.address_of(row, 0)
            self.memory.take_back(first, first + self.rows.pages_per_row * self.memory.page_bytes)
            self.rows.renew(row)
            self._firsts[row] = self.rows.first_page(row) * self._page_size
        for row in rows_changed(plan):
            self.rows.set(row, self._tables[0][row])
        if begun:
            self._firsts_gpu.copy_(upload(self._firsts.copy(), self._device))

    def _work(self, items: list[StepItem], may_flash: bool, cut: int = 0) -> tuple[Work, bool]:
        rows, starts, counts = np.array([(item.row, item.start, item.count) for item in items], np.int32).T
        ends = np.cumsum(counts, dtype=np.int32)
        positions = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int32)
        last = [np.arange(end - item.num_draws, end, dtype=np.int32) for item, end in zip(items, ends.tolist(), strict=True)]
        prompts = _NONE if all(item.count == item.num_draws for item in items) else np.zeros((1, 4), np.int32)
        return Work(
            np.repeat(rows, counts), positions.astype(np.int32), _NONE, _NONE, _NONE, prompts, np.concatenate(last)
        ), False

    def _replay(self, graph: Graph, work: Work, has_lora: bool = False) -> tuple[int, int]:
        if not isinstance(graph.graph, Step):
            return super()._replay(graph, work, has_lora)
        self._sequences = self._find_sequences(work)
        try:
            return super()._replay(graph, work, has_lora)
        finally:
            self._sequences = None

    def _find_sequences(self, work: Work) -> Sequences:
        """Tokens of a row that follow each other are one."""
        rows, positions = work.rows, work.positions
        begins = np.flatnonzero(np.diff(rows, prepend=-1) | (np.diff(positions, prepend=-1) != 1))
        queries = np.append(begins, rows.size).astype(np.int32)
        lens = np.diff(queries)
        keys = self._firsts[rows[begins]]
        made = upload(np.concatenate([queries, keys, keys[-1:], positions[begins] + lens]).astype(np.int32), self._device)
        num = begins.size
        return Sequences(made[: num + 1], made[num + 1 : 2 * num + 2], made[2 * num + 2 :], int(lens.max()))

    def _forward(
        self,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        programs: tuple[int, int, int, int],
        by_flash: bool = False,
        lora: bool = False,
        through: Through | None = None,
    ) -> torch.Tensor:
        ids, _ = look_up(rows_T, positions_T, self.state.tokens, self.state.kv_tables, self.state.page_size)
        slots_T = self._firsts_gpu.index_select(0, rows_T) + positions_T
        step = ContiguousStep(self._kv, positions_T, slots_T, self._max_context, self._sequences)
        return self.model(self.model.embed_tokens(ids, positions_T), step)
