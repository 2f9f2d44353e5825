"""`tidemill bench serve` against a server that other files share."""

import json

from typer.testing import CliRunner

from tidemill.cli.main import app

SIZES = ("--prompt-len", "20", "--output-len", "6")


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_load_on_a_server(server, tmp_path):
    figures, plots = tmp_path / "out.json", tmp_path / "plots"
    load = [
        "--base-url",
        f"{server.url}/v1",
        "--model",
        "tiny",
        "--vocab",
        "300",
        "--rate",
        "20",
        "--rate",
        "40",
        *SIZES,
    ]
    done = bench(
        "serve",
        *load,
        "-r",
        "6",
        "--slo-ttft-ms",
        "1e9",
        "--json",
        str(figures),
        "--plot",
        str(plots),
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(figures.read_text())["20 requests/s"]
    assert summary["failed"] == 0
    assert summary["slo_met"] == 1.0
    assert sorted(path.name for path in plots.iterdir()) == [
        "latency-0.png", "latency-1.png", "rates.png", "timeline-0.png", "timeline-1.png",
    ]  # fmt: skip
    wrong = bench(
        "serve", "--base-url", f"{server.url}/v1", "--model", "other", "-r", "2", "--rate", "50"
    )
    assert wrong.exit_code == 1
    assert "2 (2)" in wrong.output
    assert "refuses it (404)" in wrong.output
