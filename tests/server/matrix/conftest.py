"""The servers of the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Server
from tests.server.matrix.script import make_adapter, make_model

for _name in ("checks", "client", "dialects"):
    pytest.register_assert_rewrite(f"tests.server.matrix.{_name}")


@pytest.fixture(scope="session")
def script_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="session")
def plain(script_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The scripted model and its adapter. It does not speculate, so that an endless answer takes its time."""
    adapter = tmp_path_factory.mktemp("script") / "adapter"
    make_adapter(adapter, script_folder)
    running = Server(script_folder, "--lora", f"other={adapter}", "--speculate", "off").wait()
    yield running
    assert running.stop() == 0
