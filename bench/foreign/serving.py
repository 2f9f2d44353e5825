"""`tidemill serve` as a process of its own, started with the flags that a foreign suite gives its
server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.ports import reserved_port

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 400.0
WORK = Path(os.environ.get("TIDEMILL_FOREIGN_WORK", "."))
# what stands for a model of no special kind in this file
MODEL = os.environ.get("TIDEMILL_FOREIGN_MODEL", "small")
_reserved = contextlib.ExitStack()
CHECKOUT = Path(os.environ.get("TIDEMILL_FOREIGN_CHECKOUT", "."))


def model_path(name: str) -> str:
    made = WORK.parent / "models" / name
    return str(made) if made.exists() else name


def tokenizer_path() -> str:
    """The packaged model is a GGUF; the small random one has its tokenizer."""
    return model_path("small" if MODEL == "smollm2" else MODEL)


def free_port() -> int:
    """A port that nobody else is given while this process runs."""
    return _reserved.enter_context(reserved_port())


class Served:
    """Ready when the constructor returns. `socket_path`: a unix socket in place of a port."""

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        port: int = 0,
        socket_path: str = "",
        env: dict[str, str] | None = None,
    ):
        self.port = port or free_port()
        place = [] if socket_path else ["--port", str(self.port)]
        common = [
            "--threads",
            "1",
            "--kv-memory",
            "200MB",
            "--data-dir",
            str(WORK / "data" / str(self.port)),
        ]
        command = [sys.executable, "-P", "-m", "tidemill", "serve", model, *common, *flags, *place]
        self._log = WORK / "server.log"
        with self._log.open("a") as log:
            log.write(f"\n=== {' '.join(command)}\n")
            log.flush()
            told = os.environ | (env or {}) | {"PYTHONPATH": str(REPOSITORY)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=told)
        self._wait_ready(socket_path)

    def _wait_ready(self, socket_path: str) -> None:
        end = time.monotonic() + START_S
        transport = httpx.HTTPTransport(uds=socket_path) if socket_path else None
        with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{self.port}") as client:
            while time.monotonic() < end:
                if self.process.poll() is not None:
                    raise RuntimeError(
                        "the server ended: " + self._log.read_text().rpartition("===")[2][-600:]
                    )
                try:
                    if client.get("/health", timeout=5).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(0.2)
        self.stop()
        raise TimeoutError(f"the server was not ready after {START_S} s")

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def translated(
    flags: Sequence[str], dropped: dict[str, int], replaced: dict[str, str] | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Their flags without those in `dropped`, which are returned with their values.

    `dropped`: a flag and how many values follow it; -1: all up to the next flag.
    """
    kept: list[str] = []
    taken: dict[str, list[str]] = {}
    waiting = [str(flag) for flag in flags]
    while waiting:
        flag, *waiting = waiting
        name, equals, value = flag.partition("=")
        name = name.replace("_", "-")
        if name not in dropped:
            kept.append((replaced or {}).get(flag, flag))
            continue
        count = 0 if equals else dropped[name]
        if count < 0:
            count = next(
                (i for i, word in enumerate(waiting) if word.startswith("-")), len(waiting)
            )
        taken[name] = [value] if equals else waiting[:count]
        waiting = waiting[count:]
    return kept, taken
