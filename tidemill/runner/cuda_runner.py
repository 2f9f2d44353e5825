"""CudaRunner: executes StepPlans on a GPU, one step ahead of the host.

A launch stages what changed, copies it over in one go and starts the step; nothing waits for the device. The next input token is
read from the row on the device, never from the host. A step in which every sequence decodes is one replay of a CUDA graph, from
token lookup to the sampled token in its row; a step with prompts replays one up to hidden states, or to the last layer's keys and
values (cuda_last.py). What a step is about goes into one buffer that all graphs read. Tokens come back on a stream of their own.

At start every kernel is compiled (in parallel), loaded and run before the graphs are captured; afterwards nothing is.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda import flash
from tidemill.kernels.cuda.attention_lists import (
    SPLIT,
    Lists,
    by_roles,
    num_prompt_programs,
    prompt_rows,
    shared_rows,
    single_rows,
)
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.lanes import Lanes
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.cuda.look_up import look_up
from tidemill.kernels.cuda.records import HEADER, LIVE
from tidemill.kernels.cuda.sampling import pick_tokens
from tidemill.kernels.cuda.scan import StateLists
from tidemill.kernels.flex_attention import FlexAttention, refused_if_not_compiled
from tidemill.kernels.kv_cache import PagedKV, attention_specs, copy_pages, views
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.models.base import CausalLM
from tidemill.parallel.group import group_of
from tidemill.runner.base import StepResult, accept, broken_rows, draws
from tidemill.runner.cuda_graphs import Graph, Programs, Step, capture, halves, one_of_each_kind, sizes, uncaptured
from tidemill.runner.cuda_last import CudaLastLayer
from tidemill.runner.cuda_policies import CudaPolicies, Launches
from tidemill.runner.cuda_sampler import CudaSampler, score
from tidemill.runner.cuda_step import CudaStep, Launched, Through, find_missing, new_copies, new_pool, new_states, pinned
from tidemill.runner.cuda_work import Work, chains, make_halves, make_work, padded, parts
from tidemill.runner.flash_trial import FROM_TOKENS, Contest, FlashTrial, refused_flash, run_trial
from tidemill.runner.nano import NanoTrial, Rivals, run_trials
from tidemill.runner.page_moves import PageMover, changed_pages
from tidemill.runner.reports import Report, look_at_prompt
from tidemill.runner.state import RowState, upload
from tidemill.sampling import SamplingParams
from tidemill.sched.plan import StepItem, StepPlan

_WRITES_IN_FLIGHT = 2 * 3  # of two steps and the one that is launched, two each
_SHARED_PROGRAMS = 128
_STATES_AT_ONCE = 32  # sequences of a step with prompts


class CudaRunner:
    steps_ahead = 1
    _decodes = True  # there are graphs of steps in which every sequence decodes
    _reads_all = False  # hidden states of all tokens
    shared_unit = SPLIT  # tokens that attention reads once for all sequences that share them

    @torch.inference_mode()
    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        self.model, shape = model, model.config
        self._device = torch.device("cuda")
        self._decode_sizes = sizes(config.max_draws, ((4, 1), (64, 8), (256, 16), (1024, 32)))
        self._mixed_sizes = sizes(config.token_budget, ((64, 16), (256, 32), (1024, 64), (2048, 128), (16384, 256)))
        self._padding_row = config.max_requests  # its page table stays empty: the null page
        self._max_draws, self._max_context = config.max_draws, config.max_context
        longest = max(config.max_context, config.max_stream)
        self.state = RowState(
            config.max_requests + 1, config.max_context, config.page_size, self._device, config.layout.groups, longest
        )
        self._pages = np.zeros(self.state.pages.shape, np.int32)  # the host's copy of the page tables
        self._tables = [self._pages[:, start:end] for start, end in pairwise(self.state.columns)]  # of each group
        self._num_kv_groups, self._groups = config.layout.num_kv_groups, config.layout.groups
        self.mover: PageMover | None = None  # if there are tiers
        self.sampler = CudaSampler(self.state, shape.vocab_size)
        num_rows = config.max_requests + 1
        self._is_plain, self._asks = [True] * num_rows, [False] * num_rows
        self.cache = self._new_cache(config)
        has_attention = [spec.reads_tokens for spec in shape.layers]
        angles = model.angles(config.max_context, self._device, config.max_stream)
        own = [one for one, has in zip(angles, has_attention, strict=True) if has]
        biases = model.distance_biases(config.max_context)
        values, scales = self._kv_memory(config)
        self._kv = PagedKV(values, self.state.kv_tables, attention_specs(shape.layers), own, config.layout.places, biases, scales)
        self._biases = self._kv.by_distance()
        missing = find_missing(shape)
        self._flex = FlexAttention(self._kv) if missing else None
        self.fallback = f"{missing}; torch's FlexAttention computes it, several times slower" if missing else ""
        self._is_streamed = model.streaming is not None and model.streaming.is_in_use
        if self._is_streamed:
            self.fallback = "; ".join(filter(None, (self.fallback, "weights are streamed: steps run without CUDA graphs")))
        self._numbers = (np.cumsum(has_attention) - 1).tolist()  # of each layer, among those with attention
        self._states = new_states(config, shape, self.cache, self.state.tables)
        self._by_roles = by_roles(self._kv.specs, scales is not None) and config.kv_dtype != "int4"
        self._copies_of_pages, self._room = new_copies(config, shape, self._device, self._by_roles)
        self._either = self._kinds_of_attention()
        group = shape.num_heads // max(1, shape.num_kv_heads)
        self._at_once, self._members_per_tile, self._prompt_tile = (
            rows // max(1, group)
            for rows in (single_rows(group, scales is not None), shared_rows(group), prompt_rows(group, self._by_roles))
        )
        num_slots = (config.max_draws + 1) * -(-config.max_context // SPLIT)  # a cut prompt may have two single tokens
        self._partial = torch.empty(num_slots, shape.num_heads, shape.head_dim + 2, device=self._device)
        self._done = torch.zeros(config.token_budget, shape.num_kv_heads, dtype=torch.int32, device=self._device)
        self._policies = self._make_policies(config) if config.kv_policies else None
        self._hidden = torch.empty(config.token_budget, shape.hidden_size, dtype=torch.bfloat16, device=self._device)
        self._logits = torch.empty(config.max_draws, shape.vocab_size, device=self._device)  # of the last step
        self._range = torch.arange(config.max_draws, dtype=torch.int32, device=self._device)
        num_words = 16 * (num_slots + config.token_budget + 2 * config.max_draws + self._room + 1024)  # more than a step's
        self._words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        model.see_live(self._words[LIVE : LIVE + 1])
        self._copies = torch.cuda.Stream()
        self._turn = 0
        self._staging = [pinned(num_words, torch.int32) for _ in range(_WRITES_IN_FLIGHT)]
        self._tokens = [pinned(config.max_draws, torch.int32) for _ in range(_WRITES_IN_FLIGHT)]
        self.loras: CudaLoras | None = None
        if config.max_loras:
            places, most = model.lora_places(), config.token_budget
            self.loras = CudaLoras(places, config.max_loras, config.max_lora_rank, most, self._device)
        self._last: CudaLastLayer | None = None  # if that of large steps is computed by itself
        if model.can_enter and self._flex is None and not self._reads_all:
            self._last = CudaLastLayer(self, self._decode_sizes, self._mixed_sizes)
        self._kinds = [(some, lora) for lora in {False, self.loras is not None} for some in self._either]  # and adapters
        self._prepare(config)
        with refused_if_not_compiled() if self._flex is not None else nullcontext():
            self.compile()
        self._graph_pool = pool = torch.cuda.graph_pool_handle()
        # Else libraries have been tried at every size.
        first = config.fast_math or self._flex is not None
        self._mixed_graphs = {
            (size, some, False, lora): self._capture_mixed(self._mixed_step(size, some, lora=lora), pool, first)
            for size in reversed(self._mixed_sizes)
            for some, lora in self._kinds
        }
        why_not = refused_flash(config, shape)
        self.flash = FlashTrial(False, why_not) if why_not else self._try_flash(pool)
        if self.flash.is_taken:
            for size in self._mixed_sizes[bisect_left(self._mixed_sizes, FROM_TOKENS) :]:
                for has_singles in (False, True):
                    step = self._mixed_step(size, has_singles, by_flash=True)
                    self._mixed_graphs[size, has_singles, True, False] = capture(step, pool, run_first=True)
        self._decode_graphs = {
            (size, some, lora): self._capture(self._decode_step(size, some, lora), pool, first)
            for size in reversed(self._decode_sizes if self._decodes else [])
            for some, lora in self._kinds
        }
        if self._last is not None:
            self._last.capture(pool, first, self.loras is not None)
        self._make_halves(config, pool)
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk it again

    @property
    def graph_sizes(self) -> tuple[list[int], list[int]]:
        """Numbers of tokens that a step is padded to: one in which every sequence decodes, and one with prompts."""
        return list(self._decode_sizes), list(self._mixed_sizes)

    def _make_halves(self, config: EngineConfig, pool: object) -> None:
        """Graphs of steps in two halves, for the sizes at which a trial finds them faster, or for all if that is asked for."""
        self.nano: list[NanoTrial] = []
        self.cuts: dict[tuple[bool, int], int] = {}  # by (decodes, size): how many tokens are in the first half
        self._halved: dict[tuple[bool, int, bool], Graph] = {}
        if config.nano_batching == "off":
            return
        self._second_words = torch.zeros_like(self._words)
        self._second_staging = [pinned(one.numel(), torch.int32) for one in self._staging]
        self._second_stream = torch.cuda.Stream()
        cuts = {(True, size): cut for size, cut in halves(self._decode_sizes).items()}
        cuts |= {(False, size): cut for size, cut in halves(self._mixed_sizes).items()}

        def make(decodes: bool, size: int, kind: bool) -> Graph:
            self._words.zero_()  # a graph is captured with no work to do
            self._second_words.zero_()
            return capture(self._halves_step(decodes, size, kind, cuts[decodes, size]), pool, run_first=True)

        taken = set(cuts)
        if config.nano_batching == "auto":
            whole = {(True, size): self._decode_graphs[size, False, False] for size in self._decode_sizes}
            whole |= {(False, size): self._mixed_graphs[size, True, False, False] for size in self._mixed_sizes}
            rivals = Rivals(
                self.state, self.cache, self._max_context, self.model.config.vocab_size, self._padding_row, whole,
                lambda decodes, size: make(decodes, size, not decodes), self._replay, self._hidden, cuts,
                (self._members_per_tile, self._prompt_tile, self._at_once), group_of(self.model.weight_plan.shard),
            )  # fmt: skip
            self.nano, taken = run_trials(rivals)
        for decodes, size in sorted(taken, reverse=True):
            for kind in self._either:
                self._halved[decodes, size, kind] = make(decodes, size, kind)
            self.cuts[decodes, size] = cuts[decodes, size]

    def _prepare(self, config: EngineConfig) -> None:
        """Before kernels are compiled and graphs are captured."""

    def _more_steps(self) -> list[Step]:
        """That kernels are compiled for."""
        return [] if self._last is None else self._last.steps(self.loras is not None)

    def record(self, step: Step) -> Graph:
        return capture(step, self._graph_pool, run_first=True)

    def _new_cache(self, config: EngineConfig) -> torch.Tensor:
        return new_pool(config, self.model.config, self._device)

    def _kv_memory(self, config: EngineConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The memory that attention reads: keys and values, and their scales, if the format has them."""
        shape = self.model.config
        page = config.layout.layers_per_page, shape.num_kv_heads, config.page_size, shape.head_dim
        return views(self.cache, *page, config.kv_dtype)

    def _kinds_of_attention(self) -> tuple[bool, ...]:
        return (False, True) if self.model.config.token_layers else (False,)

    def _capture_mixed(self, step: Step, pool: object, run_first: bool) -> Graph:
        return self._capture(step, pool, run_first)

    def _capture(self, step: Step, pool: object, run_first: bool) -> Graph:
        """Weights that are copied while layers compute cannot be captured: their steps run once, in part, to load kernels."""
        if not self._is_streamed:
            return capture(step, pool, run_first)
        with self.model.one_layer_of_each_kind():
            return uncaptured(step, step.run())

    def compile(self) -> None:
        """Every kernel that a step may use, in parallel processes. Then the library's matmuls are tried, and each kernel runs
        once, which loads it."""
        nums_rows = {*self._decode_sizes, *self._mixed_sizes}
        steps = [
            make(size, some, lora=lora)
            for make, sizes in ((self._mixed_step, self._mixed_sizes), (self._decode_step, self._decode_sizes))
            for size in one_of_each_kind(sizes)
            for some, lora in self._kinds
        ] + self._more_steps()
        with compile_elsewhere(), compile_only(), self.model.one_layer_of_each_kind():
            for step in steps if self._flex is None else ():  # torch's ops would read what was not computed
                step.run()
            self._warm_up()
            self.model.compile(nums_rows)
        self.model.prepare(nums_rows)
        self._warm_up()
        with self.model.one_layer_of_each_kind():
            for step in steps:
                step.run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _warm_up(self) -> None:
        self.sampler.warm_up(self.model, self._hidden, self._logits)
        if self._policies is not None:
            self._policies.warm_up()

    # ---- a step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self._stage(plan)
        items, reports = plan.items, list[Report]()
        has_lora = self.loras is not None and any(self.state.adapters[item.row] >= 0 for item in items)
        asks_prompt = any(map(self.state.asks_prompt, items))
        decodes = not asks_prompt and all(item.samples and item.count == item.num_draws for item in items)
        if self._policies is not None and not self._policies.rows.rows.isdisjoint(item.row for item in items):
            tokens, logits = self._with_policies(items, has_lora, reports)
            return self._finish(plan, tokens, logits, reports)
        cut = 0 if has_lora or asks_prompt else self._cut_of(items, decodes)
        work, by_flash = self._work(items, may_flash=not has_lora, cut=cut)
        if not decodes:
            tokens, logits = self._mixed(items, work, by_flash, has_lora, reports)
        else:
            tokens, logits = self._decode(work, has_lora)
        return self._finish(plan, tokens, logits, reports)

    def _finish(
        self, plan: StepPlan, tokens: torch.Tensor | None, logits: torch.Tensor | None, reports: list[Report]
    ) -> Launched:
        if tokens is not None and logits is not None:
            self._draw_again(plan, tokens, logits, reports)
        return self._send_back(plan, tokens, reports)

    def _draw_again(self, plan: StepPlan, tokens: torch.Tensor, logits: torch.Tensor, reports: list[Report]) -> None:
        """Samples again for the rows that want more than a temperature, and collects the reports that are asked about any
        token."""
        rows, positions = draws(plan.items, plan.trees)
        again = [i for i, row in enumerate(rows) if not self._is_plain[row]]
        if again:
            if plan.drafts:  # the first draw has written over them
                self.state.stage_drafts(plan, {rows[i] for i in again})
                self.state.apply()
            self.sampler.redraw(again, [rows[i] for i in again], [positions[i] for i in again], logits, tokens)
        asked = [i for i, row in enumerate(rows) if self._asks[row]]
        if asked:
            reports.append(self.sampler.logprobs(asked, [rows[i] for i in asked], logits, tokens))

    def collect(self, launched: Launched) -> StepResult:
        launched.ready.synchronize()
        tokens = [] if launched.tokens is None else launched.tokens.tolist()
        items = launched.plan.items
        result = StepResult(accept(items, launched.plan.drafts, tokens), broken=broken_rows(items, tokens))
        for report in launched.reports:
            report.read(result)
        return result

    def _stage(self, plan: StepPlan) -> None:
        self.state.stage(plan)
        self.state.apply()
        if plan.row_copies:
            self._pages[[copy.target for copy in plan.row_copies]] = self._pages[[copy.source for copy in plan.row_copies]]
        for copy in plan.row_copies:
            self._know(copy.target, copy.spec.params)
        if self._policies is not None:
            self._policies.begin(plan)
        for new in plan.new_rows:
            self._know(new.row, new.spec.params)
            for table, page_ids in zip(self._tables, new.page_ids, strict=True):
                table[new.row, : len(page_ids)] = page_ids
        for update in plan.page_updates:
            end = update.first_index + len(update.page_ids)
            self._tables[update.group][update.row, update.first_index : end] = update.page_ids
        self.change_pages(plan)

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        if self.mover is not None:
            anywhere = set() if self._policies is None else self._policies.rows.rows
            self.mover.store(plan.page_moves, changed_pages(plan, self._tables, self._groups, anywhere))
        if plan.page_zeroes:
            self.cache[upload(np.array(plan.page_zeroes, np.int64), self._device)] = 0
        if plan.page_copies:
            copy_pages(self.cache, *upload(np.array(plan.page_copies, np.int64).T.copy(), self._device))
        if self.mover is not None:
            self.mover.load(plan.page_moves)

    def _know(self, row: int, params: SamplingParams) -> None:
        self._is_plain[row], self._asks[row] = params.is_plain, params.logprobs is not None

    def _cut_of(self, items: list[StepItem], decodes: bool) -> int:
        """The number of tokens in the first half of a step; 0: it is not cut."""
        num, among = sum(item.count for item in items), self._decode_sizes if decodes else self._mixed_sizes
        cut = self.cuts.get((decodes, among[bisect_left(among, num)]), 0)
        return cut if num > cut else 0

    def _work(self, items: list[StepItem], may_flash: bool, cut: int = 0) -> tuple[Work, bool]:
        """The work of a step, and whether its prompts are flash-attn-4's: few of them, and long."""
        table = np.array([part for item in items for part in parts(item)], np.int32)
        counts = table[:, 2]
        by_flash = may_flash and self.flash.is_taken and counts.sum() >= FROM_TOKENS and (counts > 1).sum() <= flash.MOST_PROMPTS
        tile = flash.WHOLE if by_flash else self._prompt_tile
        samples = table[:, 3].astype(bool)
        if cut and not by_flash:
            how = self._tables[: self._num_kv_groups], self._members_per_tile, tile, self._at_once
            return make_halves(table[:, :3], samples, cut, *how), False
        work = self._work_of(table[:, :3], samples, tile)
        if self._states is not None:
            work.chains = chains(table[:, :3])
        return work, by_flash

    def _work_of(self, table: np.ndarray, samples: np.ndarray, tile: int = 0) -> Work:
        how = self._tables[: self._num_kv_groups], self._members_per_tile, tile or self._prompt_tile, self._at_once
        return make_work(table, samples, *how, room=self._room)

    def _send_back(self, plan: StepPlan, tokens: torch.Tensor | None, reports: list[Report]) -> Launched:
        ready, pinned = torch.cuda.Event(), None
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            if tokens is not None:
                num = sum(item.num_draws for item in plan.items)
                pinned = self._tokens[self._turn][:num]
                pinned.copy_(tokens[:num], non_blocking=True)
                tokens.record_stream(self._copies)
            copies = [report.to_host() for report in reports]
            ready.record()
        return Launched(plan, pinned, copies, ready)

    def _replay(self, graph: Graph, work: Work, has_lora: bool = False) -> tuple[int, int]:
        """Returns where in the words the tokens stand that yield logits."""
        if has_lora and self.loras is not None:
            self.loras.write(self.state.adapters[work.rows], graph.size)
        begin, end = self._write(work, graph.size, graph.programs)
        if graph.second is not None and work.second is not None:
            staging = self._second_staging[self._turn]
            num = work.second.write(staging.numpy(), 0, self._padding_row, graph.second)
            self._second_words[:num].copy_(staging[:num], non_blocking=True)
        graph.replay()
        return begin, end

    def _write(self, work: Work, size: int, programs: Programs) -> tuple[int, int]:
        """The step's words. Returns where in them the tokens stand that yield logits."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]  # of a step that is collected by now
        begin = work.write(staging.numpy(), size, self._padding_row, programs)
        end = begin + work.last.size
        self._words[:end].copy_(staging[:end], non_blocking=True)
        return begin, end

    # ---- every request decodes: one replay

    def _decode(self, work: Work, has_lora: bool) -> tuple[torch.Tensor, torch.Tensor]:
        num = work.rows.size
        size = self._decode_sizes[bisect_left(self._decode_sizes, num)]
        graph = self._decode_graphs[size, work.shares, has_lora]
        if work.second is not None:
            graph = self._halved[True, size, work.shares]
        self._replay(graph, work, has_lora)
        return graph.out.clone(), self._logits[:num]  # the next replay writes over the tokens

    def _decode_programs(self, size: int, shares: bool) -> Programs:
        num_singles = _num_singles(size) if self.model.config.token_layers else 0
        return num_singles, _SHARED_PROGRAMS if shares else 0, 0, size if self._states else 0

    def _decode_step(self, size: int, shares: bool, lora: bool = False) -> Step:
        programs = self._decode_programs(size, shares)

        def run() -> torch.Tensor:
            rows, positions = self._tokens_of(size)
            return self._pick(self._forward(rows, positions, programs, lora=lora), self._range[:size], rows, positions)

        return Step(size, programs, run)

    # ---- prompts among them: a replay up to the hidden states

    def _mixed(
        self, items: list[StepItem], work: Work, by_flash: bool, has_lora: bool, reports: list[Report]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        size = self._mixed_sizes[bisect_left(self._mixed_sizes, work.rows.size)]
        graph = self._mixed_graphs[size, work.has_singles, by_flash, has_lora]
        if work.second is not None:
            graph = self._halved[False, size, work.has_singles]
        where = self._replay(graph, work, has_lora)
        if self._last is not None and self._last.is_left_out(size):
            if not any(map(self.state.asks_prompt, items)):
                return self._last(work, where, has_lora)
            self._last.all_rows(size, graph.programs, by_flash, has_lora)
        return self._look_at(items, size, where, reports)

    def _look_at(
        self, items: list[StepItem], size: int, where: tuple[int, int], reports: list[Report]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """At the hidden states of a step: what prompts are asked about, and draws. `where`: as `_write` has it."""
        (begin, end), first = where, 0
        for item in items:
            if self.state.asks_prompt(item):
                hidden = self._hidden[first : first + item.count]
                reports.append(look_at_prompt(self.model, self.state, item, hidden, score, self._logits))
            first += item.count
        if begin == end:
            return None, None
        last = self._words[begin:end]
        return self._pick(self._hidden[last], last, *self._tokens_of(size)), self._logits[: end - begin]

    # ---- KV policies among them: kernel by kernel

    def _make_policies(self, config: EngineConfig) -> CudaPolicies:
        programs = self._mixed_programs(self._mixed_sizes[-1], True)[:3]
        how = Launches(
            self._partial, self._done, self._members_per_tile, self._prompt_tile, self._at_once, self._by_roles, *programs,
            config.max_draws,
        )  # fmt: skip
        return CudaPolicies(self._kv, self._tables[0], how)

    def _with_policies(
        self, items: list[StepItem], has_lora: bool, reports: list[Report]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        assert self._policies is not None
        table = np.array([part for item in items for part in parts(item)], np.int32)
        size = self._mixed_sizes[bisect_left(self._mixed_sizes, int(table[:, 2].sum()))]
        work, step = self._policies.plan(table[:, :3], table[:, 3].astype(bool), size)
        if has_lora and self.loras is not None:
            self.loras.write(self.state.adapters[work.rows], size)
        where = self._write(work, size, (0, 0, 0, 0))
        rows, positions = self._tokens_of(size)
        with self.loras.on() if has_lora and self.loras is not None else nullcontext():
            ids = self.state.tokens[rows.long(), positions.long()]
            self._hidden[:size].copy_(self.model(self.model.embed_tokens(ids, positions), step))
        return self._look_at(items, size, where, reports)

    def _mixed_programs(self, size: int, has_singles: bool, by_flash: bool = False) -> Programs:
        singles = (_num_singles(min(size, self._max_draws)), _SHARED_PROGRAMS) if has_singles else (0, 0)
        shape, num_tiles = self.model.config, -(-size // self._prompt_tile)
        num_prompts = flash.MOST_PROMPTS if by_flash else num_prompt_programs(num_tiles, shape.num_kv_heads, self._by_roles)
        return *singles, num_prompts, min(size, _STATES_AT_ONCE) if self._states else 0

    def _mixed_step(self, size: int, has_singles: bool, by_flash: bool = False, lora: bool = False) -> Step:
        programs = self._mixed_programs(size, has_singles, by_flash)

        def run() -> torch.Tensor:
            made = self._forward(*self._tokens_of(size), programs, by_flash, lora, self._through(size))
            return self._hidden[:size].copy_(made)

        return Step(size, programs, run)

    def _try_flash(self, pool: object) -> FlashTrial:
        size = self._mixed_sizes[-1]
        trial = run_trial(
            Contest(
                self.state, self.cache.shape[0] - 1, self._max_context, self.model.config.vocab_size, size,
                self._mixed_graphs[size, False, False, False], self._prompt_tile,
                lambda: capture(self._mixed_step(size, False, by_flash=True), pool, run_first=True), self._replay, self._hidden,
            )
        )  # fmt: skip
        self._words.zero_()  # a graph is captured with no work to do
        return trial

    # ---- either, in two halves

    def _halves_step(self, decodes: bool, size: int, kind: bool, cut: int) -> Step:
        """`kind`: as graphs of whole steps have it. The words have the tokens of both halves, and lists of the first."""
        programs_of = self._decode_programs if decodes else self._mixed_programs
        programs, second = programs_of(cut, kind), programs_of(size - cut, kind)

        def run() -> torch.Tensor:
            rows, positions = self._tokens_of(size)

            def half(tokens: slice, own: Programs, words: torch.Tensor, first_list: int) -> torch.Tensor:
                lists = Lists(words, words[first_list:], *own[:3], self._partial, self._done[tokens], None, self._by_roles)
                return self._forward_lists(rows[tokens], positions[tokens], lists, self._all if decodes else self._through(size))

            both = Lanes(self._second_stream).run(
                lambda: half(slice(cut), programs, self._words, HEADER + 2 * padded(size)),
                lambda: half(slice(cut, size), second, self._second_words, HEADER),
            )
            if decodes:
                return self._pick(torch.cat(both), self._range[:size], rows, positions)
            return torch.cat(both, out=self._hidden[:size])

        return Step(size, programs, run, second)

    def _forward_lists(self, rows_T: torch.Tensor, positions_T: torch.Tensor, lists: Lists, through: Through) -> torch.Tensor:
        ids, slots = look_up(rows_T, positions_T, self.state.tokens, self.state.kv_tables, self.state.page_size)
        step = CudaStep(self._kv, self._biases, lists, positions_T, slots, self._numbers)
        return through(ids, positions_T, step)

    # ---- common to both

    def _tokens_of(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of the step's tokens."""
        second = HEADER + padded(size)
        return self._words[HEADER : HEADER + size], self._words[second : second + size]

    def _forward(
        self,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        programs: tuple[int, int, int, int],
        by_flash: bool = False,
        lora: bool = False,
        through: Through | None = None,
    ) -> torch.Tensor:
        through = through or self._all
        ids, slots = look_up(rows_T, positions_T, self.state.tokens, self.state.kv_tables, self.state.page_size)
        with self.loras.on() if lora and self.loras is not None else nullcontext():
            if self._flex is not None:
                return through(ids, positions_T, self._flex.step(rows_T, positions_T, slots))
            singles = self._words[HEADER + 2 * padded(rows_T.numel()) :]
            prompts = flash.Prompts.of(self._words, self.state.tables[0]) if by_flash else None
            lists = Lists(self._words, singles, *programs[:3], self._partial, self._done, prompts, self._by_roles)
            lists.alone, lists.copies = rows_T.numel() == 1, self._copies_of_pages
            states = (
                None if self._states is None else self._states.step(StateLists(rows_T, positions_T, self._words, programs[3]))
            )
            step = CudaStep(self._kv, self._biases, lists, positions_T, slots, self._numbers, states)
            return through(ids, positions_T, step)

    def _through(self, size: int) -> Through:
        """The forward function that a graph of so many tokens computes, if prompts are among them."""
        if self._last is None or not self._last.is_left_out(size):
            return self._all
        return lambda ids_T, positions_T, step: self.model.enter(self._embed(ids_T, positions_T), step)

    def _all(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: Any) -> torch.Tensor:
        return cast(torch.Tensor, self.model(self._embed(ids_T, positions_T), step))

    def _embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(ids_T, positions_T)

    def _pick(self, hidden_SH: torch.Tensor, index_S: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits to where they stay until the next step, a token for each into its row."""
        logits = self.model.logits(hidden_SH, self._logits[: hidden_SH.shape[0]])
        return pick_tokens(logits, index_S, rows, positions, self.state.draws, self.state.tokens)


def _num_singles(num_requests: int) -> int:
    """Programs for requests with one token each: for all their splits in a usual context, and for long ones of a few."""
    return max(2 * num_requests, min(64 * num_requests, 512))
