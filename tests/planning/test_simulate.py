"""`tidemill simulate`, and what it reads."""

import json
import random
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from tidemill.bench import plots
from tidemill.cli.main import app
from tidemill.errors import ConfigError
from tidemill.planning.core import _quick_keys
from tidemill.planning.fleet import run_rows
from tidemill.planning.profile import Profile
from tidemill.planning.simulator import SimConfig
from tidemill.planning.trace import _Lines, arrivals, num_cut, read_rows

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 2000, "output_length": 20, "hash_ids": [5, 6, 7, 8]},
    {"timestamp": 3000, "input_length": 1800, "output_length": 30, "hash_ids": [5, 6, 7, 99]},
    {
        "timestamp": 4000,
        "input_length": 500,
        "output_length": 400,
        "hash_ids": [1],
        "tenant": "a",
        "abort_ms": 100,
        "n": 2,
    },
]


@pytest.fixture
def traces(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, MOONCAKE)))
    return tmp_path


def test_keys_of_pages_are_those_of_their_tokens_however_many_come_at_once():
    draw = random.Random(0)
    for _ in range(200):
        tokens = [
            token
            for _ in range(draw.randint(1, 6))
            for token in [draw.randint(1, 3)] * draw.randint(1, 20)
        ]
        tokens = tokens[: len(tokens) // 4 * 4]
        cut = draw.randrange(0, len(tokens) + 1, 4)
        whole, first = _quick_keys(b"root", tokens, 4), _quick_keys(b"root", tokens[:cut], 4)
        assert whole == first + _quick_keys(first[-1] if first else b"root", tokens[cut:], 4)
        assert len({*whole, b"root"}) == len(tokens) // 4 + 1
        if tokens:
            other = _quick_keys(b"root", [9, *tokens[1:]], 4)
            assert not {*whole} & {*other}


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)


def test_rows_of_both_formats(traces):
    azure = read_rows(traces / "azure.csv")
    assert [(row.num_prompt, row.num_output) for row in azure] == [(374, 44), (396, 109), (879, 55)]
    assert azure[0].at_s == 0
    assert azure[1].at_s == pytest.approx(4.314579, abs=1e-5)
    first, second, third = arrivals(read_rows(traces / "mooncake.jsonl"), time_scale=0.5)
    assert first.prompt_ids[:1536] == second.prompt_ids[:1536] != third.prompt_ids[:1536]
    assert first.prompt_ids[1536] != second.prompt_ids[1536]
    assert (third.tenant, third.n, third.abort_s) == ("a", 2, 2.1)


def test_a_request_is_cut_to_the_context(traces):
    rows = read_rows(traces / "mooncake.jsonl")
    assert all(one.num_prompt + one.num_output <= 600 for one in arrivals(rows, max_context=600))
    assert num_cut(rows, max_context=600) == 3
    assert num_cut(rows, max_context=2020) == num_cut(rows, max_context=202, length_scale=0.1) == 0
    few = ["--max-context", 1900]
    assert json.loads(run(traces / "mooncake.jsonl", *few, "--json").stdout)["cut_requests"] == 1
    assert "1 requests, to 1,900 tokens" in run(traces / "mooncake.jsonl", *few).stdout


def test_figures_of_a_trace(traces):
    figures = json.loads(
        run(traces / "mooncake.jsonl", "--json", "--max-requests", 8, "--slo-ttft-ms", 1000).stdout
    )
    assert figures["requests"] == 4  # samples
    assert figures["aborted"] == 1
    assert figures["cached_tokens"] >= 1536 - 64
    assert 0 < figures["utilisation"] <= 1
    assert 0.004 < figures["tpot_s"]["p50"] < 0.03
    assert figures["slo_met"] == 1
    assert figures["engine"]["num_rows"] == 8
    assert (
        json.loads(run(traces / "azure.csv", "--json", "--no-prefix-caching").stdout)[
            "cached_tokens"
        ]
        == 0
    )
    assert "times real time" in run(traces / "azure.csv", "--policy", "static").stdout


def test_speculation_and_host_memory_take_effect(traces):
    plain, guessed = (
        json.loads(run(traces / "azure.csv", "--json", *more).stdout)
        for more in ([], ["--acceptance-rate", 0.9, "--max-drafts", 4])
    )
    assert guessed["tpot_s"]["p50"] < 0.6 * plain["tpot_s"]["p50"]
    few = ["--json", "--max-context", 2304, "--kv-memory", 2304 * 131072]
    assert (
        json.loads(run(traces / "mooncake.jsonl", *few, "--kv-host-memory", "10G").stdout)[
            "requests"
        ]
        == 4
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "empty.jsonl"),
        ("{}\n", "fields.jsonl"),
        ("not json\n", "text.jsonl"),
        ('{"timestamp": -5, "input_length": 10, "output_length": 2}\n', "time.jsonl"),
        ('{"timestamp": 0, "input_length": -10, "output_length": 2}\n', "length.jsonl"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 2}\n', "infinite.jsonl"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,3\n", "column.csv"),
        ("x" * (1 << 21), "line.jsonl"),
        ("[" * 200_000, "deep.jsonl"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 2, "n": 4000000000}\n',
            "samples.jsonl",
        ),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path, text, name):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_rows(tmp_path / name)


def test_a_wrong_line_is_named_with_a_short_reason(tmp_path):
    for name, data, why in [
        ("a.csv", AZURE.encode() + b"\xff\x00\x80" * 4000, "line 5: it is not text"),
        ("b.csv", AZURE.encode() + b"x" * 9000, "line 5: "),
        ("c.jsonl", b"{}\n", "line 1: 'timestamp' is missing"),
        ("d.jsonl", b'{"timestamp": "' + b"x" * 9000 + b'"}\n', "line 1: "),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=why) as error:
            read_rows(tmp_path / name)
        assert len(str(error.value)) < 400, name


def test_no_more_of_a_line_is_read_than_it_may_have():
    class Endless:
        def readline(self, most=-1):
            assert 0 < most < 2**22
            return b"x" * most

    with pytest.raises(ValueError, match="more than"):
        next(_Lines().of(Endless()))


def test_an_engine_that_holds_no_request_is_refused(traces):
    with pytest.raises(ConfigError, match="hold"):
        run(traces / "azure.csv", "--kv-memory", "100M")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-requests", 4_000_000_000),
        ("--kv-memory", "100000T"),
        ("--time-scale", "1e300"),
        ("--slo-ttft-ms", "nan"),
        ("--host-rate", "inf"),
    ],
)
def test_numbers_out_of_range_are_refused(option, value, traces):
    with pytest.raises(ConfigError):
        run(traces / "azure.csv", option, value)


def test_a_chart_that_cannot_be_written_does_not_cost_the_figures(traces, monkeypatch):
    pyplot = MagicMock()
    pyplot.subplots.return_value = MagicMock(), [MagicMock() for _ in range(4)]
    monkeypatch.setattr(plots, "_pyplot", lambda: pyplot)
    result = CliRunner().invoke(
        app, ["simulate", str(traces / "azure.csv"), "--json", "--chart", str(traces / "azure.csv")]
    )
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in str(result.exception)
    assert json.loads(result.stdout)["requests"] == 3


def test_prompts_are_made_as_they_are_submitted(traces):
    profile = Profile.load("h200-llama8b")
    rows = read_rows(traces / "mooncake.jsonl")
    run = run_rows(rows, SimConfig(num_rows=8), profile)
    assert not any(row.prompt_ids for row in rows)
    assert [record.num_prompt for record in run.records] == [2000, 1800, 500, 500]
    assert run.engines[0].tally.num_cached >= 1536 - 64
