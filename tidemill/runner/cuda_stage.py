"""A stage of a pipeline on a GPU. Hidden states go from one to the next through the host, a step at
a time."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.distributed.channel import Channel
from tidemill.distributed.world import Stage
from tidemill.errors import WorkerLost
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_graphs import GraphKey
from tidemill.runner.cuda_kinds import Mixed
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, Sampled
from tidemill.runner.inputs import InputRows


class OnlyStage:
    """The stage of a model that is in no pipeline: it has all layers."""

    steps_ahead, is_last = 1, True

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        # if prompts may have embeddings in the place of tokens
        self.inputs: InputRows | None = None

    def embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """The hidden states that the first layer here starts from."""
        if self.inputs is None:
            return self._model.embed_tokens(ids_T, positions_T)
        return self.inputs.embed(ids_T, lambda ids: self._model.embed_tokens(ids, positions_T))


class PipelineStage(OnlyStage):
    """One of several. The first knows the next step's tokens when the last has drawn them, so none
    is launched ahead."""

    steps_ahead = 0

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        stage: Stage,
        before: Channel | None,
        after: Channel | None,
    ) -> None:
        """`before`, `after`: to the neighbouring stages."""
        super().__init__(model)
        self.is_last, self._before, self._after = after is None, before, after
        shape = (max(config.token_budget, config.max_draws), model.config.hidden_size)
        # Hidden states of the stage before.
        self._received = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

    def embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        if self._before is None:
            return super().embed(ids_T, positions_T)
        return self._received[: ids_T.numel()].clone()

    def receive(self, num: int) -> None:
        """The hidden states of a step's tokens, if they come from another stage."""
        if self._before is None:
            return
        target = self._received[:num]
        data = np.frombuffer(bytearray(self._before.receive()), np.uint8)
        if data.size != target.nbytes:
            raise WorkerLost(
                "The engine cannot go on: the stages of the pipeline do not compute the same step."
            )
        target.copy_(torch.from_numpy(data).view(target.dtype).view(num, -1))

    def send(self, hidden_TH: torch.Tensor) -> None:
        assert self._after is not None
        self._after.send(hidden_TH.view(torch.uint8).cpu().numpy().tobytes())


class StageSteps:
    """The one kind of step of a stage: its graphs are those of steps with prompts, which end with
    hidden states."""

    def __init__(self, slots: CudaSlots, mixed: Mixed, stage: PipelineStage) -> None:
        self._slots, self._mixed, self._stage = slots, mixed, stage

    def takes(self, batch: CudaBatch) -> bool:
        return True

    def run(self, batch: CudaBatch) -> Sampled:
        self._stage.receive(batch.num_tokens)
        if self._stage.is_last:
            return self._mixed.run(batch)
        work = self._slots.attention.work(batch)
        size = self._mixed.sizes[bisect_left(self._mixed.sizes, batch.num_tokens)]
        self._slots.replay(self._mixed.graphs[GraphKey(size, work.has_singles)], work)
        self._stage.send(self._slots.buffers.hidden[: batch.num_tokens])
        return None, None
