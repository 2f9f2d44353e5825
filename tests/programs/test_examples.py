"""The examples, as they are called."""

import importlib
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tree_of_thought", "judge")),
        "extract_json",
    ],
)
def test_example(name, thinking_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module(name).main(["--model", str(thinking_folder)])
    (fewer,) = re.findall(r"computed tokens: ([0-9.]+)x fewer", capsys.readouterr().out)
    assert float(fewer) > 1.5
