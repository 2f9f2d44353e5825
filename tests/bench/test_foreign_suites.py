"""The tally of foreign suites: what counts, and how their flags are read. The suites themselves
need checkouts."""

import importlib
import json

import pytest

from bench.foreign.serving import translated
from bench.foreign.stubs import AnyCount, names_from
from bench.foreign.tally import Outcome, append, judge, read_outcomes, share_passed, table
from bench.foreign_suites import ADAPTERS

OUTCOMES = [
    Outcome("a.py::one", "failed", "line 3: flaky"),
    Outcome("a.py::one", "passed"),
    Outcome("a.py::two", "failed", "line 9: no"),
    Outcome("a.py::three", "failed"),
    Outcome("b.py::image", "passed"),
    Outcome("b.py::rust", "skipped", "not built"),
]


def test_a_difference_by_design_counts_as_failed_and_what_is_not_applicable_never_counts(tmp_path):
    for outcome in OUTCOMES:
        append(tmp_path / "results.jsonl", outcome)
    verdicts = judge(
        read_outcomes(tmp_path / "results.jsonl"), {"three": "on purpose"}, {"image": "images"}
    )
    kinds = {verdict.test: verdict.kind for verdict in verdicts}
    assert kinds == {
        "a.py::one": "passed", "a.py::two": "without a reason", "a.py::three": "by design", "b.py::image": "not applicable",
        "b.py::rust": "not applicable",
    }  # fmt: skip
    assert share_passed(verdicts) == 1 / 3
    assert "1 of 3 applicable tests passed: 33.3%" in (text := table(verdicts))
    assert all(words in text for words in ("line 9: no", "on purpose", "images", "not built"))
    assert share_passed([]) == 0.0


def test_flags_that_are_dropped_come_back_with_their_values():
    flags = [
        "--dtype=half",
        "--lora_modules",
        "a=b",
        "c=d",
        "--seed",
        "1",
        "--enable-lora",
        "--names",
        "x",
    ]
    kept, taken = translated(
        flags, {"--dtype": 1, "--lora-modules": -1, "--enable-lora": 0, "--names": -1}
    )
    assert kept == ["--seed", "1"]
    assert taken == {
        "--dtype": ["half"],
        "--lora-modules": ["a=b", "c=d"],
        "--enable-lora": [],
        "--names": ["x"],
    }


def test_names_are_taken_from_a_file_without_the_rest_of_it(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(
        "import nowhere\nKEPT = 1\nBROKEN = nowhere.x\ndef kept(a: Missing): return os.sep, a\ndef other(): pass\n"
    )
    space = names_from(path, "KEPT|BROKEN|kept", os=importlib.import_module("os"))
    assert space["KEPT"] == 1
    assert space["kept"](2) == ("/", 2)
    assert set(space) == {"KEPT", "kept"}


def test_any_number_of_tokens_will_do():
    assert json.loads("7") == AnyCount(3)
    assert json.loads("0") != AnyCount(3)


@pytest.mark.parametrize("name", ADAPTERS.values())
def test_every_adapter_says_what_it_runs_and_why_not(name):
    adapter = importlib.import_module(f"bench.foreign.{name}")
    assert len(adapter.COMMIT) == 40
    assert all(path.endswith(".py") for path in adapter.FILES)
    assert all([*adapter.BY_DESIGN.values(), *adapter.NOT_APPLICABLE.values()])
