"""The examples of docs/api.md, as they stand there."""

import re
from pathlib import Path

import pytest

from tests.helpers import byte_tokenizer, make_llama
from tests.server.conftest import Server

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "api.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("roomy")
    make_llama(path, vocab_size=320, max_position_embeddings=4096)
    byte_tokenizer(path)
    running = Server(path, "--served-name", "smollm2").wait()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(server, example):
    assert "http://127.0.0.1:8000" in example
    exec(compile(example.replace("http://127.0.0.1:8000", server.url), "docs/api.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
