"""The training loop: the same bits whether it runs through or is interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from tidemill.draft.losses import Batch, Drafted, draft_along, loss_of
from tidemill.draft.text import Example
from tidemill.errors import ConfigError
from tidemill.runner.spec.heads import DraftHead, Target

_HELD_OUT = 16  # one sequence of so many is not learned from
_BATCH = 4  # sequences
_WARMUP, _LAST = 0.05, 0.05  # share of the steps in which the rate rises; what it falls to at the end, of its highest
_BETAS, _DECAY, _CLIP = (0.9, 0.95), 0.01, 1.0
_SAVE_EVERY = 25
RATES = {"medusa": 1e-3, "eagle": 1e-3, "exit": 2e-3}
Tick = Callable[[int, float], None]  # steps done, loss of the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the bits of the result, besides model and text."""

    kind: str
    settings: dict[str, int] = field(default_factory=dict)
    num_epochs: int = 4
    num_guesses: int = 2  # trained at a time; Medusa's heads all are
    rate: float = 1e-3
    seed: int = 0
    text: str = ""  # its digest


@dataclass(slots=True)
class Corpus:
    """Sequences with the states of the whole model, and of its first layers where the head starts from those."""

    sequences: list[Example]
    states: np.ndarray
    inputs: np.ndarray
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(one.ids) for one in self.sequences]).tolist()

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
            one, rows = self.sequences[i], slice(self._ends[i] - num, self._ends[i])
            ids[row, :num] = torch.tensor(one.ids)
            learned[row, max(0, one.start - 1) : num] = True
            states[row, :num] = torch.from_numpy(self.states[rows].astype(np.float32))
            inputs[row, :num] = torch.from_numpy(self.inputs[rows].astype(np.float32))
        return Batch(ids, states, inputs, learned)


def num_steps(corpus: Corpus, recipe: Recipe) -> int:
    return -(-len(corpus.learned) // _BATCH) * recipe.num_epochs


def train(
    head: DraftHead, target: Target, corpus: Corpus, recipe: Recipe, saved: Path, tick: Tick, is_stopped: Callable[[], bool]
) -> bool:
    """Whether it is done, or was stopped. `saved`: where its state is written every so often and when it stops, and read from."""
    optimizer = torch.optim.AdamW(head.parameters(), recipe.rate, _BETAS, weight_decay=_DECAY)
    total = num_steps(corpus, recipe)
    done = _restore(head, optimizer, recipe, total, saved)
    tick(done, math.nan)
    while done < total and not is_stopped():
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _share_of_rate(done / total)
        loss = loss_of(head, target, corpus.batch(_which(corpus, recipe, done)), recipe.num_guesses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
        optimizer.step()
        done += 1
        tick(done, loss.item())
        if done % _SAVE_EVERY == 0 or done == total or is_stopped():
            _save(head, optimizer, recipe, total, done, saved)
    return done == total


def draft_held_out(head: DraftHead, target: Target, corpus: Corpus, num_drafts: int) -> list[Drafted]:
    return [draft_along(head, target, corpus.batch([i]), num_drafts) for i in corpus.held_out]


def _which(corpus: Corpus, recipe: Recipe, step: int) -> list[int]:
    """The sequences of a step: every epoch has an order of its own."""
    learned = corpus.learned
    epoch, number = divmod(step, -(-len(learned) // _BATCH))
    order = torch.randperm(len(learned), generator=torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)).tolist()
    return [learned[i] for i in order[number * _BATCH : (number + 1) * _BATCH]]


def _share_of_rate(progress: float) -> float:
    if progress < _WARMUP:
        return (progress + 0.001) / (_WARMUP + 0.001)
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP)))


def _save(head: DraftHead, optimizer: torch.optim.Optimizer, recipe: Recipe, total: int, done: int, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"head.{name}": value.detach().contiguous() for name, value in head.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value.contiguous() for name, value in state.items()}
    said = {"done": str(done), "total": str(total), "recipe": json.dumps(asdict(recipe), sort_keys=True)}
    save_file(tensors, path.with_suffix(".new"), said)
    os.replace(path.with_suffix(".new"), path)


def _restore(head: DraftHead, optimizer: torch.optim.Optimizer, recipe: Recipe, total: int, path: Path) -> int:
    """Steps done before."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return 0
    again = f"Delete {path.parent}, or give another --out."
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is corrupt: {error}.", fix=again) from error
    if said.get("recipe") != json.dumps(asdict(recipe), sort_keys=True) or said.get("total") != str(total):
        raise ConfigError(f"{path} was begun with other options: {said.get('recipe')}.", fix=again)
    by_number: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, number, part = name.split(".")
            by_number.setdefault(int(number), {})[part] = value
    head.load_state_dict({name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")})
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(said["done"])
