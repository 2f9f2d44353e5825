"""Captures of CUDA graphs. No GPU is needed: what stands in for torch's capture looks at what goes
on around it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from tidemill.runner.cuda_graphs import Step, capture


class _Cycle:
    """Destroyed by the collector alone, as the graphs of an engine that is gone are."""

    def __init__(self, destroyed: list[str]) -> None:
        self.itself = self
        self.destroyed = destroyed

    def __del__(self) -> None:
        self.destroyed.append("while capturing")


def test_graphs_of_an_engine_that_is_gone_are_not_destroyed_during_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    destroyed: list[str] = []
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def capture_of_torch(graph: object, pool: object = None) -> Iterator[None]:
        yield
        seen.append(list(destroyed))

    def run() -> torch.Tensor:
        _Cycle(destroyed)
        _ = [[i] for i in range(100_000)]  # so many new objects make the collector run, if it may
        return torch.zeros(1)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture_of_torch)
    assert gc.isenabled()
    capture(Step(1, (1, 0, 0, 0), run), None, run_first=False)
    assert seen == [[]]
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool=None: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="no kernel"):
        capture(Step(1, (1, 0, 0, 0), run), None, run_first=False)
    assert gc.isenabled()
