"""What others notice: a stream read in a process of its own while something else goes on, and how
much memory a server holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.server.conftest import Server

_READER = """
import json, socket, sys, time
port, stop, gaps = int(sys.argv[1]), False, []
body = json.dumps({"prompt": "the tide ", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}).encode()
lines = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall("\\r\\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        last = None
        for line in raw.makefile("rb"):
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
            if time.monotonic() > end:
                break
print(json.dumps(gaps))
"""


class Bystander:
    """A normal client that streams for some seconds; `gaps` are the times between its tokens,
    sorted."""

    def __init__(self, server: Server, seconds: float) -> None:
        command = [sys.executable, "-c", _READER, str(server.port), str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def gaps(self) -> list[float]:
        told, _ = self._process.communicate()
        return sorted(json.loads(told))


def percentile(ordered: list[float], percent: float) -> float:
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def resident_mb(server: Server) -> float:
    """Of the server and its engine. Its workers come and go, within bounds of their own."""
    return _resident_mb(server.process.pid) + _resident_mb(server.engine_pid())


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def _resident_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
