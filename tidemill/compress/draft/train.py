"""Training of draft heads: what is learned in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from tidemill.compress.draft.losses import Batch, Drafted, draft_along, loss_of
from tidemill.compress.draft.steps import Schedule, Tick, run_steps
from tidemill.compress.draft.text import Example
from tidemill.runner.spec.heads import DraftHead, Target

_HELD_OUT = 16  # one sequence of so many is not learned from
_BATCH = 4  # sequences
RATES = {"medusa": 1e-3, "eagle": 1e-3, "exit": 2e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that decide the bits of the result, besides model and text."""

    kind: str
    settings: dict[str, int] = field(default_factory=dict)
    num_epochs: int = 4
    num_guesses: int = 2  # trained at a time; Medusa's heads all are
    rate: float = 1e-3
    seed: int = 0
    text: str = ""  # its digest


@dataclass(slots=True)
class Corpus:
    """Sequences with the states of the whole model, and of its first layers where the head starts
    from those."""

    sequences: list[Example]
    states: np.ndarray
    inputs: np.ndarray
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(example.ids) for example in self.sequences]).tolist()

    @property
    def learned(self) -> list[int]:
        return [i for i in range(len(self.sequences)) if i % _HELD_OUT != _HELD_OUT - 1] or [0]

    @property
    def held_out(self) -> list[int]:
        return [i for i in range(len(self.sequences)) if i % _HELD_OUT == _HELD_OUT - 1] or [0]

    def batch(self, which: list[int]) -> Batch:
        lengths = [len(self.sequences[i].ids) for i in which]
        shape, hidden_size = (len(which), max(lengths)), self.states.shape[1]
        ids, learned = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        states, inputs = torch.zeros(*shape, hidden_size), torch.zeros(*shape, hidden_size)
        for row, (i, num) in enumerate(zip(which, lengths, strict=True)):
            example, rows = self.sequences[i], slice(self._ends[i] - num, self._ends[i])
            ids[row, :num] = torch.tensor(example.ids)
            learned[row, max(0, example.start - 1) : num] = True
            states[row, :num] = torch.from_numpy(self.states[rows].astype(np.float32))
            inputs[row, :num] = torch.from_numpy(self.inputs[rows].astype(np.float32))
        return Batch(ids, states, inputs, learned)


def num_steps(corpus: Corpus, recipe: Recipe) -> int:
    return -(-len(corpus.learned) // _BATCH) * recipe.num_epochs


def train(
    head: DraftHead,
    target: Target,
    corpus: Corpus,
    recipe: Recipe,
    saved: Path,
    tick: Tick,
    is_stopped: Callable[[], bool],
) -> bool:
    """Trains the head; returns False if it was stopped. `saved`: where its state is written every
    so often and when it stops, and read from."""

    def loss(step: int) -> torch.Tensor:
        return loss_of(head, target, corpus.batch(_which(corpus, recipe, step)), recipe.num_guesses)

    schedule = Schedule(num_steps(corpus, recipe), recipe.rate, asdict(recipe), saved)
    return run_steps(head, loss, schedule, tick, is_stopped)


def draft_held_out(
    head: DraftHead, target: Target, corpus: Corpus, num_drafts: int
) -> list[Drafted]:
    return [draft_along(head, target, corpus.batch([i]), num_drafts) for i in corpus.held_out]


def _which(corpus: Corpus, recipe: Recipe, step: int) -> list[int]:
    """The sequences of a step: every epoch has an order of its own."""
    learned = corpus.learned
    epoch, number = divmod(step, -(-len(learned) // _BATCH))
    order = torch.randperm(
        len(learned), generator=torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
    ).tolist()
    return [learned[i] for i in order[number * _BATCH : (number + 1) * _BATCH]]
