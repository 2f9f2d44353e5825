"""The target's hidden states of a text, computed once and kept in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tidemill.compress.draft.text import Example
from tidemill.runner.batch import Batch
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.graphs import use_first_pages

Tick = Callable[[int], None]  # tokens done


def batch_of(runner: CpuRunner, ids: list[int], start: int = 0) -> Batch:
    """Tokens from `start` on of a sequence that is alone in row 0."""
    slots_GT, positions = use_first_pages(runner.mixers, len(ids)), torch.arange(start, len(ids))
    counts = np.array([len(ids) - start])
    return Batch(
        np.array([0]),
        np.array([start]),
        counts,
        counts - 1,
        torch.tensor(ids[start:]),
        positions,
        slots_GT[:, start:],
    )


@torch.inference_mode()
def hidden_states(runner: CpuRunner, ids: list[int], num_layers: int) -> torch.Tensor:
    """The hidden states of a sequence's tokens, after the last norm, [T, H]; of the model's first
    layers alone, if those are fewer than it has. The runner's cache is overwritten."""
    runner.cache[: 1 + sum(-(-len(ids) // size) for _, size in runner.mixers.tables)] = 0
    batch = batch_of(runner, ids)
    if num_layers == runner.model.config.num_layers:
        return runner.forward(batch).clone()
    step = runner.mixers.plan(
        batch.rows, batch.starts, batch.counts, batch.positions_T, batch.slots_GT
    )
    first = runner.model.only(range(num_layers))
    return first(first.embed_at(batch.ids_T, batch.positions_T, None), step).clone()


@dataclass(slots=True)
class StatesFile:
    """States of all sequences, one after the other, as float16. What a process that ended left
    unfinished is computed again."""

    path: Path
    hidden_size: int
    num_layers: int  # of which they are the states

    def fill(self, runner: CpuRunner, sequences: list[Example], tick: Tick) -> np.ndarray:
        """[tokens of all sequences, H]"""
        ends = np.cumsum([len(example.ids) for example in sequences])
        row_bytes = self.hidden_size * 2
        num_rows = self.path.stat().st_size // row_bytes if self.path.exists() else 0
        first = int(np.searchsorted(ends, num_rows, side="right"))
        begin = int(ends[first - 1]) if first else 0
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(begin * row_bytes)
            file.seek(begin * row_bytes)
            for example, end in zip(sequences[first:], ends[first:], strict=True):
                file.write(
                    hidden_states(runner, example.ids, self.num_layers).half().numpy().tobytes()
                )
                tick(int(end))
        return np.memmap(self.path, np.float16, "r", shape=(int(ends[-1]), self.hidden_size))
