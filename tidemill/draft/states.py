"""The target's hidden states of a text, computed once and kept in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tidemill.draft.text import Sequence
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.graphs import prefill_step

Tick = Callable[[int], None]  # tokens done


@torch.inference_mode()
def hidden_states(runner: CpuRunner, ids: list[int], num_layers: int) -> torch.Tensor:
    """Of a sequence's tokens, after the last norm, [T, H]; of the model's first layers alone, if those are fewer than it has. The
    runner's cache is overwritten."""
    ids_T = torch.tensor(ids)
    for table, size in runner.mixers.tables:
        assert len(ids) <= table.shape[1] * size
    runner.cache[: 1 + sum(-(-len(ids) // size) for _, size in runner.mixers.tables)] = 0
    step = prefill_step(runner.mixers, len(ids))
    embedded_TH = runner.model.embed_at(ids_T, torch.arange(len(ids)), None)
    with runner.model.only_layers(range(num_layers)):
        return runner.model(embedded_TH, step).clone()


@dataclass(slots=True)
class StatesFile:
    """States of all sequences, one after the other, as float16. What a process that ended left unfinished is computed again."""

    path: Path
    hidden_size: int
    num_layers: int  # of which they are the states

    def fill(self, runner: CpuRunner, sequences: list[Sequence], tick: Tick) -> np.ndarray:
        """[tokens of all sequences, H]"""
        ends = np.cumsum([len(one.ids) for one in sequences])
        row_bytes = self.hidden_size * 2
        num_rows = self.path.stat().st_size // row_bytes if self.path.exists() else 0
        first = int(np.searchsorted(ends, num_rows, side="right"))
        begin = int(ends[first - 1]) if first else 0
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(begin * row_bytes)
            file.seek(begin * row_bytes)
            for one, end in zip(sequences[first:], ends[first:], strict=True):
                file.write(hidden_states(runner, one.ids, self.num_layers).half().numpy().tobytes())
                tick(int(end))
        return np.memmap(self.path, np.float16, "r", shape=(int(ends[-1]), self.hidden_size))
