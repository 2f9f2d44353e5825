"""A rank that is lost ends its engine, and an engine that is lost frees its worker. Run by itself:
what ends amid a kernel takes the GPU away from every process of the multi-process service, so this
one must not use it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import LOST, children, other_host, sharing
from tests.helpers import LONG_S, make_llama
from tests.waiting import until

RANKS = 2


@pytest.fixture(autouse=True)
def _service(tmp_path: Path) -> Iterator[None]:
    with sharing(tmp_path):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1400,
        "num_attention_heads": 8,
        "head_dim": 128,
    }
    make_llama(folder, **sizes, vocab_size=2000, max_position_embeddings=2048)
    return folder


@contextlib.contextmanager
def computing(folder: Path, options: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in a process of its own, which its end ends: a GPU's state after a lost rank is not
    to be used."""
    command = [
        sys.executable,
        "-m",
        "tests.gpu.ranks",
        str(folder),
        json.dumps(options | {"tensor_parallel": RANKS}),
    ]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    try:
        while engine.stdout.readline() != b"computes\n":
            assert engine.poll() is None
        yield engine
    finally:
        engine.kill()
        engine.wait()


def test_a_lost_worker_ends_the_engine(model: Path) -> None:
    with other_host(model.parent) as (given, worker), computing(model, given) as engine:
        worker.kill()
        assert engine.wait(LONG_S) == LOST


def test_a_lost_engine_frees_its_worker(model: Path) -> None:
    with other_host(model.parent) as (given, worker), computing(model, given) as engine:
        ranks = children(worker.pid)
        assert len(ranks) == 1
        engine.kill()
        engine.wait()
        until(lambda: children(worker.pid) != ranks)  # it waits for another engine
