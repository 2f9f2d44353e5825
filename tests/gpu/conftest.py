"""Of tests on a GPU alone: those of the whole suite interpret kernels on a CPU, and are not loaded
with them.

    make test-gpu                              all of it
    python -m pytest --confcutdir tests/gpu tests/gpu -k "kernels or engine"    a part
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for a GPU is not to use it

import torch

from tests import seeded

seeded.seed_this_process()
seeded.seed_child_processes()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit("These tests need an NVIDIA GPU, and torch sees none.", returncode=2)


@pytest.fixture(autouse=True)
def _memory_of_its_own() -> Iterator[None]:
    """Engines of the test before are gone."""
    yield
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
