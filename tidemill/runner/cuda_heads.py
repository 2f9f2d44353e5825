"""HeadsCudaRunner: CudaRunner where trained heads draft. They look at the hidden states of a step's tokens, their drafts may be
trees, and they may run the model's first layers by themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tidemill.capabilities import why_not
from tidemill.config import TREES, EngineConfig
from tidemill.kernels.cuda.attention_lists import Lists
from tidemill.kernels.cuda.look_up import look_up
from tidemill.kernels.cuda.records import HEADER
from tidemill.models.base import CausalLM
from tidemill.runner.base import StepResult, accept, broken_rows, right_drafts
from tidemill.runner.cuda_graphs import Graph, Programs, Step, one_of_each_kind, uncaptured
from tidemill.runner.cuda_runner import CudaRunner
from tidemill.runner.cuda_step import CudaStep, Launched, Through
from tidemill.runner.cuda_trees import CudaTrees, settle
from tidemill.runner.cuda_work import Work, make_work, padded, parts
from tidemill.runner.state import upload
from tidemill.sched.plan import StepItem, StepPlan


class HeadsCudaRunner(CudaRunner):
    """A step with trees is a graph of its own where all requests decode, and runs op by op where prompts are among them."""

    _reads_all = True

    @torch.inference_mode()
    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.observers: list[Callable[[StepPlan, torch.Tensor, StepResult], None]] = []  # get each step's hidden states
        self._unsettled: Launched | None = None  # a step with trees, whose right drafts are not yet where the next one reads them
        self._tree_graphs: dict[int, Graph] = {}
        for size in reversed(self._decode_sizes) if self._trees is not None else ():
            self._tree_graphs[size] = self.record(self._tree_step(True, size))
        torch.cuda.synchronize()

    @property
    def takes_trees(self) -> bool:
        return self._trees is not None

    def read_states(self, reader: Callable[[StepPlan, torch.Tensor, StepResult], None]) -> None:
        """From now on `reader` gets each step's hidden states, those of all tokens."""
        self.observers.append(reader)

    def first_layers(self, num_layers: int) -> CudaFirstLayers:
        """While no sequence is in the cache."""
        return CudaFirstLayers(self, num_layers)

    def _prepare(self, config: EngineConfig) -> None:
        self._trees: CudaTrees | None = None
        self._branches = False  # the step that is run has trees
        self._parents: Mapping[int, Sequence[int]] = {}  # of the step that is launched
        if why_not("draft trees", config.features) is None and not set(TREES).isdisjoint(config.speculate):
            self._trees = CudaTrees(config.token_budget, config.max_drafts, self._device)

    def _more_steps(self) -> list[Step]:
        if self._trees is None:
            return []
        kinds = ((True, self._decode_sizes), (False, self._mixed_sizes))
        return [self._tree_step(decodes, size) for decodes, sizes in kinds for size in one_of_each_kind(sizes)]

    def _tree_step(self, decodes: bool, size: int) -> Step:
        plain = self._decode_step(size, True) if decodes else self._mixed_step(size, True)

        def run() -> torch.Tensor:
            self._branches = True
            try:
                return plain.run()
            finally:
                self._branches = False

        return Step(size, plain.programs, run)

    # ---- a step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self._settle()
        self._parents = plan.trees
        try:
            launched = super().launch(plan)
        finally:
            self._parents = {}
        launched.hidden = self._hidden[: plan.num_tokens].clone()
        self._unsettled = launched if plan.trees else None
        return launched

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        launched.ready.synchronize()
        if launched is self._unsettled:
            self._settle()
        plan, tokens = launched.plan, [] if launched.tokens is None else launched.tokens.tolist()
        paths = right_drafts(plan.items, plan.drafts, plan.trees, tokens) if plan.trees else {}
        result = StepResult(accept(plan.items, plan.drafts, tokens, paths), paths=paths, broken=broken_rows(plan.items, tokens))
        for report in launched.reports:
            report.read(result)
        assert launched.hidden is not None
        for observe in self.observers:
            observe(plan, launched.hidden, result)
        return result

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        self._settle()
        super().change_pages(plan)

    def _settle(self) -> None:
        """A step with trees is waited for before anything else is launched: which drafts are right is not known before."""
        launched, self._unsettled = self._unsettled, None
        if launched is not None and launched.tokens is not None:
            launched.ready.synchronize()
            settle(self._kv, self.state, self._tables[: self._num_kv_groups], launched.plan, launched.tokens.tolist())

    def _work(self, items: list[StepItem], may_flash: bool, cut: int = 0) -> tuple[Work, bool]:
        if not self._parents:
            return super()._work(items, may_flash, cut)
        assert self._trees is not None
        table = np.array([part for item in items for part in parts(item)], np.int32)
        bases = self._trees.write(items, table, self._parents)
        how = self._tables[: self._num_kv_groups], self._members_per_tile, self._prompt_tile, 1, bases
        return make_work(table[:, :3], table[:, 3].astype(bool), *how), False

    def _decode(self, work: Work, has_lora: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._parents:
            return super()._decode(work, has_lora)
        num = work.rows.size
        graph = self._tree_graphs[self._decode_sizes[bisect_left(self._decode_sizes, num)]]
        self._replay(graph, work)
        return graph.out.clone(), self._logits[:num]

    def _replay(self, graph: Graph, work: Work, has_lora: bool = False) -> tuple[int, int]:
        if self._parents and graph is not self._tree_graphs.get(graph.size):
            graph = uncaptured(self._tree_step(False, graph.size), self._hidden)
        return super()._replay(graph, work, has_lora)

    def _forward(
        self,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        programs: Programs,
        by_flash: bool = False,
        lora: bool = False,
        through: Through | None = None,
    ) -> torch.Tensor:
        made = (
            self._forward_trees(rows_T, positions_T, programs)
            if self._branches
            else super()._forward(rows_T, positions_T, programs, by_flash, lora, through)
        )
        return self._hidden[: rows_T.numel()].copy_(made)

    def _forward_trees(self, rows_T: torch.Tensor, positions_T: torch.Tensor, programs: Programs) -> torch.Tensor:
        """Tokens lie at their places in the row, and are at their positions in the sequence."""
        assert self._trees is not None
        places_T = self._trees.places[: rows_T.numel()]
        ids, slots = look_up(rows_T, places_T, self.state.tokens, self.state.kv_tables, self.state.page_size)
        singles = self._words[HEADER + 2 * padded(rows_T.numel()) :]
        lists = Lists(self._words, singles, *programs[:3], self._partial, self._done, None, self._by_roles)
        lists.paths = self._trees.paths
        step = CudaStep(self._kv, self._biases, lists, positions_T, slots, self._numbers)
        return self.model(self.model.embed_tokens(ids, positions_T), step)


class CudaFirstLayers:
    """The model's first layers on a runner's cache and rows (spec/exit.py): a graph for each number of rows."""

    def __init__(self, runner: HeadsCudaRunner, num_layers: int) -> None:
        self._runner, self._num_layers, self._state = runner, num_layers, runner.state
        self._sizes = runner.graph_sizes[0]
        self._staging = torch.empty(runner._staging[0].numel(), dtype=torch.int32, pin_memory=True)
        with torch.inference_mode():
            self._out = torch.zeros_like(runner._hidden[: self._sizes[-1]])
            self._graphs = {size: runner.record(self._step(size)) for size in reversed(self._sizes)}

    def _step(self, size: int) -> Step:
        runner = self._runner
        programs = runner._decode_programs(size, True)

        def run() -> torch.Tensor:
            with runner.model.only_layers(range(self._num_layers)):
                made = CudaRunner._forward(runner, *runner._tokens_of(size), programs)
            return self._out[:size].copy_(made)

        return Step(size, programs, run)

    def has_page(self, position: int, num_computed: int) -> bool:
        """The same as `FirstLayers.has_page`."""
        return position // self._state.page_size == (num_computed - 1) // self._state.page_size

    def __call__(self, rows: list[int], positions: list[int], ids: list[int]) -> torch.Tensor:
        """A token of each row, at its position: states after the last norm, [R, H]. Those of the call before are read by now."""
        runner = self._runner
        self._state.append(*upload(np.array([rows, positions, ids], np.int64), self._state.tokens.device))
        table = np.array([rows, positions, [1] * len(rows)], np.int32).T.copy()
        how = runner._tables[: runner._num_kv_groups], runner._members_per_tile, runner._prompt_tile
        work = make_work(table, np.ones(len(rows), bool), *how)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, len(rows))]]
        end = work.write(self._staging.numpy(), graph.size, runner._padding_row, graph.programs) + work.last.size
        runner._words[:end].copy_(self._staging[:end], non_blocking=True)
        graph.replay()
        return self._out[: len(rows)]
