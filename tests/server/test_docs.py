"""The examples of docs/api.md, as they stand there."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_of_fields_without_effect():
    from tidemill.server.api import fields_doc

    assert fields_doc.table() in PAGE, "put the output of python -m tidemill.server.api.fields_doc into docs/api.md"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(roomy, example):
    assert "http://127.0.0.1:8000" in example
    assert "smollm2" in example
    here = example.replace("http://127.0.0.1:8000", roomy.url).replace("smollm2", "tiny")
    exec(compile(here, "docs/api.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
