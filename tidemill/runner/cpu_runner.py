"""CpuRunner: begin, gather, forward, sample. Its slots are put together in make_cpu.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.config import EngineConfig
from tidemill.kernels.mixers import Mixers
from tidemill.kernels.policies import Policies
from tidemill.layers.lora import Loras
from tidemill.models.base import Model
from tidemill.runner.base import StepResult, join
from tidemill.runner.batch import Batch, gather_batch
from tidemill.runner.cpu_kinds import AllLayers, StepKind
from tidemill.runner.cpu_sampling import CpuSampling
from tidemill.runner.cpu_stage import OnlyStage, PipelineStage
from tidemill.runner.device import DeviceRunner, Reader, SharedTables
from tidemill.runner.first_layers import FirstLayers
from tidemill.runner.layer_timer import EMBEDDING, HEAD, LayerTimer
from tidemill.runner.paged import PagedLayout
from tidemill.runner.reports import look_at_prompt
from tidemill.runner.sampler import score
from tidemill.runner.state import RowState
from tidemill.runner.virtual import VirtualLayout
from tidemill.sched.plan import StepPlan


class CpuRunner(DeviceRunner):
    steps_ahead = 0  # a step is done when its launch returns
    kv_layout: PagedLayout | VirtualLayout

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        state: RowState,
        kv_layout: PagedLayout | VirtualLayout,
        mixers: Mixers,
        loras: Loras | None,
        stage: OnlyStage | PipelineStage,
        kinds: Sequence[StepKind],
        whole: AllLayers,
        fallback: str,
    ) -> None:
        """`kinds`: the kinds of steps; the first that takes a batch computes it. `whole`: the last
        of them."""
        tables = SharedTables(state)
        super().__init__(model, state, kv_layout, config.layout.groups, tables, Policies(mixers.kv))
        self.mixers, self.loras, self.stage, self.fallback = mixers, loras, stage, fallback
        self.sampling = CpuSampling(
            model, state, mixers, by_rejection=config.acceptance == "rejection"
        )
        self.kinds, self.whole, self._draw = list(kinds), whole, self.sampling.draw

    @property
    def takes_trees(self) -> bool:
        """Drafts may be trees."""
        return self.mixers.takes_trees

    def first_layers(self, num_layers: int) -> FirstLayers:
        """While no sequence is in the cache."""
        return FirstLayers(self.model, self.mixers, self.cache, self.state, num_layers)

    def read_states(self, reader: Reader) -> None:
        """From now on `reader` gets each step's hidden states, those of all tokens."""
        self.readers.append(reader)
        self.kinds = [kind for kind in self.kinds if kind.gives_all]

    def time_layers(self) -> LayerTimer:
        """From now on a forward pass runs op by op, and its layers are timed."""
        timer = LayerTimer(self.model)
        self.whole = self.whole.op_by_op(lambda embed: timer.timed(embed, EMBEDDING))
        self.kinds, self._draw = [self.whole], timer.timed(self._draw, HEAD)
        return timer

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        self.begin(plan)
        return join([self._run(part) for part in self.stage.parts(plan, self.state)])

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def _run(self, plan: StepPlan) -> StepResult:
        batch = gather_batch(plan.items, self.state, plan.trees, self._policies)
        batch.slots_GT = self.kv_layout.slots(batch)
        kind = next(kind for kind in self.kinds if kind.takes(plan, batch))
        hidden_TH = kind.run(plan, batch)
        result = self.stage.results(self._sample, plan, batch, hidden_TH)
        self.give_states(plan, hidden_TH, result)
        return result

    def forward(self, batch: Batch) -> torch.Tensor:
        """The hidden states of all tokens of a batch."""
        return self.whole.forward(batch)

    def _sample(self, plan: StepPlan, batch: Batch, hidden_TH: torch.Tensor) -> StepResult:
        reports = [
            look_at_prompt(
                self.model, self.state, item, hidden_TH[last + 1 - item.count : last + 1], score
            )
            for item, last in zip(plan.items, batch.last_token.tolist(), strict=True)
            if self.state.asks_prompt(item)
        ]
        result = self._draw(plan, batch, hidden_TH)
        for report in reports:
            report.read(result)
        return result
