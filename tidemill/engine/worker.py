"""`python -m tidemill.engine.worker`: a rank of a group, other than that of the engine. Its
standard input says how to begin.

It ends with the group: on Stop, when its parent is gone, or when another rank is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

from tidemill.errors import ConfigError, TidemillError
from tidemill.kernels.cuda import compile_server

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """At once, on Linux; elsewhere the end of the input tells. `parent`: 0 if the thread that
    started this process may end before its process does."""
    if sys.platform == "linux" and parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    start = json.loads(sys.stdin.readline())
    die_with_parent(start.get("parent", 0))
    threading.Thread(target=_watch_input, daemon=True).start()
    compile_server.start()
    from tidemill.engine.worker_rank import Worker  # loads torch

    try:
        worker = Worker(start)
    except TidemillError as error:
        print(f"error: {error}", file=sys.stderr)
        os._exit(2 if isinstance(error, ConfigError) else 1)
    code = worker.run()
    sys.stdout.flush()
    os._exit(code)  # threads of channels and of the pool need not be waited for


if __name__ == "__main__":
    main()
