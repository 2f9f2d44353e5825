"""Nano-batching: whether steps of a size are cut in two halves that run beside each other, by a
trial at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.distributed.group import Group
from tidemill.runner.cuda_graphs import Graph, time_replay
from tidemill.runner.cuda_work import Work, make_microbatches, make_work
from tidemill.runner.state import RowState

GAIN = 1.02  # from which on it is worth a graph of its own
_DECODE, _MIXED = (
    (64, 128, 256, 512),
    (1024, 2048, 4096),
)  # sizes that are tried: each stands for those below it, down to the next
# tokens of the sequences that a trial decodes, and how often it takes the time
_CONTEXT, _TIMES = 1024, 3


@dataclass(frozen=True, slots=True)
class NanoTrial:
    decodes: bool
    size: int
    whole_ms: float
    halves_ms: float
    is_same: bool  # bits

    @property
    def is_taken(self) -> bool:
        return self.is_same and self.whole_ms >= GAIN * self.halves_ms

    def __str__(self) -> str:
        what = f"{'decode' if self.decodes else 'mixed'} steps of {self.size} tokens"
        times = f"{self.whole_ms:.2f} ms whole, {self.halves_ms:.2f} ms in two halves"
        return f"{what}: {times}, {'taken' if self.is_taken else 'not taken'}{'' if self.is_same else '; other bits'}"


@dataclass(slots=True)
class Candidates:
    """The parts of the runner that a trial needs. Sizes are (decodes, tokens)."""

    state: RowState
    cache: torch.Tensor
    max_context: int
    vocab_size: int
    num_rows: int
    whole: dict[tuple[bool, int], Graph]
    capture: Callable[[bool, int], Graph]  # the same step in two halves
    replay: Callable[[Graph, Work], object]
    hidden: torch.Tensor  # where the replay of a mixed step leaves its result
    cuts: dict[tuple[bool, int], int]
    how: tuple[int, int, int]  # of `make_work`
    group: Group


def run_trials(candidates: Candidates) -> tuple[list[NanoTrial], set[tuple[bool, int]]]:
    """Runs the trials; returns them and the sizes at which halves are faster. All ranks decide as
    the first does. Leaves the state as it was."""
    trials, taken = [], set[tuple[bool, int]]()
    # Two halves of a decode step read all weights twice: only collectives can make up for that.
    kinds = ((True, _DECODE), (False, _MIXED)) if candidates.group.size > 1 else ((False, _MIXED),)
    for decodes, sizes in kinds:
        before = sizes[0] // 2
        for size in sizes:
            if (decodes, size) in candidates.cuts and (
                trial := _try(candidates, decodes, size)
            ) is not None:
                trials.append(trial)
                if candidates.group.broadcast_bytes(bytes([trial.is_taken])) == b"\1":
                    taken |= {
                        one
                        for one in candidates.cuts
                        if one[0] == decodes and before < one[1] <= size
                    }
                before = size
    return trials, taken


def _try(candidates: Candidates, decodes: bool, size: int) -> NanoTrial | None:
    items = _items(candidates, decodes, size)
    if items is None:
        return None
    state, page_size = candidates.state, candidates.state.page_size
    num_pages = -(-(items[:, 1] + items[:, 2]) // page_size)
    firsts = 1 + np.cumsum(num_pages) - num_pages
    table = np.zeros(state.pages.shape, np.int32)
    for (row, _, _), first, num in zip(items, firsts, num_pages, strict=True):
        table[row, :num] = np.arange(first, first + num)
    state.pages.copy_(torch.from_numpy(table))
    state.tokens.random_(candidates.vocab_size)
    last = int(firsts[-1] + num_pages[-1])
    for page in range(1, last) if candidates.cache.is_floating_point() else ():
        candidates.cache[page].normal_()
    samples, how = items[:, 2] == 1, ([table], *candidates.how)
    whole, halves = candidates.whole[decodes, size], candidates.capture(decodes, size)
    works = (
        make_work(items, samples, *how),
        make_microbatches(items, samples, candidates.cuts[decodes, size], *how),
    )
    seen, times = list[torch.Tensor](), (list[float](), list[float]())
    for turn in range(1 + _TIMES):
        for i, (graph, work) in enumerate(zip((whole, halves), works, strict=True)):
            ms = time_replay(candidates.replay, graph, work)
            if turn:
                times[i].append(ms)
            else:
                seen.append((graph.out if decodes else candidates.hidden[:size]).clone())
    for used in (state.pages, state.tokens, candidates.cache[1:last]):
        used.zero_()
    # By CUDA IPC, ranks that have not begun do not wait for each other, and sums are of whatever is
    # there.
    is_same = candidates.group.size > 1 or torch.equal(*seen)
    return NanoTrial(decodes, size, min(times[0]), min(times[1]), is_same)


def _items(candidates: Candidates, decodes: bool, size: int) -> np.ndarray | None:
    """Sequences of one token each; of a mixed step for a few of them, and a prompt. None: there is
    no room for them."""
    page_size, num_pages = candidates.state.page_size, candidates.cache.shape[0] - 1
    num = size if decodes else min(size // 8, candidates.num_rows - 1)
    prompt = 0 if decodes else size - num
    left = num_pages - -(-prompt // page_size)
    context = min(_CONTEXT, candidates.max_context, left // max(1, num) * page_size)
    if num > candidates.num_rows or context < 1 or prompt > candidates.max_context:
        return None
    singles = np.stack([np.arange(num), np.full(num, context - 1), np.ones(num, np.int64)], 1)
    return np.concatenate([singles, [[num, 0, prompt]]] if prompt else [singles]).astype(np.int32)
