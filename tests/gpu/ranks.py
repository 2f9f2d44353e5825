"""Ranks as processes that share one GPU, for tests and timings.

NCCL does not let ranks of one host share a GPU, so each gives itself another name of its host
(NCCL_HOSTID), and they talk by sockets of the loopback interface. Without the multi-process service
a GPU runs kernels of several processes in turns of about a millisecond, and a rank that waits for
another waits for its turn: it is started where it can be.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.ports import reserved_port
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.errors import WorkerLost
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

LOST = 7  # the exit code of an engine that has lost a rank
_SERVICE = "CUDA_MPS_PIPE_DIRECTORY"


def as_host(number: int) -> dict[str, str]:
    """The environment of a rank that is to be seen as one of another host."""
    off = {f"NCCL_{what}": "0" for what in ("NVLS_ENABLE", "MNNVL_ENABLE")}
    return {
        "NCCL_HOSTID": f"host-{number}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        **off,
    }


def small_core(folder: Path, **options: Any) -> Any:
    given = {
        "kv_memory_bytes": 2**27,
        "max_requests": 8,
        "token_budget": 256,
        "max_context": 512,
    } | options
    return load_core(EngineOptions(model=str(folder), **given))


def some_requests(num: int = 6) -> dict[str, Any]:
    return {
        f"r{i}": (
            [(7 * i + j) % 250 + 2 for j in range(20 + 37 * i)],
            SamplingParams(max_tokens=16, logprobs=2, seed=i),
        )
        for i in range(num)
    }


@contextlib.contextmanager
def other_host(folder: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """A worker that comes by TCP, as one of another host would. Options of the engine, and the
    worker."""
    key = folder / "key"
    key.write_text(secrets.token_hex(32))
    os.environ |= as_host(0)
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        command = ["worker", "--join", address, "--key-file", str(key)]
        worker = subprocess.Popen(
            [sys.executable, "-m", "tidemill", *command], env=os.environ | as_host(1)
        )
        try:
            yield (
                {"remote_workers": 1, "workers_address": address, "workers_key_file": str(key)},
                worker,
            )
        finally:
            worker.kill()
            worker.wait()


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(one) for each in found for one in each.read_text().split()}


@contextlib.contextmanager
def sharing(folder: Path) -> Iterator[None]:
    """The multi-process service, if it can be started. It ends when no process uses it any more, so
    this one must not."""
    os.environ |= {_SERVICE: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    try:
        service = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, check=False
        )
        print(
            "multi-process service:",
            service.returncode,
            service.stdout.strip(),
            service.stderr.strip(),
            flush=True,
        )
    except OSError as error:
        print("multi-process service: not there:", error, flush=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(
                ["nvidia-cuda-mps-control"],
                input="quit\n",
                text=True,
                check=False,
                capture_output=True,
            )


def run_for_ever(folder: Path, options: dict[str, Any]) -> None:
    """An engine that computes until it is killed, or loses a rank."""
    core = small_core(folder, **options)
    try:
        for turn in range(10**6):
            core.submit(
                Submit(
                    f"x{turn}", list(range(2, 100)), SamplingParams(max_tokens=400, ignore_eos=True)
                )
            )
            while core.has_work:
                core.step()
                if turn == 0:
                    print("computes", flush=True)
    except WorkerLost:
        os._exit(LOST)


if __name__ == "__main__":
    run_for_ever(Path(sys.argv[1]), json.loads(sys.argv[2]))
