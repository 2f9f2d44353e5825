"""The part of a runner that is the same on every device: rows and pages change as a plan says, and
readers of hidden states get them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from tidemill.kernels.kv_cache import copy_pages
from tidemill.kernels.policies import Policies
from tidemill.models.base import Model
from tidemill.runner.base import StepResult
from tidemill.runner.inputs import InputRows
from tidemill.runner.page_moves import PageMover, changed_pages
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepPlan
from tidemill.types.cache_layout import Group

Reader = Callable[[StepPlan, torch.Tensor, StepResult], None]  # of a step's hidden states, [T, H]


class KVLayout(Protocol):
    """The way that the KV cache lies in memory."""

    @property
    def pool(self) -> torch.Tensor:
        """Page by page."""
        ...

    def expose(self, plan: StepPlan) -> None:
        """Called before pages of the pool are copied, cleared or moved."""
        ...

    def place(self, plan: StepPlan) -> None:
        """Called after that: rows may have other pages than before."""
        ...


class HostTables(Protocol):
    """The page tables of all rows, as the host has them."""

    by_group: list[np.ndarray]

    def update(self, plan: StepPlan) -> None:
        """Applies the plan's changes."""
        ...


class SharedTables:
    """Those of a CPU are the tables that attention reads."""

    def __init__(self, state: RowState) -> None:
        self.by_group: list[np.ndarray] = [table.numpy() for table in state.tables]

    def update(self, plan: StepPlan) -> None:
        return


class CopiedTables:
    """A copy of those that a GPU has."""

    def __init__(self, state: RowState) -> None:
        self._pages = np.zeros(state.pages.shape, np.int32)
        columns = itertools.pairwise(state.columns)
        self.by_group: list[np.ndarray] = [self._pages[:, start:end] for start, end in columns]

    def update(self, plan: StepPlan) -> None:
        if plan.row_copies:
            sources = [copy.source for copy in plan.row_copies]
            self._pages[[copy.target for copy in plan.row_copies]] = self._pages[sources]
        for new in plan.new_rows:
            self._pages[new.row] = 0  # past its end, too
            for table, page_ids in zip(self.by_group, new.page_ids, strict=True):
                table[new.row, : len(page_ids)] = page_ids
        for update in plan.page_updates:
            end = update.first_index + len(update.page_ids)
            self.by_group[update.group][update.row, update.first_index : end] = update.page_ids


def rows_changed(plan: StepPlan) -> set[int]:
    """Rows whose page tables are other than before."""
    new = {row.row for row in plan.new_rows} | {copy.target for copy in plan.row_copies}
    return new | {update.row for update in plan.page_updates}


class DeviceRunner:
    """Rows, pages and KV policies of one device's runner."""

    def __init__(
        self,
        model: Model,
        state: RowState,
        kv_layout: KVLayout,
        groups: Sequence[Group],
        tables: HostTables,
        policies: Policies,
    ) -> None:
        self.model, self.state, self.kv_layout = model, state, kv_layout
        self.mover: PageMover | None = None  # if there are tiers
        self._groups, self._tables, self._policies = groups, tables, policies
        self.readers = list[Reader]()
        # if prompts may have embeddings in the place of tokens
        self.inputs: InputRows | None = None

    @property
    def cache(self) -> torch.Tensor:
        """Page by page."""
        return self.kv_layout.pool

    def begin(self, plan: StepPlan) -> None:
        """Applies the plan's changes of rows and pages before anything is computed."""
        self.state.stage(plan)
        self.state.apply()
        if self.inputs is not None:
            self.inputs.take(plan)
        for row in (
            *plan.left_rows,
            *(copy.target for copy in plan.row_copies),
        ):  # a copy's source has none
            self._policies.take(row, None)
        for new in plan.new_rows:
            self._policies.take(new.row, new.spec.cache)
        self._tables.update(plan)
        self.change_pages(plan)

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        """Applies the page changes of a plan, which may compute nothing."""
        pool = self.kv_layout.pool
        self.kv_layout.expose(plan)
        if self.mover is not None:
            self.mover.store(
                plan.page_moves,
                changed_pages(plan, self._tables.by_group, self._groups, self._policies.rows),
            )
        if plan.page_zeroes:
            pool[upload(np.array(plan.page_zeroes, np.int64), pool.device)] = 0
        if plan.page_copies:
            copy_pages(pool, *upload(np.array(plan.page_copies, np.int64).T.copy(), pool.device))
        if self.mover is not None:
            self.mover.load(plan.page_moves)
        self.kv_layout.place(plan)

    def give_states(self, plan: StepPlan, hidden_TH: torch.Tensor, result: StepResult) -> None:
        """Gives a step's hidden states to their readers."""
        for read in self.readers:
            read(plan, hidden_TH, result)
