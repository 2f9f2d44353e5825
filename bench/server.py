"""Cost of the server itself: streams from a model that costs nothing.

    python -m bench.server [--streams 1,32,256] [--tokens 200] [--step-ms 0]

The engine is real except for its runner, which returns a token at once, or after `--step-ms`.
Reported per number of concurrent streams: requests and tokens per second, tokens per chunk (more
than one if the server falls behind), the API process's CPU time per token (so: tokens per second
that one core could stream), and the time between a stream's chunks. The load generator reads raw
sockets; with fewer cores than processes the rates are those of all together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tidemill.config import EngineConfig
    from tidemill.models.base import Model
    from tidemill.sched.plan import StepPlan
    from tidemill.types.events import Event
    from tidemill.types.wire import Pages

PORT = 8437


def serve(folder: str) -> None:
    """The API process, over an engine process that runs `bench.server engine`."""
    from tidemill.cli.serve import run_loop
    from tidemill.config import EngineOptions
    from tidemill.engine.client import EngineClient
    from tidemill.engine.link import EngineLink
    from tidemill.server.generation.models import Served
    from tidemill.server.http.context import RequestLog
    from tidemill.server.http.listen import Listen
    from tidemill.server.run import serve as run
    from tidemill.server.store.storage import Storage

    class StubLink(EngineLink):
        module = "bench.server"

    class StubFleet:
        num_at_most = 1

        def client(
            self,
            on_events: Callable[[list[Event]], None],
            stall_s: float,
            on_pages: Callable[[Pages], None],
            start_s: float,
        ) -> EngineClient:
            return EngineClient(on_events, stall_s, on_pages, start_s, StubLink)

    options = EngineOptions(
        model=folder,
        served_name="stub",
        max_requests=256,
        token_budget=4096,
        max_context=2048,
        speculate="off",
    )
    log, data = RequestLog(Path(folder) / "requests.log"), Storage(Path(folder) / "data", 2**30)
    run_loop(run([Served(options)], Listen(port=PORT), data=data, log=log, fleet=StubFleet()))


def engine() -> None:
    from tidemill.engine import load, process
    from tidemill.runner.base import StepResult

    step_s = float(os.environ.get("STEP_MS", "0")) / 1000

    class StubRunner:
        steps_ahead = 0
        fallback = ""
        mover = loras = None

        def __init__(self, model: Model, config: EngineConfig) -> None:
            self._next_s = 0.0

        @property
        def cache(self) -> torch.Tensor:
            raise NotImplementedError("nothing is stored")

        def launch(self, plan: StepPlan) -> StepResult:
            self._next_s = max(self._next_s + step_s, time.monotonic())
            time.sleep(max(self._next_s - time.monotonic(), 0.0))
            return StepResult({item.row: [97] for item in plan.items if item.samples})

        def change_pages(self, plan: StepPlan) -> None:
            """Nothing is stored."""

        def collect(self, launched: StepResult) -> StepResult:
            return launched

    load.make_runner = StubRunner  # type: ignore[attr-defined, assignment]
    process.main()


async def one(prompt: int, num_tokens: int, gaps: list[float]) -> tuple[int, int]:
    """Number of chunks and of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    body = json.dumps(
        {
            "prompt": [97] * prompt,
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    num_chunks, last, text = 0, 0.0, b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            num_chunks, text = num_chunks + 1, line
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
    writer.close()
    usage: dict[str, int] = json.loads(text[6:])["usage"]
    return num_chunks, usage["completion_tokens"]


async def load(
    num_streams: int, num_requests: int, num_tokens: int
) -> tuple[float, int, int, list[float]]:
    gaps: list[float] = []
    left = asyncio.Semaphore(num_streams)

    async def send() -> tuple[int, int]:
        async with left:
            return await one(16, num_tokens, gaps)

    begin = time.perf_counter()
    counts = await asyncio.gather(*(send() for _ in range(num_requests)))
    num_chunks, num = map(sum, zip(*counts, strict=True))
    return time.perf_counter() - begin, num_chunks, num, gaps


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step of the model")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    from tests.helpers import byte_tokenizer, make_llama

    folder = Path(tempfile.mkdtemp())
    make_llama(folder, vocab_size=320, max_position_embeddings=2048)
    byte_tokenizer(folder)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "STEP_MS": str(arguments.step_ms)}
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.server", "serve", str(folder)], env=environment
    )
    try:
        asyncio.run(wait())
        lines = []
        for num_streams in map(int, arguments.streams.split(",")):
            num_requests = max(20, 2 * num_streams)
            asyncio.run(load(num_streams, num_streams, arguments.tokens))
            before = cpu_seconds(server.pid)
            seconds, num_chunks, num_tokens, gaps = asyncio.run(
                load(num_streams, num_requests, arguments.tokens)
            )
            cpu = cpu_seconds(server.pid) - before
            line = {
                "streams": num_streams,
                "requests_per_s": num_requests / seconds,
                "tokens_per_s": num_tokens / seconds,
                "tokens_per_chunk": num_tokens / num_chunks,
                "api_us_per_token": 1e6 * cpu / num_tokens,
                "tokens_per_core_s": num_tokens / cpu,
                "gap_ms_median": 1000 * statistics.median(gaps),
            }
            lines.append(line)
            print({name: round(value, 2) for name, value in line.items()}, flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(lines, indent=1))
    finally:
        server.terminate()
        server.wait(20)


async def wait() -> None:
    for _ in range(300):
        try:
            await one(1, 1, [])
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise TimeoutError("the server did not start")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif len(sys.argv) > 1 and sys.argv[1].startswith("ipc://"):
        engine()
    else:
        main()
