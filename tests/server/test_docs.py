"""The examples of docs/api.md, as they stand there."""

import re
from pathlib import Path

import pytest

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "api.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(roomy, example):
    assert "http://127.0.0.1:8000" in example
    assert "smollm2" in example
    here = example.replace("http://127.0.0.1:8000", roomy.url).replace("smollm2", "tiny")
    exec(compile(here, "docs/api.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
