"""The servers of the matrix."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fragile import GATED, Fragile
from tests.helpers import LONG_S
from tests.server.conftest import Server
from tests.server.matrix.script import make_adapter, make_classifier, make_model
from tests.waiting import until

for _name in ("checks", "client", "dialects", "pooled"):
    pytest.register_assert_rewrite(f"tests.server.matrix.{_name}")


@pytest.fixture(scope="session")
def script_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="session")
def plain(script_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The scripted model and its adapter. It does not speculate, so that an endless answer takes
    its time."""
    adapter = tmp_path_factory.mktemp("script") / "adapter"
    make_adapter(adapter, script_folder)
    running = Server(script_folder, "--lora", f"other={adapter}", "--speculate", "off").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("classifier") / "model"
    make_classifier(path)
    running = Server(path).wait()
    yield running
    assert running.stop() == 0


STREAMING = '{"kind": "streaming", "sinks": 4, "recent": 60}'


@pytest.fixture(scope="session")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with pytest.MonkeyPatch.context() as patch:
        yield Fragile(tmp_path_factory.mktemp("fragile"), patch)


@pytest.fixture(scope="session")
def limited(script_folder: Path, fragile: Fragile) -> Iterator[Server]:
    """The scripted model with options that hold for every request."""
    options = ["--kv-policy", STREAMING, "--max-context", "512", "--thinking-token-budget", "1"]
    running = Server(script_folder, *options, "--drain-seconds", str(LONG_S)).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def draining(limited: Server, fragile: Fragile) -> Iterator[Server]:
    """The same server, told to stop while a request is under way that cannot end. It is the last
    that is asked for."""
    body = {"prompt": [GATED, 1], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{limited.url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        limited.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{limited.url}/ready").status_code == 503)
        yield limited
        fragile.open_gate()
        assert "[DONE]" in "".join(lines)
