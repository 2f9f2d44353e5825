"""`tidemill worker`: a rank of a model that is served from another host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.config.keys import read_key
from tidemill.errors import ConfigError

_AGAIN_S = 1.0  # after a group has failed


def worker(
    join: Annotated[str, typer.Option(help="HOST:PORT: the --workers-address of the server.")],
    key_file: Annotated[
        str, typer.Option(help="The server's --workers-key-file, copied to this host.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The model, if it lies elsewhere here than on the server's host."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="CPU threads. Default: as many as the server's."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for a server to come to this address.")
    ] = 600.0,
) -> None:
    """Compute a part of a model for a server on another host. That server has --remote-workers. One
    process; start several for several ranks.

    If the server's engine fails, the worker waits for it to start again. It ends when the server is
    stopped."""
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--join is {join!r}.", fix="Give HOST:PORT, like 10.0.0.1:29500.", param="join"
        )
    start = {
        "address": [host, int(port)],
        "key": read_key(key_file).hex(),
        "rank": -1,
        "parent": os.getpid(),
    }
    start |= {"model": model, "threads": threads, "within_s": wait}
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        console.print(f"Joining {join} …", markup=False)
        code = run_once(start)
        if code in (0, 2):  # else it failed, or was killed
            raise typer.Exit(0 if code == 0 else 1)
        time.sleep(_AGAIN_S)


def run_once(start: dict[str, Any]) -> int:
    """Until its group ends: 0 in good order, 1 if it failed, 2 if it cannot be joined."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tidemill.engine.worker"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(start).encode() + b"\n")
        process.stdin.flush()
        return process.wait()
    finally:
        process.kill()
        process.wait()
