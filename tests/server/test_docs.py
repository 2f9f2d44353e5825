"""The examples of docs/api.md, as they stand there."""

import re
from pathlib import Path

import pytest

from tests.server.conftest import Server

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "api.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server(roomy_folder):
    running = Server(roomy_folder, "--served-name", "smollm2").wait()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(server, example):
    assert "http://127.0.0.1:8000" in example
    exec(compile(example.replace("http://127.0.0.1:8000", server.url), "docs/api.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
