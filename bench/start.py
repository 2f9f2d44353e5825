"""Cold start and memory of the server: seconds from the command to the first token, and resident
memory under load.

    python -m bench.start --requests 16

The server is started three times as a user would (`tidemill serve`); the last one then serves all
requests at once. Memory is the high-water mark of the server and of its engine process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

STARTS = 3


def post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def start(port: int, model: str) -> tuple[subprocess.Popen[bytes], float]:
    """The process, and seconds until it had streamed a token."""
    begin = time.perf_counter()
    command = [str(Path(sys.executable).with_name("tidemill")), "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "max_tokens": 4,
    }
    while process.poll() is None:
        try:
            reply = post(port, "/v1/chat/completions", question)
        except ConnectionRefusedError:
            time.sleep(0.02)
            continue
        while line := reply.readline():
            if re.search(rb'"content":"[^"]', line):
                return process, time.perf_counter() - begin
    raise SystemExit(f"the server ended with {process.returncode}")


def peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--requests", type=int, default=16)
    given = parser.parse_args()
    seconds = []
    for attempt in range(STARTS):
        process, took = start(given.port, given.model)
        seconds.append(took)
        if attempt < STARTS - 1:
            process.send_signal(signal.SIGTERM)
            process.wait()

    def send(i: int) -> None:
        prompt = [100 + (7919 * i + 31 * k) % 40_000 for k in range(128)]
        body = {
            "model": given.model,
            "prompt": prompt,
            "max_tokens": 128,
            "ignore_eos": True,
            "temperature": 0,
            "repetition_penalty": 1,
        }
        assert (
            json.loads(post(given.port, "/v1/completions", body).read())["usage"][
                "completion_tokens"
            ]
            == 128
        )

    threads = [threading.Thread(target=send, args=(i,)) for i in range(given.requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    server, engine = peak_mb(process.pid), sum(peak_mb(int(child)) for child in children)
    process.send_signal(signal.SIGTERM)
    process.wait()
    print(f"command to first token: {statistics.median(seconds):.2f} s (median of {STARTS})")
    print(
        f"resident with {given.requests} requests: {server + engine:.0f} MB (engine {engine:.0f}, server {server:.0f})"
    )


if __name__ == "__main__":
    main()
