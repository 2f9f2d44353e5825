"""`python -m tidemill.engine ENDPOINT`: the engine process. On a GPU the compile server imports
torch while this process does."""

from __future__ import annotations

import signal

from tidemill.kernels.cuda import compile_server


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    compile_server.start()
    from tidemill.engine.process import main as run

    run()


if __name__ == "__main__":
    main()
