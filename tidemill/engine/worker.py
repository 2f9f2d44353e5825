"""`python -m tidemill.engine.worker`: a rank of a group, other than that of the engine. Its standard input says how to begin.

It ends with the group: on Stop, when its parent is gone, or when another rank is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

from tidemill.errors import TidemillError
from tidemill.kernels.cuda import compile_server

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Linux ends this process when its parent ends; elsewhere, and for remote workers, the end of the input does."""
    if sys.platform == "linux":
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
    die_with_parent(start["parent"])
    threading.Thread(target=_watch_input, daemon=True).start()
    compile_server.start()
    from tidemill.engine.worker_rank import Worker  # loads torch

    try:
        worker = Worker(start)
    except TidemillError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    code = worker.run()
    sys.stdout.flush()
    os._exit(code)  # threads of channels and of the pool need not be waited for


if __name__ == "__main__":
    main()
