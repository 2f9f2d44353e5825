"""A long run at saturation: does memory stay flat, does latency drift, do the counters balance?

    python -m bench.soak [--minutes 20] [--model smollm2] [--clients 24]

There are more clients than slots, and each sends the next request as soon as it has a response:
prompts of all lengths, many with a shared prefix, streamed and not, some with structured output,
some with several samples, some aborted by their client in the middle. Memory and counters are read
every few seconds. The verdict is computed; the exit status is 1 if it is bad:

- memory: the resident size of all processes, fitted by a line after the warm-up, grows by less than 3 % over the rest;
- work: processor time per computed token in the last third is at most 25 % above that in the first, which does not depend
  on other load of the machine;
- latency: the median time between tokens in the last third is at most twice that in the first, which does depend on it;
- integrity: every response was complete, all submitted requests have ended, every page is free again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.ports import reserved_port
from tidemill.bench.plots import _pyplot, _save
from tidemill.bench.workload import Item, synthetic
from tidemill.client import AsyncClient, Client
from tidemill.errors import TidemillError

SAMPLE_EVERY_S = 5.0
WARM_UP = 0.2  # of the run
SHAPE = {
    "type": "object",
    "properties": {"port": {"enum": ["Brest", "Hull"]}, "metres": {"type": "integer"}},
    "required": ["port"],
}


@dataclass
class Run:
    begun_s: float
    end_s: float
    ttft: list[tuple[float, float]] = field(default_factory=list)  # when, how long
    gaps: list[tuple[float, float]] = field(default_factory=list)
    completed: dict[str, int] = field(default_factory=dict)  # by kind
    wrong: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)


async def client(run: Run, http: AsyncClient, items: list[Item], seed: int) -> None:
    rng = random.Random(seed)
    kinds = {"streamed": 70, "whole": 12, "structured": 10, "aborted": 8}
    while time.monotonic() < run.end_s:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        item = rng.choice(items)
        body: dict[str, Any] = {
            "prompt": item.prompt_ids,
            "max_tokens": item.num_output,
            "ignore_eos": True,
            "stream": True,
        }
        if kind == "whole":
            body |= {"stream": False, "n": 2, "logprobs": 2, "temperature": 0.8, "seed": seed}
        elif kind == "structured":
            body = {
                "prompt": "How high is the tide? ",
                "max_tokens": 60,
                "structured_outputs": {"json": SHAPE},
                "stream": True,
            }
        try:
            await send(run, http, kind, body, rng.randrange(1, 8))
            run.completed[kind] = run.completed.get(kind, 0) + 1
        except (TidemillError, ValueError, KeyError, AssertionError) as error:
            run.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])


async def send(
    run: Run, http: AsyncClient, kind: str, body: dict[str, Any], abort_after: int
) -> None:
    """One request, with a check of its response."""
    sent = last = time.monotonic()
    num, text = 0, ""
    if not body["stream"]:
        found = await http.json("POST", "/v1/completions", body)
        assert found["usage"]["completion_tokens"] == 2 * body["max_tokens"], "tokens are missing"
        return
    async with http.stream("/v1/completions", body) as chunks:
        async for found in chunks:
            now = time.monotonic()
            (run.gaps if num else run.ttft).append(
                (now - run.begun_s, now - last if num else now - sent)
            )
            num, last, text = num + 1, now, text + found["choices"][0]["text"]
            if kind == "aborted" and num >= abort_after:
                return
    if kind == "structured" and found["choices"][0]["finish_reason"] == "stop":
        assert json.loads(text)["port"] in ("Brest", "Hull"), text


# ---- measurements


def processes(pid: int) -> list[int]:
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return [pid, *children]


def is_engine(pid: int) -> bool:
    return b"tidemill.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()


def resident_mb(pid: int) -> float:
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def counters(http: AsyncClient) -> dict[str, float]:
    """By name; of those with labels, the sum."""
    found: dict[str, float] = {}
    for line in (await http.send("GET", "/metrics")).text.splitlines():
        if line.startswith("tidemill_") and "_bucket" not in line:
            name, _, value = line.removeprefix("tidemill_").rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def sample(run: Run, http: AsyncClient, pid: int) -> None:
    while True:
        engine = [one for one in processes(pid) if is_engine(one)]
        others = [one for one in processes(pid) if one not in engine]
        found = await counters(http)
        run.samples.append(
            {
                "at_s": time.monotonic() - run.begun_s,
                "server_mb": sum(map(resident_mb, others)),
                "engine_mb": sum(map(resident_mb, engine)),
                "cpu_s": sum(map(cpu_s, [*engine, *others])),
                "load": os.getloadavg()[0],
            }
            | {
                name: found.get(name, 0.0)
                for name in (
                    "computed_tokens_total", "output_tokens_total", "requests_submitted_total", "requests_finished_total",
                    "requests_running", "requests_waiting", "kv_pages_free", "preemptions_total", "cached_tokens_total",
                )
            }
        )  # fmt: skip
        await asyncio.sleep(SAMPLE_EVERY_S)


async def settle(http: AsyncClient) -> dict[str, float]:
    """The counters, once no request is running or queued."""
    found: dict[str, float] = {}
    for _ in range(600):
        found = await counters(http)
        if found["requests_running"] == found["requests_waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    return found


async def go(
    url: str, pid: int, seconds: float, num_clients: int
) -> tuple[Run, dict[str, float], dict[str, float]]:
    items = [
        item
        for seed, (prompt, output, prefix) in enumerate(
            [(40, 30, 0), (150, 50, 0), (60, 40, 200), (400, 20, 0), (20, 120, 64)]
        )
        for item in synthetic(
            60, prompt, output, spread=0.8, shared_prefix=prefix, vocab=300, seed=seed
        )
    ]
    async with AsyncClient(url, keep_alive=False) as http:
        run = Run(time.monotonic(), 0.0)
        await send(
            run,
            http,
            "streamed",
            {"prompt": "x", "max_tokens": 2, "stream": True, "ignore_eos": True},
            0,
        )
        before = await settle(http)
        run = Run(time.monotonic(), time.monotonic() + seconds)
        sampling = asyncio.create_task(sample(run, http, pid))
        await asyncio.gather(*(client(run, http, items, seed) for seed in range(num_clients)))
        sampling.cancel()
        return run, before, await settle(http)


# ---- verdict


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] if ordered else 0.0


def by_minute(points: list[tuple[float, float]], seconds: float) -> list[dict[str, float]]:
    width = min(60.0, seconds / 10)
    found = []
    for number in range(int(seconds / width)):
        values = [value for at, value in points if number * width <= at < (number + 1) * width]
        found.append(
            {"at_s": (number + 0.5) * width}
            | {f"p{p}_ms": 1000 * percentile(values, p) for p in (50, 90, 99)}
        )
    return found


def judge(
    run: Run, before: dict[str, float], after: dict[str, float], seconds: float
) -> dict[str, Any]:
    late = [one for one in run.samples if one["at_s"] >= WARM_UP * seconds]
    times, sizes = (
        [one["at_s"] for one in late],
        [one["server_mb"] + one["engine_mb"] for one in late],
    )
    slope, start = statistics.linear_regression(times, sizes)
    growth = slope * (times[-1] - times[0]) / (start + slope * times[0])

    def work(begin: float, end: float) -> float:
        part = [one for one in run.samples if begin * seconds <= one["at_s"] <= end * seconds]
        return (part[-1]["cpu_s"] - part[0]["cpu_s"]) / (
            part[-1]["computed_tokens_total"] - part[0]["computed_tokens_total"]
        )

    def gap(begin: float, end: float) -> float:
        return percentile(
            [value for at, value in run.gaps if begin * seconds <= at < end * seconds], 50
        )

    thirds = [WARM_UP, WARM_UP + (1 - WARM_UP) / 3, WARM_UP + 2 * (1 - WARM_UP) / 3, 1.0]
    more_work = work(thirds[2], thirds[3]) / work(thirds[0], thirds[1]) - 1
    more_gap = gap(thirds[2], thirds[3]) / gap(thirds[0], thirds[1]) - 1
    balanced = after["requests_submitted_total"] == after["requests_finished_total"]
    verdict = {
        "memory": growth < 0.03,
        "work": more_work < 0.25,
        "latency": more_gap < 1.0,
        "integrity": not run.wrong
        and balanced
        and after["kv_pages_free"] == before["kv_pages_free"],
    }
    return {
        "verdict": verdict,
        "memory_growth": growth,
        "memory_slope_mb_per_hour": 3600 * slope,
        "work_per_token_growth": more_work,
        "latency_growth": more_gap,
        "completed": run.completed,
        "wrong": run.wrong[:20],
        "submitted": after["requests_submitted_total"],
        "ended": after["requests_finished_total"],
        "free_pages": [before["kv_pages_free"], after["kv_pages_free"]],
        "preemptions": after["preemptions_total"],
        "output_tokens_per_s": after["output_tokens_total"] / seconds,
        "ttft": by_minute(run.ttft, seconds),
        "gap": by_minute(run.gaps, seconds),
        "samples": run.samples,
    }


def draw(found: dict[str, Any], title: str, path: Path) -> None:
    figure, axes = _pyplot().subplots(4, 1, figsize=(9, 10), sharex=True)
    samples = found["samples"]
    minutes = [one["at_s"] / 60 for one in samples]
    for name, label in (("engine_mb", "engine"), ("server_mb", "server and its workers")):
        axes[0].plot(minutes, [one[name] for one in samples], label=label)
    axes[0].set(ylabel="resident, MiB", ylim=(0, None), title=title)
    for axis, name, label in (
        (axes[1], "ttft", "time to first token, ms"),
        (axes[2], "gap", "between tokens, ms"),
    ):
        for percent in ("p50_ms", "p90_ms", "p99_ms"):
            axis.plot(
                [one["at_s"] / 60 for one in found[name]],
                [one[percent] for one in found[name]],
                label=percent[:-3],
            )
        axis.set(ylabel=label, ylim=(0, None))
    axes[3].plot(minutes, [one["requests_running"] for one in samples], label="running")
    axes[3].plot(minutes, [one["requests_waiting"] for one in samples], label="queued")
    axes[3].plot(
        minutes,
        [one["load"] for one in samples],
        label="load of the whole machine",
        color="#999999",
    )
    axes[3].set(ylabel="requests", ylim=(0, None), xlabel="minutes")
    for axis, place in zip(
        axes, ("center right", "upper right", "upper right", "lower center"), strict=True
    ):
        axis.grid(alpha=0.3)
        axis.legend(loc=place, fontsize=8, ncol=3)
    _save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--json", type=Path, default=Path("soak.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images/soak.png"))
    given = parser.parse_args()
    with reserved_port() as port:
        soak(given, port)


def soak(given: argparse.Namespace, port: int) -> None:
    # Few enough pages that all are in use by the end of the warm-up: a page takes memory when it is
    # first written.
    options = [
        "--port",
        str(port),
        "--kv-memory",
        "128MiB",
        "--max-requests",
        "16",
        "--no-request-log",
    ]
    server = subprocess.Popen([sys.executable, "-m", "tidemill", "serve", given.model, *options])
    try:
        url = f"http://127.0.0.1:{port}"
        wait(url, server)
        run, before, after = asyncio.run(go(url, server.pid, 60 * given.minutes, given.clients))
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    found = judge(run, before, after, 60 * given.minutes)
    found |= {"exit_status": status, "model": given.model, "clients": given.clients}
    given.json.write_text(json.dumps(found, indent=1))
    draw(found, f"{given.clients} clients on {given.model}, {given.minutes:g} minutes", given.plot)
    print(
        json.dumps(
            {
                name: value
                for name, value in found.items()
                if name not in ("samples", "ttft", "gap")
            },
            indent=1,
        )
    )
    sys.exit(0 if all(found["verdict"].values()) and status == 0 else 1)


def wait(url: str, server: subprocess.Popen) -> None:
    with Client(url) as http:
        while server.poll() is None:
            try:
                http.json("GET", "/health")
                return
            except TidemillError:
                time.sleep(0.2)
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
