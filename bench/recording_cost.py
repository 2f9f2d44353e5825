"""What recording costs: two servers, one of which records, get the same load in turns.

    python -m bench.recording_cost [--turns 6] [--requests 100] [--model smollm2]

Prints the median ratios of throughput and of the servers' CPU time over the turns, and how long the
calls take that the server's event loop makes for a request and for a step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from bench.mixed_load import engines_of
from bench.ports import reserved_port
from bench.tiny_models import make
from tidemill.config import EngineOptions
from tidemill.record.writer import RecordingWriter
from tidemill.server.observe.recorder import Recorder
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

_TICKS = 100.0  # a second, of /proc
_STEPS = 500


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its engines."""
    total = 0.0
    for each in (pid, *engines_of(pid)):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def burst(url: str, num: int) -> float:
    """Seconds for so many requests, eight at a time."""

    def one(number: int) -> None:
        body = {
            "prompt": f"{number} tides " * 20,
            "max_tokens": 64,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        assert client.post("/v1/completions", json=body).status_code == 200

    with httpx.Client(base_url=url, timeout=None) as client, ThreadPoolExecutor(8) as threads:
        began = time.monotonic()
        list(threads.map(one, range(num)))
        return time.monotonic() - began


def start(model: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "serve",
        model,
        "--port",
        str(port),
        "--no-request-log",
        "--speculate",
        "off",
    ]
    process = subprocess.Popen(
        [*command, "--threads", "1", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return process
        assert process.poll() is None, "the server has ended"
        time.sleep(0.2)


def shown_ms(call: Callable[[], Any], num: int = 300) -> str:
    """The median and the longest of so many calls."""
    times = []
    for _ in range(num):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return f"{statistics.median(times):.3f} ms, at most {max(times):.3f} ms"


def calls(folder: Path, model: Path) -> None:
    """Times of what the event loop does itself."""
    from tidemill.config import EngineConfig  # only its name is needed below
    from tidemill.engine.load import load_core
    from tidemill.types.wire import Ready

    writer = RecordingWriter(folder / "calls")
    recorder = Recorder(writer, "tiny", model, EngineOptions(model=str(model)))
    names = [f"tenant/cmpl-{number:032x}/0" for number in range(256)]
    planned = events.StepPlanned(
        1.0, 1, 256, 512, 256, 0, 256, 0, 100, tuple((name, 1) for name in names)
    )
    batch: list[Event] = [planned, events.StepDone(1.0, 1, 0.01, 256)]
    print(f"a step of 256 requests: {shown_ms(lambda: recorder.take(batch))}")
    began = time.process_time()
    for _ in range(_STEPS):
        recorder.take(batch)
    while writer.num_behind:
        time.sleep(0.01)
    cpu_ms = 1000 * (time.process_time() - began) / _STEPS
    print(
        f"the same with its writing: {cpu_ms:.3f} ms of CPU time, {writer.num_bytes / _STEPS:,.0f} bytes"
    )
    core = load_core(EngineOptions(model=str(model)))
    config: EngineConfig = core.config
    ready = Ready(core.model_config, config)
    for length in (100, 10_000, 100_000):
        request = Submit(f"r{length}", [7] * length, SamplingParams(seed=1))

        def begin_and_end(request: Submit = request) -> None:
            recorder.begin(request, ready, None, "/v1/completions")
            recorder.end(request.request_id, "")

        while writer.num_behind:
            time.sleep(0.1)
        print(f"a request of {length:,} tokens: {shown_ms(begin_and_end, 60)}")
    writer.close()
    core.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--model", help="by default a tiny one, whose steps take a millisecond")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, reserved_port() as first, reserved_port() as second:
        folder = Path(name)
        make(folder / "tiny", "full")
        model = given.model or str(folder / "tiny")
        calls(folder, folder / "tiny")
        servers = {
            "plain": start(model, first),
            "records": start(model, second, "--record", str(folder / "day")),
        }
        urls = {"plain": f"http://127.0.0.1:{first}", "records": f"http://127.0.0.1:{second}"}
        try:
            for url in urls.values():
                burst(url, 20)
            walls: list[float] = []
            cpus: list[float] = []
            for turn in range(given.turns):
                took, used = {}, {}
                for kind in sorted(urls, reverse=bool(turn % 2)):
                    before = cpu_s(servers[kind].pid)
                    took[kind] = burst(urls[kind], given.requests)
                    used[kind] = cpu_s(servers[kind].pid) - before
                walls.append(took["plain"] / took["records"])
                cpus.append(used["records"] / used["plain"])
                print(
                    f"turn {turn}: throughput {walls[-1]:.3f}, CPU time {cpus[-1]:.3f} of the one that does not record",
                    flush=True,
                )
            print(
                f"median: throughput {statistics.median(walls):.3f}, CPU time {statistics.median(cpus):.3f}"
            )
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
