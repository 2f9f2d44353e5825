"""CudaRunner: executes StepPlans on a GPU, one step ahead of the host. Its slots are put together
in make_cuda.py.

A launch stages what changed, copies it over in one go and starts the step; nothing waits for the
device. The next input token is read from the row on the device, never from the host. What a step is
about goes into one buffer that all graphs read; which graph computes it is up to its kind
(cuda_kinds.py). Tokens come back on a stream of their own.

At start every kernel is compiled (in parallel), loaded and run before the graphs are captured;
afterwards nothing is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.attention_lists import SPLIT
from tidemill.kernels.cuda.compile_server import compile_elsewhere
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.policies import Policies
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.runner.base import StepResult, read_draws
from tidemill.runner.cuda_first_layers import CudaFirstLayers
from tidemill.runner.cuda_kinds import FlashPrompts, NoFlash
from tidemill.runner.cuda_microbatches import Microbatches, NoMicrobatches
from tidemill.runner.cuda_sampling import CudaSampling
from tidemill.runner.cuda_slots import Captured, CudaBatch, CudaSlots, Launched, StepKind
from tidemill.runner.cuda_stage import OnlyStage
from tidemill.runner.cuda_trees import NoTrees, TreeSteps
from tidemill.runner.device import CopiedTables, DeviceRunner, Reader
from tidemill.runner.flash_trial import FlashTrial
from tidemill.runner.nano import NanoTrial
from tidemill.runner.paged import PagedLayout
from tidemill.runner.virtual_cuda import VirtualCudaLayout
from tidemill.sched.plan import StepItem, StepPlan


class CudaRunner(DeviceRunner):
    shared_unit = SPLIT  # tokens that attention reads once for all sequences that share them
    kv_layout: PagedLayout | VirtualCudaLayout

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        slots: CudaSlots,
        kv_layout: PagedLayout | VirtualCudaLayout,
        tables: CopiedTables,
        policies: Policies,
        loras: CudaLoras | None,
        stage: OnlyStage,
        sampling: CudaSampling,
        trees: TreeSteps | NoTrees,
        flash: FlashPrompts | NoFlash,
        microbatches: Microbatches | NoMicrobatches,
        kinds: Sequence[StepKind],
        captured: Sequence[Captured],
        warm_ups: Sequence[Callable[[], None]],
        fallback: str,
    ) -> None:
        """`kinds`: the kinds of steps; the first that takes a step computes it. `captured`: what
        has graphs, in the order in which they are captured. `warm_ups`: what else is run before."""
        groups = config.layout.groups
        super().__init__(slots.model, slots.state, kv_layout, groups, tables, policies)
        self.slots, self.loras, self.steps_ahead = slots, loras, stage.steps_ahead
        self.kinds, self.captured, self.microbatches = kinds, captured, microbatches
        self.fallback, self._sampling = fallback, sampling
        self._trees, self._flash = trees, flash
        self._warm_ups, self._copies = warm_ups, torch.cuda.Stream()
        self._no_tokens = torch.zeros(0, dtype=torch.int32)
        with slots.attention.compiling():
            self.compile()
        for each in captured:
            each.capture()
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk it again

    @property
    def graph_sizes(self) -> tuple[list[int], list[int]]:
        """Numbers of tokens that a step is padded to: one in which every sequence decodes, and one
        with prompts."""
        return list(self.slots.decode_sizes), list(self.slots.mixed_sizes)

    @property
    def flash(self) -> FlashTrial:
        """The trial of flash-attn-4."""
        return self._flash.trial

    @property
    def nano(self) -> list[NanoTrial]:
        """The trials of steps in microbatches."""
        return self.microbatches.made

    @property
    def takes_trees(self) -> bool:
        """Drafts may be trees."""
        return self._trees.are_taken

    def first_layers(self, num_layers: int) -> CudaFirstLayers:
        """While no sequence is in the cache."""
        return CudaFirstLayers(self.slots, num_layers)

    def read_states(self, reader: Reader) -> None:
        """From now on `reader` gets each step's hidden states, those of all tokens."""
        assert self.slots.states.gives_all
        self.readers.append(reader)

    def compile(self) -> None:
        """Every kernel that a step may use, in parallel processes. Then the library's matmuls are
        tried, and each kernel runs once, which loads it."""
        model, attention = self.slots.model, self.slots.attention
        nums_rows = {*self.slots.decode_sizes, *self.slots.mixed_sizes}
        steps = [step for each in self.captured for step in each.trials()]
        few_layers = model.one_layer_of_each_kind()
        with compile_elsewhere(), compile_only():
            for step in steps if attention.compiles_alone else ():
                step.run(model=few_layers)
            self._warm_up()
            few_layers.compile(nums_rows)
        model.prepare(nums_rows)
        self._warm_up()
        for step in steps:
            step.run(model=few_layers)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _warm_up(self) -> None:
        for warm_up in self._warm_ups:
            warm_up()

    # ---- a step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.begin(plan)
        batch = CudaBatch(plan, self.state, self.slots.adapters)
        kind = next(kind for kind in self.kinds if kind.takes(batch))
        tokens, logits = kind.run(batch)
        if tokens is not None and logits is not None:
            self._sampling.finish(batch, tokens, logits)
        launched = self._send_back(batch, tokens)
        self._trees.launched(launched)
        self.kv_layout.launched(launched)
        return launched

    def begin(self, plan: StepPlan) -> None:
        self._trees.settle()
        self._sampling.register(plan)
        super().begin(plan)

    @torch.inference_mode()
    def change_pages(self, plan: StepPlan) -> None:
        self._trees.settle()
        super().change_pages(plan)

    def _send_back(self, batch: CudaBatch, tokens: torch.Tensor | None) -> Launched:
        """Begins to copy what the step gives to the host."""
        ready, buffers = torch.cuda.Event(), self.slots.buffers
        items, drawn = list[StepItem](), self._no_tokens
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            if tokens is not None:
                items, num = batch.items, sum([item.num_draws for item in batch.items])
                drawn = buffers.tokens_to_host(tokens, num)
                tokens.record_stream(self._copies)
            reports = [report.to_host() for report in batch.reports]
            ready.record()
        hidden = self.slots.states.of(batch.plan)
        return Launched(batch.plan, items, drawn, reports, ready, hidden)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        launched.ready.synchronize()
        self._trees.collected(launched)
        result = read_draws(launched.items, launched.plan, launched.tokens.tolist())
        for report in launched.reports:
            report.read(result)
        self.give_states(launched.plan, launched.hidden, result)
        return result
