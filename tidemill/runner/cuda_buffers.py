"""The memory that graphs of steps read and write: what a step is about, its hidden states, logits
and tokens."""

from __future__ import annotations

import torch

from tidemill.config import EngineConfig
from tidemill.kernels.cuda.records import HEADER
from tidemill.runner.cuda_graphs import Grid
from tidemill.runner.cuda_work import Work, padded
from tidemill.types.model_config import ModelConfig

WRITES_IN_FLIGHT = 2 * 3  # of two steps and the one that is launched, two each


def pinned(num: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num, dtype=dtype, pin_memory=True)


class StepBuffers:
    """`metadata`: what a step is about, in 32-bit words. All graphs read it."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        num_slots: int,
        num_copies: int,
        device: torch.device,
    ) -> None:
        """`num_slots`: for partial results of attention; `num_copies`: of pages of prompts."""
        most, tokens = config.max_draws, config.token_budget
        self.padding_row = config.max_requests  # its page table stays empty: the null page
        self.hidden = torch.empty(tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self.logits = torch.empty(most, shape.vocab_size, device=device)  # of the last step
        self.numbers = torch.arange(most, dtype=torch.int32, device=device)
        num_words = 16 * (num_slots + tokens + 2 * most + num_copies + 1024)  # more than a step's
        self.metadata = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._turn = 0
        self._staging = [pinned(num_words, torch.int32) for _ in range(WRITES_IN_FLIGHT)]
        self._tokens = [pinned(most, torch.int32) for _ in range(WRITES_IN_FLIGHT)]

    def tokens_of(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of a step's tokens."""
        second = HEADER + padded(size)
        return self.metadata[HEADER : HEADER + size], self.metadata[second : second + size]

    def lists_of(self, size: int) -> torch.Tensor:
        """The work lists behind so many tokens."""
        return self.metadata[HEADER + 2 * padded(size) :]

    def write(self, work: Work, size: int, grid: Grid) -> tuple[int, int]:
        """The step's metadata. Returns where in it the tokens stand that yield logits."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]  # of a step that is collected by now
        begin = work.write(staging.numpy(), size, self.padding_row, grid)
        end = begin + work.last.size
        self.metadata[:end].copy_(staging[:end], non_blocking=True)
        return begin, end

    @property
    def turn(self) -> int:
        """Number of the staging memory that was written last."""
        return self._turn

    def tokens_to_host(self, tokens: torch.Tensor, num: int) -> torch.Tensor:
        """A copy under way on the current stream, valid until the step after the next."""
        target = self._tokens[self._turn][:num]
        return target.copy_(tokens[:num], non_blocking=True)
