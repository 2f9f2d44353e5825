"""CUDA graphs: for which numbers of tokens there is one, how it is captured, and what stands in its place where none can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tidemill.kernels.cuda.gemm import choice_of
from tidemill.kernels.cuda.launch import capturing

T = TypeVar("T")
Programs = tuple[int, int, int, int]  # of the kernels: singles, shared and prompts of attention, sequences with states


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be captured: its number of tokens, the programs of the kernels, and the work itself."""

    size: int
    programs: Programs
    run: Callable[[], torch.Tensor]
    second: Programs | None = None  # of a step in two halves, those of the second one


@dataclass(slots=True)
class Graph:
    """A step of so many tokens, captured, or launched kernel by kernel: fill the words, replay, read the output."""

    graph: torch.cuda.CUDAGraph | Step
    size: int
    programs: Programs
    out: torch.Tensor  # tokens of a decode step, hidden states of another
    second: Programs | None = None

    def replay(self) -> None:
        if isinstance(self.graph, Step):
            self.out = self.graph.run()
        else:
            self.graph.replay()


def uncaptured(step: Step, out: torch.Tensor) -> Graph:
    """A step in the place of a graph. `out`: what stands for its output until it has run."""
    return Graph(step, step.size, step.programs, out, step.second)


def capture(step: Step, pool: Any, run_first: bool) -> Graph:
    """`run_first`: on a stream of its own, so that what libraries set up at their first call is not captured."""
    if run_first:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool):
        out = step.run()
    return Graph(graph, step.size, step.programs, out, step.second)


def sizes(most: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Up to `most`: multiples of so much up to so much, then of the next."""
    made, size = [], 0
    for until, step in steps:
        while size < min(until, most):
            size = min((size // step + 1) * step, most)
            made.append(size)
    return made if made[-1] == most else [*made, most]


def halves(among: Collection[int]) -> dict[int, int]:
    """By size, where a step of so many tokens is cut in two: both parts are sizes, too, as alike as can be."""
    made = {}
    for size in among:
        firsts = [first for first in among if first < size and size - first in among]
        if firsts:
            made[size] = min(firsts, key=lambda first: (abs(2 * first - size), -first))
    return made


def one_of_each_kind(among: Iterable[int]) -> list[int]:
    """Sizes that use every kernel which any of them uses: which one a matmul takes changes at a few numbers of rows."""
    return list({choice_of(size): size for size in among}.values())


def time_replay(replay: Callable[[Graph, T], object], graph: Graph, work: T) -> float:
    """Milliseconds that the device takes."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    replay(graph, work)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
