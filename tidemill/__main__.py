"""The command `tidemill`, also as `python -m tidemill`."""

import signal


def main() -> None:
    # While modules are imported, Ctrl-C ends the process. As an exception it may be raised where
    # Python ignores it (a callback of the import system, one time in a hundred), and the server
    # would start all the same. A command that has started something handles it
    # (settings.raise_on_interrupt).
    # it is ignored in the background of a script
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tidemill.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
