"""CUDA graphs: for which numbers of tokens there is one, how it is captured, and what stands in its
place where none can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from tidemill.kernels.cuda.gemm import choice_of
from tidemill.kernels.cuda.launch import capturing
from tidemill.models.base import CausalLM

if TYPE_CHECKING:
    from tidemill.runner.cuda_work import Work

T = TypeVar("T")


class Grid(NamedTuple):
    """The grid sizes of a step's kernels."""

    decode: int  # of attention: tokens of sequences with one each
    shared: int  # of attention: splits that sequences share
    prompts: int  # of attention
    states: int  # sequences whose states are computed side by side


NO_LISTS = Grid(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The key of a graph of one kind of step."""

    size: int  # tokens that a step is padded to
    has_lists: bool  # of a decode step: splits that sequences share; of another: decode tokens
    lora: bool = False  # tokens may have adapters
    flash: bool = False  # prompts by flash-attn-4


class RunFn(Protocol):
    def __call__(self, work: Work | None = None, model: Any = None) -> torch.Tensor:
        """`work`: of the step at hand, where it is launched kernel by kernel. `model`: only some of
        the model's layers."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be captured: its number of tokens, its kernels' grids, and the work itself."""

    size: int
    grid: Grid
    run: RunFn
    second_grid: Grid = NO_LISTS  # of a step in two microbatches, that of the second one


@dataclass(slots=True)
class Graph:
    """A step of so many tokens, captured, or launched kernel by kernel: fill the metadata buffer,
    replay, read the output."""

    graph: torch.cuda.CUDAGraph | Step
    size: int
    grid: Grid
    out: torch.Tensor  # tokens of a decode step, hidden states of another
    second_grid: Grid = NO_LISTS

    def replay(self, work: Work | None = None) -> None:
        if isinstance(self.graph, Step):
            self.out = self.graph.run(work)
        else:
            self.graph.replay()


def uncaptured(step: Step, out: torch.Tensor) -> Graph:
    """A step in the place of a graph. `out`: what stands for its output until it has run."""
    return Graph(step, step.size, step.grid, out, step.second_grid)


def capture(step: Step, pool: Any, run_first: bool) -> Graph:
    """`run_first`: on a stream of its own, so that what libraries set up at their first call is
    not captured."""
    if run_first:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step.run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool):
        out = step.run()
    return Graph(graph, step.size, step.grid, out, step.second_grid)


class GraphPool:
    """Captures graphs, whose memory they share."""

    def __init__(self, runs_first: bool) -> None:
        """`runs_first`: else libraries have been tried at every size."""
        self._pool, self._runs_first = torch.cuda.graph_pool_handle(), runs_first

    def capture(self, step: Step, run_first: bool = False) -> Graph:
        return capture(step, self._pool, run_first or self._runs_first)


class NoGraphs:
    """In the place of a pool where weights are copied while layers compute, which cannot be
    captured: steps run once, in part, to load kernels."""

    def __init__(self, model: CausalLM) -> None:
        self._few_layers = model.one_layer_of_each_kind()

    def capture(self, step: Step, run_first: bool = False) -> Graph:
        return uncaptured(step, step.run(model=self._few_layers))


def sizes(most: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Up to `most`: multiples of so much up to so much, then of the next."""
    made, size = [], 0
    for until, step in steps:
        while size < min(until, most):
            size = min((size // step + 1) * step, most)
            made.append(size)
    return made if made[-1] == most else [*made, most]


def microbatches(among: Collection[int]) -> dict[int, int]:
    """By size, where a step of so many tokens is cut in two: both parts are sizes, too, as alike as
    can be."""
    made = {}
    for size in among:
        firsts = [first for first in among if first < size and size - first in among]
        if firsts:
            made[size] = min(firsts, key=lambda first: (abs(2 * first - size), -first))
    return made


def one_of_each_kind(among: Iterable[int]) -> list[int]:
    """Sizes that use every kernel which any of them uses: which one a matmul takes changes at a few
    numbers of rows."""
    return list({choice_of(size): size for size in among}.values())


def time_replay(replay: Callable[[Graph, T], object], graph: Graph, work: T) -> float:
    """Milliseconds that the device takes."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    replay(graph, work)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
