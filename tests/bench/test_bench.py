"""Benchmarks: workloads have the given lengths and arrivals, statistics are exact, the load
generator is open-loop."""

import asyncio
import itertools
import json
import math

import pytest
from typer.testing import CliRunner

from tidemill.bench.http import run_load
from tidemill.bench.record import Record, percentile, summarize
from tidemill.bench.workload import Item, arriving, read_trace, synthetic
from tidemill.cli.main import app
from tidemill.errors import ConfigError
from tidemill.sched.policies import POLICIES
from tools.chart import DOCS, GPU_NAMES, cpu_groups, gpu_groups

SIZES = ("--prompt-len", "20", "--output-len", "6")


def bench(*arguments: str):
    """A command in this process; its exit code and output."""
    return CliRunner().invoke(app, ["bench", *arguments])


def test_synthetic_lengths():
    items = synthetic(200, 100, 50, spread=0.5, shared_prefix=10, seed=1)
    assert items == synthetic(200, 100, 50, spread=0.5, shared_prefix=10, seed=1)
    assert len({tuple(item.prompt_ids[:10]) for item in items}) == 1
    assert all(60 <= len(item.prompt_ids) <= 160 for item in items)
    assert all(25 <= item.num_output <= 75 for item in items)
    assert max(synthetic(1, 200, 1, vocab=50)[0].prompt_ids) < 50  # a small vocabulary


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 2.0)])
def test_arrivals_have_the_rate_and_the_variation_asked_for(burstiness, variation):
    times = [item.at_s for item in arriving([Item(0, [1], 1)] * 40_000, 5.0, burstiness=burstiness)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.08)


def test_azure_trace(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,90,16\n"
    )
    items = read_trace(path, limit=10, time_scale=0.5, length_scale=0.5)
    assert [(item.at_s, len(item.prompt_ids), item.num_output) for item in items] == [
        (0.0, 187, 22),
        (pytest.approx(2.0), 45, 8),
    ]


def test_mooncake_trace_keeps_identical_prefixes(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 9000, "hash_ids": [0, 1, 7]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    one, two = read_trace(path, limit=10, max_context=2048)
    assert (len(one.prompt_ids), len(two.prompt_ids), two.num_output, two.at_s) == (
        1100,
        1024,
        1024,
        3.0,
    )
    assert one.prompt_ids[:1024] == two.prompt_ids[:1024]
    assert (
        read_trace(path, limit=1)[0].prompt_ids
        != read_trace(path, limit=2, length_scale=0.9)[1].prompt_ids
    )


def test_what_is_no_trace_is_said(tmp_path):
    for name, text in (
        ("a.csv", "x,y\n1,2\n"),
        ("b.jsonl", "{"),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError):
            read_trace(tmp_path / name, limit=5)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "missing.csv", limit=5)


def test_statistics():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 50) == 5.0
    good = Record(0.0, 0.1, 0.2, [1.1, 1.2, 1.6], 1.6, 10, 0, 3)
    slow = Record(0.0, 0.0, 0.2, [9.0, 10.0], 10.0, 10, 0, 2)
    failed = Record(0.0, 0.0, error="500")
    summary = summarize([good, slow, failed], slo_ttft_s=2.0, slo_tpot_s=0.5)
    assert summary["failed"] == 1
    assert summary["errors"] == {"500": 1}
    assert summary["duration_s"] == pytest.approx(10.0)
    assert summary["output_tokens_per_s"] == pytest.approx(0.5)
    assert summary["ttft_s"]["p50"] == pytest.approx(1.0)
    assert good.tpot_s == pytest.approx(0.25)
    assert summary["itl_s"]["p99"] == pytest.approx(1.0)
    assert summary["goodput_requests_per_s"] == pytest.approx(0.1)
    assert summary["slo_met"] == pytest.approx(1 / 3)
    assert summary["lateness_s"]["p99"] == pytest.approx(0.1)


async def test_the_generator_does_not_wait_for_responses():
    """A server that responds to nothing until all requests are there: they are sent all the same,
    and failures are counted."""
    num_seen, all_there = 0, asyncio.Event()

    async def withhold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_seen
        await reader.readuntil(b"\r\n\r\n")
        num_seen += 1
        if num_seen == 8:
            all_there.set()
        await all_there.wait()
        writer.close()

    server = await asyncio.start_server(withhold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    items = [Item(0.02 * i, [1, 2], 4) for i in range(8)]
    records = await run_load(f"http://127.0.0.1:{port}/v1", "x", items)
    server.close()
    assert num_seen == 8
    assert all(record.error for record in records)
    assert all(record.sent_s >= record.due_s for record in records)


def test_policies(tiny_folder, tmp_path):
    done = bench(
        "policies",
        str(tiny_folder),
        "-r",
        "5",
        "--json",
        str(tmp_path / "p.json"),
        "--plot",
        str(tmp_path),
        *SIZES,
    )
    assert done.exit_code == 0, done.output
    assert "5 requests over 8 slots" in done.output
    assert set(json.loads((tmp_path / "p.json").read_text())) == set(POLICIES)
    assert (tmp_path / "policies.png").is_file()


@pytest.mark.parametrize(
    "arguments", [("latency", "--repeats", "1"), ("throughput", "-r", "3", "--max-requests", "2")]
)
def test_offline(tiny_folder, arguments):
    done = bench(*arguments, str(tiny_folder), *SIZES)
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.output


def test_the_chart_shows_the_figures_of_the_documentation():
    cpu = {
        group.name: group.speeds
        for group in cpu_groups((DOCS / "lab/cpu.md").read_text(encoding="utf-8"))
    }
    gpu = {
        group.name: group.speeds
        for group in gpu_groups((DOCS / "lab/gpu.md").read_text(encoding="utf-8"), "llama8b", "D")
    }
    assert len(cpu) == 4
    assert len(gpu) == 6
    for speeds in (*cpu.values(), *gpu.values()):
        assert max(speed for engine, speed in speeds.items() if engine != "Tidemill") == 1
    table = "| m | vLLM | A |\n|---|---|---|\n" + "".join(
        f"| {name} | 4.00 s | **2.5 s** |\n" for name in GPU_NAMES
    )
    assert [group.speeds for group in gpu_groups(table, "m", "A")] == [
        {"Tidemill": pytest.approx(1.6), "vLLM": 1}
    ] * len(GPU_NAMES)
